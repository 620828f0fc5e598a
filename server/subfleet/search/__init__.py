"""Search for the subnet that uses most of what a device can give now, and is never over it.

A price says what a subnet costs, a query what one device can give, a search answers with a subnet. A search keeps a
pool of subnets that it knows; the pool is plain data, and a search that learns the same pool goes on in the same way.
"""

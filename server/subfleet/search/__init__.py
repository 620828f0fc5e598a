"""Search for the submodel that uses most of what a device can give now, and is never over it.

A cost estimate says what a submodel costs, a query what one device can give, a search answers with a submodel. A search
keeps a pool of submodels that it knows; the pool is plain data, and a search that learns the same pool goes on in the
same way.
"""

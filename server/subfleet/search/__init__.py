"""Search for the submodel that uses most of what a device can give now, and never exceeds it.

A cost estimate gives the costs of a submodel, a query what one device can give; a search answers with a submodel. A
search keeps a pool of submodels that it knows. The pool is plain data, and a search that learns the same pool continues
the same way.
"""

"""A step as a graph in one form, whatever the network was written like: the passes before lowerings, in their order.

capture    autograd done, every change in place a new tensor: no operator changes what it is given
cleaning   what only matters to memory is gone: detached and cloned tensors are the tensors, a copy is what it copies,
           a view has all its sizes; so is what no result depends on
constants  what follows from constants alone is a constant; equal ones are one
checks     nothing is left that no program can do: randomness of its own, another type, a constant that changes
"""

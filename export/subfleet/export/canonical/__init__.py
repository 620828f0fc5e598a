"""A step's graph in one form, independent of how the network was written: the passes before lowerings, in order.

capture    autograd is done, and every change in place is a new tensor: no operator changes its inputs
cleaning   operators that only affect memory are gone: a detached or cloned tensor is the tensor, a copy is its source,
           a view has all its sizes; so is everything that no result depends on. What depends on constants only is a
           constant; equal ones are one
checks     nothing remains that no program can do: its own randomness, another type, a constant that changes
masks      the gradient of a pooled ReLU is masked where it is smallest; one that may be infinite is selected
"""

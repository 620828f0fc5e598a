"""Reference results of steps: the original module with PyTorch's own losses, gradients and optimisers.

It shares no arithmetic with the step: no replaced layer, no lowering, no objective or optimiser of this package. It
only takes the real samples, so it also defines the result of padding. Programs are compared with it in double
precision; in single precision it shows PyTorch's own error.
"""

from subfleet.export.steps.reference.step_references import ForwardReference, TrainingReference

__all__ = ["ForwardReference", "TrainingReference"]

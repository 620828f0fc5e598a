"""What a step must compute: the untouched module under PyTorch's own losses, gradients and optimisers.

It shares no arithmetic with the step: no replaced layer, no lowering, no objective or optimiser of ours. It takes the
real samples alone, so it also says what padding must come to. In double precision it is what a program is compared
with; in single precision it says how far PyTorch itself is from that.
"""

from subfleet.export.steps.reference.step_references import EvaluationReference, InferenceReference, TrainingReference

__all__ = ["EvaluationReference", "InferenceReference", "TrainingReference"]

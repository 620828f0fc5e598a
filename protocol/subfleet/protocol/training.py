"""Settings of local training: the objective, the optimiser, and the numbers of one round."""

import fractions
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.limits import MAX_SINGLE, Count, Fraction, Positive, PositiveFraction
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task_kinds import TASK_KINDS, Objective, TaskKind

__all__ = ["AugmentationSettings", "ObjectiveSettings", "OptimiserSettings", "TrainingSettings"]

Distillation = Literal["none", "self", "mutual"]
Single = Annotated[float, Range(least=0, below=MAX_SINGLE, words="0 or more, of single precision, below 2^128")]
PositiveSingle = Annotated[float, Range(above=0, below=MAX_SINGLE, words="above 0, below 2^128")]
Decay = Annotated[float, Range(least=0, below=1)]


def _check_classes(
    name: Objective, label_smoothing: float, class_mask: bool, distillation: Distillation
) -> Iterator[str]:
    if not TASK_KINDS[name].over_classes and (label_smoothing or class_mask or distillation != "none"):
        yield f"objective {name!r} knows no classes, but label_smoothing, class_mask and distillation need some"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_classes)
class ObjectiveSettings:
    """The objective of a training step. Coefficients are inputs of the step, not part of it.

    Attributes:
        name: "cross_entropy" of one class index for each sample; "next_token" the same for each token of a sequence;
            "dense_cross_entropy" the same for each pixel of an image; "binary_cross_entropy" of one probability for
            each output; "mean_squared_error" of each output.
        label_smoothing: fraction of the target that is spread evenly over all classes, 0 up to, not including, 1.
        class_mask: logits of the classes that a client lacks count as 0 (HeteroFL, section 3.3).
        proximal: adds mu / 2 times the squared distance from the first weights (FedProx, section 3.2).
        distillation: "self" adds FjORD's loss of a submodel nested in the network (FjORD, section 3.3); "mutual"
            DepthFL's term between the exits of a network (DepthFL, section 3.2).
        temperature: of the distillation term, above 0.
        squares: whether the step also sums the squares of the labels' losses, for methods that choose clients by them
            (Oort, section 4.2); of the prediction alone, without distillation.
    """

    name: Objective = "cross_entropy"
    label_smoothing: Annotated[float, Range(least=0, below=1)] = 0.0
    class_mask: bool = False
    proximal: bool = False
    distillation: Distillation = "none"
    temperature: PositiveSingle = 1.0
    squares: bool = field(default=False, metadata=ADDED_LATER)

    @property
    def kind(self) -> TaskKind:
        """The kind of task."""
        return TASK_KINDS[self.name]

    @property
    def over_classes(self) -> bool:
        """Whether labels are indices of classes."""
        return self.kind.over_classes

    @property
    def padded(self) -> bool:
        """Whether labels below 0 are usual: tokens behind the end of a text, pixels without a class."""
        return self.over_classes and self.kind.places != "sample"

    @property
    def plain(self) -> "ObjectiveSettings":
        """The objective without training-only terms, as in evaluations."""
        return ObjectiveSettings(name=self.name)


def _check_nesterov(nesterov: bool, momentum: float, dampening: float) -> Iterator[str]:
    if nesterov and (momentum == 0 or dampening > 0):
        yield f"nesterov needs momentum and no dampening, but they are {momentum} and {dampening}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_nesterov)
class OptimiserSettings:
    """The local optimiser. Its state starts at zero every round, as in every reference implementation.

    Attributes:
        name: "sgd", "adam" or "adamw"; each computes what the class of that name in `torch.optim` does.
        momentum: of sgd, 0 (none) up to, not including, 1.
        dampening: of sgd's momentum, 0 up to 1.
        nesterov: of sgd; needs momentum and no dampening.
        weight_decay: coefficient added to the gradient, or with adamw taken off the weight, 0 or more.
        beta1: decay of adam's first moment, 0 up to, not including, 1.
        beta2: decay of adam's second moment, 0 up to, not including, 1.
        epsilon: added to adam's divisor, above 0.
        max_gradient_norm: gradients of a larger global norm are scaled down to it; 0 lets them be.
    """

    name: Literal["sgd", "adam", "adamw"] = "sgd"
    momentum: Decay = 0.9
    dampening: Fraction = 0.0
    nesterov: bool = False
    weight_decay: Single = 0.0
    beta1: Decay = 0.9
    beta2: Decay = 0.999
    epsilon: PositiveSingle = 1e-8
    max_gradient_norm: Single = 0.0


def _check_border(record: "AugmentationSettings") -> Iterator[str]:
    if record.crops and record.padding < 1:
        yield f"padding is {record.padding}, but must be 1 or more with augmentation {record.name!r}"
    if not record.crops and record.padding:
        yield f"padding is {record.padding}, but augmentation {record.name!r} has no border; leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_border)
class AugmentationSettings:
    """Random augmentation of training images, new in each epoch; evaluations use none.

    Attributes:
        name: "none"; "crop" cuts each image out of itself with a border of zeros; "flip" mirrors half of them, left to
            right; or "crop_and_flip".
        padding: width of that border in pixels, 1 or more and less than the image's sides; 0 where nothing is cut.
    """

    name: Literal["none", "crop", "flip", "crop_and_flip"] = "none"
    padding: Count = 0

    @property
    def crops(self) -> bool:
        """Whether images are cut."""
        return self.name in ("crop", "crop_and_flip")

    @property
    def flips(self) -> bool:
        """Whether images are mirrored."""
        return self.name in ("flip", "crop_and_flip")

    def problem_with(self, sample_shape: tuple[int, ...]) -> str | None:
        """Explain why samples of that shape cannot be augmented so; None if they can."""
        if self.name == "none":
            return None
        if len(sample_shape) != 3:
            return (
                f"augmentation is {self.name!r} and samples are of the shape {sample_shape}, but it is for images of "
                "(channels, height, width); leave it out"
            )
        if self.padding >= min(sample_shape[1:]):
            height, width = sample_shape[1:]
            return (
                f"augmentation pads images of {height} x {width} by {self.padding}, but must do so by less than their "
                "sides; choose a smaller padding"
            )
        return None


def _check_micro_batches(micro_batch_size: int, batch_size: int) -> Iterator[str]:
    if micro_batch_size > batch_size:
        yield f"micro_batch_size is {micro_batch_size}, but must be 0 to batch_size {batch_size}"


def _check_length(local_steps: int, epochs: int) -> Iterator[str]:
    if local_steps and epochs != 1:
        yield (
            f"local_steps is {local_steps} and epochs is {epochs}, but one says how long clients train; set epochs = "
            "1, or local_steps = 0"
        )


def _check_terms(proximal_mu: float, distillation_weight: float, objective: ObjectiveSettings) -> Iterator[str]:
    if proximal_mu and not objective.proximal:
        yield f"proximal_mu is {proximal_mu}, but the objective has no proximal term; set objective.proximal"
    if distillation_weight and objective.distillation == "none":
        yield (
            f"distillation_weight is {distillation_weight}, but the objective has no distillation term; set "
            "objective.distillation"
        )
    if objective.distillation == "self" and distillation_weight > 1:
        yield f"distillation_weight is {distillation_weight}, but must be at most 1 with distillation 'self'"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_micro_batches, _check_length, _check_terms)
class TrainingSettings:
    """Settings of a client's training in one round.

    Attributes:
        epochs: passes over the client's samples, 1 or more.
        batch_size: samples of one optimiser step, 1 or more.
        micro_batch_size: samples that a program takes at once, where it sums the gradients of a batch over several
            calls; 0 takes the whole batch at once.
        learning_rate: 0 or more; 0 changes nothing.
        objective: what is minimised.
        optimiser: its settings.
        proximal_mu: coefficient of the proximal term, 0 or more.
        distillation_weight: coefficient of the distillation term, 0 or more; with "self" at most 1, and the nested
            submodel's own loss has the rest (FjORD, section 3.3).
        augmentation: how images are changed at random.
        recompute: compute the activations of blocks once more in the backward pass instead of keeping them: less
            memory, more time, the same result.
        seed: the run's seed; the data order is a function of (seed, round, client).
        round_fraction: of the client's samples, that a round goes over, drawn anew in each; above 0, 1 is all.
        local_steps: optimiser steps in place of epochs, whatever number of samples the client has: it stops within a
            pass, or goes over them again; 0 goes by epochs.
    """

    epochs: Positive = 1
    batch_size: Positive = 16
    micro_batch_size: Count = 0
    learning_rate: Single = 0.1
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    proximal_mu: Single = 0.0
    distillation_weight: Single = 0.0
    augmentation: AugmentationSettings = field(default=AugmentationSettings(), metadata=ADDED_LATER)
    recompute: bool = False
    seed: int = 0
    round_fraction: PositiveFraction = field(default=1.0, metadata=ADDED_LATER)
    local_steps: Count = field(default=0, metadata=ADDED_LATER)

    def round_count(self, sample_count: int) -> int:
        """Compute the number of samples that a round goes over, at least 1 if there is any."""
        return math.ceil(fractions.Fraction(str(self.round_fraction)) * sample_count)

    def step_count(self, trained_count: int) -> int:
        """Compute the number of optimiser steps in a round."""
        return self.local_steps or self.epochs * math.ceil(trained_count / self.batch_size)

    def sample_passes(self, sample_count: int) -> int:
        """Compute the sample passes of a round from the number of the client's samples."""
        return self.passes_over(self.round_count(sample_count))

    def passes_over(self, trained_count: int) -> int:
        """Compute the sample passes of a round from the number of samples that it goes over."""
        if not self.local_steps or not trained_count:
            return self.epochs * trained_count
        whole, more = divmod(self.local_steps, math.ceil(trained_count / self.batch_size))
        return whole * trained_count + min(more * self.batch_size, trained_count)

    @property
    def program_batch_size(self) -> int:
        """Samples that a training program takes at once."""
        return self.micro_batch_size or self.batch_size

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

TRAINING_MACS_PER_FORWARD = 3
"""Multiply-accumulates of a training step over those of its forward pass: a backward pass takes twice as many."""
Distillation = Literal["none", "self", "mutual"]
Single = Annotated[float, Range(least=0, below=MAX_SINGLE, words="0 or more, of single precision, below 2^128")]
PositiveSingle = Annotated[float, Range(above=0, below=MAX_SINGLE, words="above 0, below 2^128")]
Decay = Annotated[float, Range(least=0, below=1)]


def _check_classes(
    name: Objective, label_smoothing: float, class_mask: bool, distillation: Distillation
) -> Iterator[str]:
    if not TASK_KINDS[name].over_classes and (label_smoothing or class_mask or distillation != "none"):
        yield f"objective {name!r} has no classes, but label_smoothing, class_mask and distillation need them"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_classes)
class ObjectiveSettings:
    """The objective of a training step. Coefficients are inputs of the step, not part of it.

    Attributes:
        name: "cross_entropy" has one class index for each sample, "next_token" one for each token of a sequence,
            "dense_cross_entropy" one for each pixel of an image; "binary_cross_entropy" has one probability for each
            output, "mean_squared_error" one number.
        label_smoothing: fraction of the target that is spread evenly over all classes, from 0 to below 1.
        class_mask: set the logits of classes that a client lacks to 0 (HeteroFL, section 3.3).
        proximal: add mu / 2 times the squared distance from the initial weights (FedProx, section 3.2).
        distillation: "self" adds FjORD's loss of a submodel nested in the network (FjORD, section 3.3); "mutual"
            DepthFL's term between the exits of a network (DepthFL, section 3.2).
        temperature: of the distillation term, above 0.
        squares: also sum the squares of the labels' losses, for methods that select clients by them (Oort, section
            4.2); the distillation term is not included.
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
        """Whether labels below 0 are usual: tokens after the end of a text, pixels without a class."""
        return self.over_classes and self.kind.places != "sample"

    @property
    def plain(self) -> "ObjectiveSettings":
        """The objective without training-only terms, as in evaluations."""
        return ObjectiveSettings(name=self.name)


def _check_nesterov(nesterov: bool, momentum: float, dampening: float) -> Iterator[str]:
    if nesterov and (momentum == 0 or dampening > 0):
        yield f"nesterov needs momentum above 0 and dampening 0, but they are {momentum} and {dampening}"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_nesterov)
class OptimiserSettings:
    """The local optimiser. Its state starts at zero every round, as in every reference implementation.

    Attributes:
        name: "sgd", "adam" or "adamw"; each computes what the class of that name in `torch.optim` does.
        momentum: of sgd, from 0 (none) to below 1.
        dampening: of sgd's momentum, 0 to 1.
        nesterov: of sgd; needs momentum and no dampening.
        weight_decay: coefficient added to the gradient, or subtracted from the weight with adamw; 0 or more.
        beta1: decay of adam's first moment, from 0 to below 1.
        beta2: decay of adam's second moment, from 0 to below 1.
        epsilon: added to adam's divisor, above 0.
        max_gradient_norm: gradients with a larger global norm are scaled down to it; 0 disables clipping.
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
        yield f"padding is {record.padding}, but augmentation {record.name!r} has no padding; omit it"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_border)
class AugmentationSettings:
    """Random augmentation of training images, new in each epoch; evaluations use none.

    Attributes:
        name: "none"; "crop" pads each image with zeros and crops it to its size at a random position; "flip" mirrors
            half of the images, left to right; or "crop_and_flip".
        padding: of a crop, in pixels, 1 or more and less than the image's sides; 0 without crops.
    """

    name: Literal["none", "crop", "flip", "crop_and_flip"] = "none"
    padding: Count = 0

    @property
    def crops(self) -> bool:
        """Whether images are cropped."""
        return self.name in ("crop", "crop_and_flip")

    @property
    def flips(self) -> bool:
        """Whether images are mirrored."""
        return self.name in ("flip", "crop_and_flip")

    def problem_with(self, sample_shape: tuple[int, ...]) -> str | None:
        """Explain why samples of a shape cannot be augmented; None if they can."""
        if self.name == "none":
            return None
        if len(sample_shape) != 3:
            return (
                f"augmentation {self.name!r} needs images of shape (channels, height, width), but samples have shape "
                f"{sample_shape}; omit it"
            )
        if self.padding >= min(sample_shape[1:]):
            height, width = sample_shape[1:]
            return (
                f"augmentation pads images of {height} x {width} by {self.padding}, but must pad by less than their "
                "sides; choose a smaller padding"
            )
        return None


def _check_micro_batches(micro_batch_size: int, batch_size: int) -> Iterator[str]:
    if micro_batch_size > batch_size:
        yield f"micro_batch_size is {micro_batch_size}, but must be 0 to batch_size {batch_size}"


def _check_length(local_steps: int, epochs: int) -> Iterator[str]:
    if local_steps and epochs != 1:
        yield (
            f"local_steps is {local_steps} and epochs is {epochs}, but only one may set how long clients train; set "
            "epochs = 1, or local_steps = 0"
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
        micro_batch_size: samples of one call, if a program sums the gradients of a batch over several calls; 0 takes
            the whole batch at once.
        learning_rate: 0 or more; 0 changes nothing.
        objective: the function that training minimises.
        optimiser: the local optimiser.
        proximal_mu: coefficient of the proximal term, 0 or more.
        distillation_weight: coefficient of the distillation term, 0 or more; with "self" at most 1, and the nested
            submodel's own loss has the remaining weight (FjORD, section 3.3).
        augmentation: random augmentation of images.
        recompute: recompute the activations of blocks in the backward pass instead of storing them: less memory, more
            time, the same result.
        seed: the run's seed; the data order is a function of (seed, round, client).
        round_fraction: fraction of the client's samples that a round uses, drawn anew each time; above 0, at most 1.
        local_steps: number of optimiser steps, instead of epochs, however many samples the client has; 0 uses epochs.
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
        """Compute the number of samples that a round uses, at least 1 if there are any."""
        if self.round_fraction == 1:
            return sample_count
        return math.ceil(fractions.Fraction(str(self.round_fraction)) * sample_count)

    def step_count(self, trained_count: int) -> int:
        """Compute the number of optimiser steps in a round."""
        return self.local_steps or self.epochs * math.ceil(trained_count / self.batch_size)

    def sample_passes(self, sample_count: int) -> int:
        """Compute the sample passes of a round from the number of the client's samples."""
        return self.passes_over(self.round_count(sample_count))

    def passes_over(self, trained_count: int) -> int:
        """Compute the sample passes of a round from the number of samples that it uses."""
        if not self.local_steps or not trained_count:
            return self.epochs * trained_count
        whole, more = divmod(self.local_steps, math.ceil(trained_count / self.batch_size))
        return whole * trained_count + min(more * self.batch_size, trained_count)

    @property
    def program_batch_size(self) -> int:
        """Samples of one call of a training program."""
        return self.micro_batch_size or self.batch_size

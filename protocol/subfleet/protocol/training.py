"""How a client trains, as plain data: the objective, the optimiser, and the numbers of one round."""

import math
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Literal

from subfleet.protocol.limits import MAX_SINGLE
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.task_kinds import TASK_KINDS, Objective, TaskKind

__all__ = ["AugmentationSettings", "ObjectiveSettings", "OptimiserSettings", "TrainingSettings"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveSettings:
    """What a training step minimises. Its shape only: coefficients are inputs of the step.

    Attributes:
        name: "cross_entropy" of one class index for each sample; "next_token" the same for each token of a sequence;
            "dense_cross_entropy" the same for each pixel of an image; "binary_cross_entropy" of one probability for
            each output; "mean_squared_error" of each output.
        label_smoothing: share of the target that is spread evenly over all classes, 0 up to, not including, 1.
        class_mask: logits of the classes that a client lacks count as 0 (HeteroFL, section 3.3).
        proximal: adds mu / 2 times the squared distance from the first weights (FedProx, section 3.2).
        distillation: "self" adds FjORD's loss of a subnet nested in the network (FjORD, section 3.3); "mutual"
            DepthFL's term between the exits of a network (DepthFL, section 3.2).
        temperature: of the distillation term, above 0.
        squares: whether the step also sums the squares of the labels' losses, for methods that choose clients by them
            (Oort, section 4.2); of the prediction alone, without distillation.
    """

    name: Objective = "cross_entropy"
    label_smoothing: float = 0.0
    class_mask: bool = False
    proximal: bool = False
    distillation: Literal["none", "self", "mutual"] = "none"
    temperature: float = 1.0
    squares: bool = field(default=False, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        if not 0 <= self.label_smoothing < 1:
            raise ValueError(f"label_smoothing is {self.label_smoothing}, but must be at least 0 and below 1")
        if not 0 < self.temperature < MAX_SINGLE:
            raise ValueError(f"temperature is {self.temperature}, but must be a number above 0, below 2^128")
        if not self.over_classes and (self.label_smoothing or self.class_mask or self.distillation != "none"):
            raise ValueError(
                f"objective {self.name!r} knows no classes, but label_smoothing, class_mask and distillation need some"
            )

    @property
    def kind(self) -> TaskKind:
        """What it makes of a task."""
        return TASK_KINDS[self.name]

    @property
    def over_classes(self) -> bool:
        """Whether labels are indices of classes; whoever takes an objective refuses a name that is none."""
        return self.name in TASK_KINDS and self.kind.over_classes

    @property
    def padded(self) -> bool:
        """Whether labels below 0 are usual: tokens behind the end of a text, pixels that are of no class."""
        return self.over_classes and self.kind.places != "sample"

    @property
    def plain(self) -> "ObjectiveSettings":
        """The same without all that only training has: what an evaluation tells."""
        return ObjectiveSettings(name=self.name)


@dataclass(frozen=True, slots=True, kw_only=True)
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
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.999
    epsilon: float = 1e-8
    max_gradient_norm: float = 0.0

    def __post_init__(self) -> None:
        for name in ("momentum", "beta1", "beta2"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least 0 and below 1")
        if not 0 <= self.dampening <= 1:
            raise ValueError(f"dampening is {self.dampening}, but must be from 0 to 1")
        if self.nesterov and (self.momentum == 0 or self.dampening > 0):
            raise ValueError(
                f"nesterov needs momentum and no dampening, but they are {self.momentum} and {self.dampening}"
            )
        for name in ("weight_decay", "max_gradient_norm"):
            if not 0 <= getattr(self, name) < MAX_SINGLE:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be a number of 0 or more, of single precision"
                )
        if not 0 < self.epsilon < MAX_SINGLE:
            raise ValueError(f"epsilon is {self.epsilon}, but must be a number above 0, below 2^128")


@dataclass(frozen=True, slots=True, kw_only=True)
class AugmentationSettings:
    """How training images are changed at random, anew in each epoch; what is evaluated never is.

    Attributes:
        name: "none"; "crop" cuts each image out of itself with a border of zeros; "flip" mirrors half of them, left to
            right; or "crop_and_flip".
        padding: width of that border in pixels, 1 or more and less than the image's sides; 0 where nothing is cut.
    """

    name: Literal["none", "crop", "flip", "crop_and_flip"] = "none"
    padding: int = 0

    def __post_init__(self) -> None:
        if self.crops and self.padding < 1:
            raise ValueError(f"padding is {self.padding}, but must be 1 or more with augmentation {self.name!r}")
        if not self.crops and self.padding:
            raise ValueError(f"padding is {self.padding}, but augmentation {self.name!r} has no border; leave it out")

    @property
    def crops(self) -> bool:
        """Whether images are cut."""
        return self.name in ("crop", "crop_and_flip")

    @property
    def flips(self) -> bool:
        """Whether images are mirrored."""
        return self.name in ("flip", "crop_and_flip")

    def problem_with(self, sample_shape: tuple[int, ...]) -> str | None:
        """Why samples of that shape cannot be changed so; None where they can."""
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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How a client trains in one round.

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
            subnet's own loss has the rest (FjORD, section 3.3).
        augmentation: how images are changed at random.
        recompute: compute the activations of blocks once more in the backward pass instead of keeping them: less
            memory, more time, the same result.
        seed: the run's seed; the data order is a function of (seed, round, client).
        round_share: of the client's samples, that a round goes over, drawn anew in each; above 0, 1 is all.
        local_steps: optimiser steps in place of epochs, whatever number of samples the client has: it stops within a
            pass, or goes over them again; 0 goes by epochs.
    """

    epochs: int = 1
    batch_size: int = 16
    micro_batch_size: int = 0
    learning_rate: float = 0.1
    objective: ObjectiveSettings = field(default_factory=ObjectiveSettings)
    optimiser: OptimiserSettings = field(default_factory=OptimiserSettings)
    proximal_mu: float = 0.0
    distillation_weight: float = 0.0
    augmentation: AugmentationSettings = field(default=AugmentationSettings(), metadata=ADDED_LATER)
    recompute: bool = False
    seed: int = 0
    round_share: float = field(default=1.0, metadata=ADDED_LATER)
    local_steps: int = field(default=0, metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        if self.epochs < 1 or self.batch_size < 1:
            raise ValueError(f"epochs {self.epochs} and batch_size {self.batch_size} must both be 1 or more")
        if not 0 <= self.micro_batch_size <= self.batch_size:
            raise ValueError(
                f"micro_batch_size is {self.micro_batch_size}, but must be 0 to batch_size {self.batch_size}"
            )
        for name in ("learning_rate", "proximal_mu", "distillation_weight"):
            if not 0 <= getattr(self, name) < MAX_SINGLE:
                raise ValueError(
                    f"{name} is {getattr(self, name)}, but must be a number of 0 or more, of single precision"
                )
        if self.local_steps < 0 or (self.local_steps and self.epochs != 1):
            raise ValueError(
                f"local_steps is {self.local_steps} and epochs is {self.epochs}, but one says how long clients train; "
                "set epochs = 1, or local_steps = 0"
            )
        if not 0 < self.round_share <= 1:
            raise ValueError(f"round_share is {self.round_share}, but must be above 0, and 1 at most")
        if self.proximal_mu and not self.objective.proximal:
            raise ValueError(
                f"proximal_mu is {self.proximal_mu}, but the objective has no proximal term; set objective.proximal"
            )
        if self.distillation_weight and self.objective.distillation == "none":
            raise ValueError(
                f"distillation_weight is {self.distillation_weight}, but the objective has no distillation term; set "
                "objective.distillation"
            )
        if self.objective.distillation == "self" and self.distillation_weight > 1:
            raise ValueError(
                f"distillation_weight is {self.distillation_weight}, but must be at most 1 with distillation 'self'"
            )

    def round_count(self, sample_count: int) -> int:
        """Of so many samples, those that a round goes over: 1 or more, where there is one."""
        return math.ceil(Fraction(str(self.round_share)) * sample_count)

    def step_count(self, trained_count: int) -> int:
        """Optimiser steps where a round goes over so many samples."""
        return self.local_steps or self.epochs * math.ceil(trained_count / self.batch_size)

    def sample_passes(self, sample_count: int) -> int:
        """Of a client that has so many samples, those that a round goes over, each as often as it does."""
        return self.passes_over(self.round_count(sample_count))

    def passes_over(self, trained_count: int) -> int:
        """Of so many samples that a round goes over, all of them as often as it does."""
        if not self.local_steps or not trained_count:
            return self.epochs * trained_count
        whole, more = divmod(self.local_steps, math.ceil(trained_count / self.batch_size))
        return whole * trained_count + min(more * self.batch_size, trained_count)

    @property
    def program_batch_size(self) -> int:
        """Samples that a training program takes at once."""
        return self.micro_batch_size or self.batch_size

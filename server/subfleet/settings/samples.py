"""Which samples a run is about: what emulated devices train on, how it is split, and what the model is evaluated on."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.limits import Count, Positive, PositiveAmount
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.transform import DataTransform

__all__ = ["DataCheck", "DataSettings", "Partition", "PartitionSettings"]

Partition = Literal["iid", "dirichlet", "pathological", "shard", "natural"]
DataCheck = Literal["warn", "refuse", "off"]
Some = Annotated[int, Range(least=0, words="0 for all, or above 0")]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PartitionSettings:
    """How samples are split over emulated devices.

    Attributes:
        name: "iid" deals equal shares; "dirichlet" divides each class in Dirichlet-distributed shares (Hsu et al.
            2019); "pathological" gives each device so many classes (McMahan et al. 2017, section 3); "shard" deals
            pieces of samples in the order of their class; "natural" keeps each owner's samples together.
        alpha: of "dirichlet": concentration, above 0; the smaller, the more unequal.
        min_samples: of "dirichlet": the draw is repeated until each device has this many, 0 or more.
        classes_per_client: of "pathological", 1 or more.
        shards_per_client: of "shard": pieces for each device, 1 or more.

    Raises:
        ValueError: a number is out of its range.
    """

    name: Partition = "iid"
    alpha: PositiveAmount = 0.5
    min_samples: Count = 1
    classes_per_client: Positive = 2
    shards_per_client: Positive = 2


def _check_source(test: str, name: str) -> Iterator[str]:
    if not (test or name):
        yield "test and name are empty, but one must be there: evaluation data, or a known data set"


def _check_scaling(standardise: bool, transform: DataTransform | None) -> Iterator[str]:
    if standardise and transform is not None and transform.mean:
        yield "standardise and transform.mean are both set, but inputs are scaled once; leave one out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_source, _check_scaling)
class DataSettings:
    """The samples of a run.

    Attributes:
        test: labelled samples on which the whole model is evaluated after every round: an `.npz` file, a folder of
            images by class, part of a known data set such as "digits:test", or "module:function". Empty takes the test
            part of `name`.
        train: labelled samples that are split over emulated devices, as `test` names some. Empty takes the training
            part of `name`.
        name: a known data set; empty where `train` and `test` say all, where each device of the fleet names its own
            samples, and for real devices, which bring theirs.
        classes: names of the model's classes in the order of their numbers; devices map their data by them. Empty takes
            those of the evaluation data where these have names; else a class's name is its number.
        partition: how the training part is split.
        samples: of the training part, drawn by the run's seed; 0 takes all.
        test_samples: of the evaluation data, the first so many; 0 takes all.
        validation_samples: of these, so many, spread evenly over them, by which searches choose; all that is told of
            the model goes by the others.
        held_out: share of each emulated device's samples that it is evaluated on and does not train on, from 0 to below
            1; at least one sample where it is above 0.
        standardise: whether inputs of an emulated fleet are brought to a mean of 0 and a variance of 1, as measured
            over the training part.
        transform: what is done to each sample before it is fed: on devices, in the evaluation and in predictions, so
            that pictures of any size fit the model; None feeds samples as they are.
        check: what follows where a device's inputs and the evaluation data are not on one scale, by what the device
            tells of them: "warn" says so, "refuse" gives it no task, "off" does not look.

    Raises:
        ValueError: no evaluation data are named, or a number is out of its range.
    """

    test: str = ""
    train: str = ""
    name: str = ""
    classes: ClassNames = ()
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    samples: Some = 0
    test_samples: Some = 0
    validation_samples: Annotated[int, Range(least=0, words="0 for none, or above 0")] = field(
        default=0, metadata=ADDED_LATER
    )
    held_out: Annotated[float, Range(least=0, below=1)] = 0.0
    standardise: bool = False
    transform: DataTransform | None = field(default=None, metadata=ADDED_LATER)
    check: DataCheck = field(default="warn", metadata=ADDED_LATER)

    @property
    def evaluated_on(self) -> str:
        """The source of the evaluation data."""
        return self.test or f"{self.name}:test"

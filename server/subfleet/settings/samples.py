"""The samples of a run: evaluation data, and training data with their partition over emulated devices."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal

from subfleet.protocol.bounds import Range, checked
from subfleet.protocol.class_names import ClassNames
from subfleet.protocol.limits import Count, Positive, PositiveAmount
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.transform import DataTransform

Partition = Literal["iid", "dirichlet", "pathological", "shard", "natural"]
DataCheck = Literal["warn", "refuse", "off"]
Some = Annotated[int, Range(least=0, words="0 for all, or above 0")]


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class PartitionSettings:
    """How samples are split over emulated devices.

    Attributes:
        name: "iid" gives equal random parts; "dirichlet" splits each class by Dirichlet-distributed fractions (Hsu et
            al. 2019); "pathological" gives each device a number of classes (McMahan et al. 2017, section 3); "shard"
            deals out shards of the samples sorted by class; "natural" keeps the samples of an owner together.
        alpha: for "dirichlet": concentration, above 0; smaller is more unequal.
        min_samples: for "dirichlet": the draw is repeated until each device has this many.
        classes_per_client: for "pathological".
        shards_per_client: for "shard".
    """

    name: Partition = "iid"
    alpha: PositiveAmount = 0.5
    min_samples: Count = 1
    classes_per_client: Positive = 2
    shards_per_client: Positive = 2


def _check_source(test: str, name: str) -> Iterator[str]:
    if not (test or name):
        yield "test and name are both empty; set test to evaluation data, or name to a known data set"


def _check_scaling(standardise: bool, transform: DataTransform | None) -> Iterator[str]:
    if standardise and transform is not None and transform.mean:
        yield "standardise and transform.mean are both set, but inputs are scaled once; leave one out"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(_check_source, _check_scaling)
class DataSettings:
    """The samples of a run.

    Attributes:
        test: labelled samples for the evaluation after every round: an `.npz` file, a folder of images by class, part
            of a named data set such as "digits:test", or "module:function". Empty takes the test part of `name`.
        train: labelled samples that are split over emulated devices; a source like `test`. Empty takes the training
            part of `name`.
        name: a named data set; empty if `train` and `test` are given, if each emulated device has its own samples, and
            for real devices.
        classes: names of the model's classes, by which devices map their labels. Empty takes the names of the
            evaluation data, else the numbers of the classes.
        partition: how the training samples are split.
        samples: number of training samples, drawn by the run's seed; 0 takes all.
        test_samples: number of evaluation samples, from the first on; 0 takes all.
        validation_samples: number of evaluation samples, evenly spread, that searches use; metrics are measured on the
            others.
        held_out: fraction of each emulated device's samples that it does not train on and is evaluated on, from 0 to
            below 1; at least one sample if it is above 0.
        standardise: whether inputs of an emulated fleet are scaled to the mean 0 and variance 1 of the training
            samples.
        transform: applied to each sample on devices, in evaluations and in predictions; None leaves samples unchanged.
        check: what happens if the inputs of a device and the evaluation data differ in scale: "warn" logs a warning,
            "refuse" gives the device no tasks, "off" does not compare them.
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

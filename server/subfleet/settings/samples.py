"""Which samples a run is about: what emulated devices train on, how it is split, and what the model is evaluated on."""

from dataclasses import dataclass, field
from typing import Literal

from subfleet.protocol.class_names import check_class_names
from subfleet.protocol.schema import ADDED_LATER
from subfleet.protocol.transform import DataTransform
from subfleet.tasks import shape_problem

__all__ = ["DataCheck", "DataSettings", "Partition", "PartitionSettings", "transform_problem"]

Partition = Literal["iid", "dirichlet", "pathological", "shard", "natural"]
DataCheck = Literal["warn", "refuse", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
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
    alpha: float = 0.5
    min_samples: int = 1
    classes_per_client: int = 2
    shards_per_client: int = 2

    def __post_init__(self) -> None:
        for name in ("classes_per_client", "shards_per_client"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be 1 or more")
        if self.min_samples < 0:
            raise ValueError(f"min_samples is {self.min_samples}, but must be 0 or more")
        if not 0 < self.alpha < float("inf"):
            raise ValueError(f"alpha is {self.alpha}, but must be a number above 0")


@dataclass(frozen=True, slots=True, kw_only=True)
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
    classes: tuple[str, ...] = ()
    partition: PartitionSettings = field(default_factory=PartitionSettings)
    samples: int = 0
    test_samples: int = 0
    validation_samples: int = field(default=0, metadata=ADDED_LATER)
    held_out: float = 0.0
    standardise: bool = False
    transform: DataTransform | None = field(default=None, metadata=ADDED_LATER)
    check: DataCheck = field(default="warn", metadata=ADDED_LATER)

    def __post_init__(self) -> None:
        check_class_names(self.classes)
        if not (self.test or self.name):
            raise ValueError("test and name are empty, but one must be there: evaluation data, or a known data set")
        for name in ("samples", "test_samples"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be 0 for all, or above 0")
        if self.validation_samples < 0:
            raise ValueError(f"validation_samples is {self.validation_samples}, but must be 0 for none, or above 0")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}, but must be at least 0 and below 1")
        if self.standardise and self.transform is not None and self.transform.mean:
            raise ValueError("standardise and transform.mean are both set, but inputs are scaled once; leave one out")

    @property
    def evaluated_on(self) -> str:
        """The source of the evaluation data."""
        return self.test or f"{self.name}:test"


def transform_problem(transform: DataTransform, taken: tuple[int, ...]) -> str:
    """Why a model that takes samples of a shape cannot be fed with what a transform makes; empty where it can."""
    if not transform.fixes_size:
        return ""
    size = transform.cut_size(transform.scaled_size(1, 1))
    channels = (transform.channels,) if transform.channels else (1, 3, *taken[:1])
    problems = [shape_problem((one, *size), taken) for one in channels]
    return f"data.transform makes samples that {problems[0]}; change resize, crop or channels" if all(problems) else ""

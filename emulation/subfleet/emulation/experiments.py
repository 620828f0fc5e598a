"""Experiments by name: a run is a function that returns a complete, frozen description."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.network import Family
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.subnet import SubnetSpec
from subfleet.protocol.suggestion import did_you_mean
from subfleet.protocol.training import OptimiserSettings, TrainingSettings

__all__ = ["EXPERIMENTS", "EmulatedDevice", "Experiment", "experiment_named"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EmulatedDevice:
    """One client process.

    Attributes:
        client_id: its name in tables and topics.
        profile: the device profile it follows (memory share, threads, runtimes).
        log: the shipped resource log that it replays.
        runtime: the program target it runs.
        architecture: the subnet that it declares, in place of the profile's; None leaves it to the profile.
    """

    client_id: str
    profile: str
    log: str
    runtime: str = "onnx"
    architecture: SubnetSpec | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experiment:
    """A fleet, its data and how it trains.

    Attributes:
        devices: one client process each.
        dataset: name of the data set in `subfleet.tasks.catalogue`.
        alpha: Dirichlet concentration of the label split.
        rates: width rates of the search space; every depth is in it too.
        communication_s: seconds of its link that a device gives to a round; with its bandwidth, the bytes it may move.
        log_step_s: seconds of the resource logs between two rounds.
    """

    name: str
    devices: tuple[EmulatedDevice, ...]
    dataset: str
    alpha: float
    model: Family
    training: TrainingSettings
    learning_rate_decay: float
    rounds: int
    rates: tuple[float, ...]
    communication_s: float
    log_step_s: float
    seed: int


def quickstart() -> Experiment:
    """Five unequal devices, scikit-learn's digits, one residual MLP: about a minute and a half on two cores."""
    return Experiment(
        name="quickstart",
        devices=(
            EmulatedDevice(client_id="pi-zero-2w", profile="raspberry_pi_zero_2_w", log="raspberry_pi_zero_2_w"),
            EmulatedDevice(client_id="pi-4", profile="raspberry_pi_4", log="raspberry_pi_4"),
            EmulatedDevice(client_id="phone", profile="android_phone", log="android_phone", runtime="executorch"),
            EmulatedDevice(client_id="jetson", profile="jetson_orin_nano", log="jetson_orin_nano"),
            EmulatedDevice(client_id="laptop", profile="laptop", log="laptop"),
        ),
        dataset="digits",
        alpha=0.5,
        # Elements that few devices hold see few samples: a wide residual MLP learns the digits from five rounds on
        # unequal slices, and so do its parts; convolutions need more rounds for that. The whole one has 4.9 MB, more
        # than most of these links move in their seconds, and takes 26 MB to train, more than a quarter of what the
        # smallest device has free.
        model=Mlp(input_shape=(1, 8, 8), class_count=10, widths=(384,), depths=(4,), group_size=16),
        training=TrainingSettings(
            epochs=8,
            batch_size=32,
            learning_rate=0.08,
            optimiser=OptimiserSettings(momentum=0.9, weight_decay=1e-3),
        ),
        learning_rate_decay=0.8,
        rounds=5,
        rates=(0.25, 0.5, 0.75, 1.0),
        communication_s=4.5,
        log_step_s=60.0,
        seed=3,
    )


EXPERIMENTS: Mapping[str, Callable[[], Experiment]] = MappingProxyType({"quickstart": quickstart})


def experiment_named(name: str) -> Experiment:
    """The experiment of that name.

    Raises:
        ConfigError: there is none; the text lists those there are.
    """
    if name not in EXPERIMENTS:
        raise ConfigError(
            f"there is no experiment {name!r}; choose one of: {', '.join(sorted(EXPERIMENTS))}"
            f"{did_you_mean(name, EXPERIMENTS)}"
        )
    return EXPERIMENTS[name]()

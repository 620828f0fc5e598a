"""A game: sixteen honest members that learn digits, with or without four liars."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import numpy as np

from liar_benchmark.lying import LIARS, GarblingTrainer
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.technique_settings import DistillationSettings
from subfleet.emulation.batch.figures import compute_batch_figures
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.batch.trainers import create_trainers
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.dynamic_selection import DynamicSelection
from subfleet.methods.fedadp import FedADP
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.fedtrans import FedTrans
from subfleet.methods.selector import select_at_random
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.protocol.readings import Reading
from subfleet.protocol.schema import canonical_json, to_plain
from subfleet.protocol.training import TrainingSettings
from subfleet.search.supernets import EvolutionSettings
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import Deadlines, LogClock, OutlierSettings
from subfleet.tasks import Dataset, load_digits

__all__ = [
    "HONEST",
    "METHODS_AND_VARIANTS",
    "Game",
    "GameResult",
    "declare_honest_network",
    "gather_game",
    "play",
    "remove_guards",
]

HONEST = 16
LEARNED = 1400
"""Number of digits for training; models are evaluated on the others."""
DRAWN = 10
"""Members of a round, if a method chooses them."""
CLASSES, SHAPE = 10, (1, 8, 8)
MODEL = Mlp(input_shape=SHAPE, class_count=CLASSES, widths=(64,), depths=(1,), group_size=4)
SMALLEST = 0.125
SUPERNET = ChoiceCnn(
    input_shape=SHAPE,
    class_count=CLASSES,
    widths=(16, 16),
    depths=(1, 1),
    last_widths=(32,),
    operators=(("conv1", "conv3", "dsconv3", "mbconv3"),),
    reduction="pool",
)
BROUGHT = (MODEL, replace(MODEL, depths=(2,)), replace(MODEL, widths=(32,)))
"""Networks of honest members, if they bring their own."""
_RATES = (SMALLEST, 0.25, 0.5, 1.0)
_LINKS = (1.0, 1.0, 1.0, 0.3)
"""Fraction of the whole network's bytes that the link of every fourth member carries in a round."""


def _configure_fedoras(scoring: Mapping[str, Any]) -> FedorAS:
    evolution = EvolutionSettings(evaluations=12, population=6, offspring=6)
    return FedorAS(
        tiers=1, tuning_learning_rate=0.05, tuning_epochs=2, search=TierSearch(evolution=evolution, **scoring)
    )


METHODS_AND_VARIANTS: Mapping[str, AnyMethod] = MappingProxyType(
    {
        **{name: kind() for name, kind in METHODS.items()},
        "dynamic_selection": DynamicSelection(
            estimates="estimated", distillation=DistillationSettings(mode="anchored", iterations=3)
        ),
        "fedtrans": FedTrans(beta=0.05, gamma=2, delta=2, stop_rounds=0),
        "fedoras": _configure_fedoras({}),
        "fedoras by devices": _configure_fedoras({"scoring": "devices", "scoring_clients": 6, "scoring_rounds": 2}),
        "fedfa by scores": FedFA(choice="score"),
        "fedadp by networks": FedADP(choice="declared"),
    }
)
"""Every method with its defaults, adapted to few rounds, and variants with members that report more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GameResult:
    """The result of one game.

    Attributes:
        accuracy: mean accuracy of the honest members' models on the server's samples; 0 without a result.
        rounds: number of closed rounds.
        planned_rounds: number of configured rounds.
        failed_attempts: attempts of rounds that aggregated nothing.
        failure: why it did not end; empty if it did.
    """

    accuracy: float
    rounds: int
    planned_rounds: int
    failed_attempts: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """The settings of one game.

    Attributes:
        method: a key of `METHODS_AND_VARIANTS`.
        seed: seed of the run.
        rounds: number of rounds.
        liars: whether liars take part.
        guarded: False turns off the protection against liars.
        declared_width: width of the networks that liars declare, if the method uses declared networks.
    """

    method: str
    seed: int
    rounds: int
    liars: bool
    guarded: bool = True
    declared_width: int = 512


def declare_honest_network(index: int) -> str:
    """The network that an honest member declares in its profile."""
    return _encode_network(BROUGHT[index % len(BROUGHT)])


def declare_largest_networks(width: int) -> tuple[str, ...]:
    """The networks that liars declare: as large as the server accepts, and more of them than a member may declare."""
    return tuple(_encode_network(replace(MODEL, widths=(width - 64 * number,), depths=(4,))) for number in range(6))


def _encode_network(network: Mlp) -> str:
    return canonical_json({"family": Mlp.TYPE, **to_plain(network)}).decode()


def load_data(seed: int, *, signed: bool = True) -> Dataset:
    """Centred digits; signed ones have random signs, so that no linear model separates them."""
    whole = load_digits()
    signs = np.random.default_rng(seed).choice([-1.0, 1.0], (len(whole), 1, 1, 1)) if signed else 1.0
    inputs = (2.0 * (whole.inputs - whole.inputs.mean(axis=0)) * signs).astype(np.float32)
    return replace(whole, inputs=inputs)


def remove_guards(run: Run) -> Run:
    """A copy of a run without its protection against liars."""
    method: Any = run.method
    if hasattr(method, "most_often"):
        method = replace(method, most_often=0.0)
    if isinstance(method, FedTrans):
        method = replace(method, averaged="all", left_behind=0.0)
    return replace(run, method=method, max_client_fraction=1.0, outliers=OutlierSettings(outliers="off", loss_factor=0))


def create_run(name: str, seed: int, rounds: int) -> Run:
    """Create the run of a method's game, the same with and without liars.

    Raises:
        ConfigError: there is no such method.
    """
    if name not in METHODS_AND_VARIANTS:
        raise ConfigError(f"method {name!r} is none of {', '.join(METHODS_AND_VARIANTS)}")
    method = METHODS_AND_VARIANTS[name]
    roles = method.roles()
    if isinstance(method, FedorAS):
        first = max(1, rounds * 2 // 3)
        method = replace(method, supernet_rounds=first, tuning_rounds=max(1, rounds - first))
    chooses = (
        roles.selector.select is not select_at_random and not roles.training.draws_paths
    )  # with paths, tiers take turns
    return Run(
        name="liars",
        model=SUPERNET if roles.training.draws_paths else MODEL,
        data=DataSettings(test="unused", validation_samples=100 if roles.training.draws_paths else 0),
        rounds=rounds,
        min_clients=HONEST,
        clients_per_round=DRAWN if chooses else 0,
        training=TrainingSettings(epochs=2, batch_size=8, learning_rate=0.05),
        method=method,
        rates=_RATES,
        communication_s=1.0,
        clock=LogClock(start_s=0.0, step_s=60.0),
        deadlines=Deadlines(join_s=40, measure_s=10, round_s=20, evaluate_s=20, deploy_s=20, lease_s=15, linger_s=0),
        targets=("torch",),
        deploy_targets=(),
        memory_overhead_bytes={},
        # The default of a real fleet: the emulation does not know the liars as attackers.
        outliers=OutlierSettings(outliers="scale"),
        seed=seed,
    )


def gather_game(run: Run, *, liars: bool, guarded: bool, runtime: str = "torch") -> GatheredRun:
    """Gather honest members with or without liars; the honest members' samples are the same in both."""
    # Each path of a supernet trains on few batches, too few to learn the signs.
    data = load_data(run.seed, signed=not run.roles.training.draws_paths)
    parts = np.array_split(np.random.default_rng(run.seed).permutation(LEARNED), HONEST + len(LIARS))
    names = [f"honest-{index:02}" for index in range(HONEST)] + (list(LIARS) if liars else [])
    devices = [
        EmulatedDevice(
            client_id=name,
            profile=_create_profile(run, index, runtime),
            data=data.take(part[: len(part) * 4 // 5]),
            test=data.take(part[len(part) * 4 // 5 :]),
            log=_create_log(run, index),
            runtime=runtime,
            tier="honest" if index < HONEST else "liar",
        )
        for index, (name, part) in enumerate(zip(names, parts, strict=False))
    ]
    evaluation = data.take(np.arange(LEARNED, len(data)))
    return GatheredRun(run=run if guarded else remove_guards(run), devices=tuple(devices), evaluation=evaluation)


def _create_profile(run: Run, index: int, runtime: str) -> DeviceProfile:
    network = declare_honest_network(index) if run.roles.assigner.declarations else ""
    return DeviceProfile(
        name="virtual", title="A member of a benchmark", memory_fraction=0.5, runtimes=(runtime,), network=network
    )


def _create_log(run: Run, index: int) -> ResourceLog:
    """Ample memory; if a method cuts a network, every fourth link carries only a part of it."""
    cuts = {"width", "depth"} & set(run.method.INFO.varies) and not run.roles.assigner.declarations
    share = _LINKS[index % len(_LINKS)] if cuts else 1.0
    rate_bps = 1e7 if share == 1.0 else share * 8 * 4 * 13_322
    reading = Reading(memory_free_bytes=4 * 10**8, downlink_bps=rate_bps, uplink_bps=rate_bps)
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device="virtual", source="a benchmark", licence="none", rows=rows)


def play(game: Game, exports: ExportPool) -> GameResult:
    """Play a game in this process.

    Args:
        game: the game.
        exports: the exporter, which several games may use in turn.
    """
    run = create_run(game.method, game.seed, game.rounds)
    gathered = gather_game(run, liars=game.liars, guarded=game.guarded)
    networks = declare_largest_networks(game.declared_width) if run.roles.assigner.declarations else ()
    trainers = {"garbler": GarblingTrainer(create_trainers({"torch"})["torch"])} if game.liars else {}
    liars = {kind: create(networks) for kind, create in LIARS.items()} if game.liars else {}
    try:
        result = run_batch(gathered, exports, trainers=trainers, interference=liars)
        figures = compute_batch_figures(gathered, result)
    except SubfleetError as error:
        return GameResult(accuracy=0.0, rounds=0, planned_rounds=game.rounds, failure=str(error))
    return GameResult(
        accuracy=figures["tiers"]["honest"] or 0.0,
        rounds=len(result.rounds),
        planned_rounds=run.total_rounds,
        failed_attempts=sum(record.failed_attempts for record in result.rounds),
    )

"""Three rounds of a method with the real server, agents and programs: does its loss fall, and is nothing else moved?

Every method is tried with each policy of norms that a configuration accepts, on norms with running statistics where the
policy is about these and the method takes them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from random import Random
from types import MappingProxyType
from typing import Any, Literal, get_args

import torch
from safetensors.torch import load

from subfleet.aggregation.path_scoring import draw_random_paths
from subfleet.device_profiles import DeviceProfile, LogRow, ResourceLog
from subfleet.elastic.building import init_state
from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.grafting import graft
from subfleet.elastic.model_state import unpack_state
from subfleet.elastic.network import Family, Network
from subfleet.elastic.robust_rules import StackMember, find_held_elements
from subfleet.elastic.running_statistics import recalibrate
from subfleet.emulation.batch.exports import LazyExports
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.aggregator import keep_aggregate, share_everything
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.techniques import NormPolicy
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.errors import SubfleetError
from subfleet.protocol.readings import Reading
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.training import TrainingSettings
from subfleet.reporting.run_figures import violates
from subfleet.rounds.context import RunContext
from subfleet.search.path_evolution import EvolutionSettings
from subfleet.serving.run_context import create_context
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.settings.sections import LogClock
from subfleet.tasks import Dataset, load_digits

ROUNDS = 3
_MODEL = Mlp(input_shape=(1, 8, 8), class_count=10, widths=(32,), depths=(3,), group_size=4)
_SUPERNET = ChoiceCnn(
    input_shape=(1, 8, 8),
    class_count=10,
    widths=(8,),
    depths=(2,),
    last_widths=(16,),
    operators=(("conv1", "dsconv3", "mbconv3", "identity"),),
)
"""For methods that draw paths of one."""
_SEARCHED: Mapping[str, AnyMethod] = MappingProxyType(
    {
        FedorAS.TYPE: FedorAS(
            supernet_rounds=1,
            tiers=2,
            min_contributors=1,
            search=TierSearch(evolution=EvolutionSettings(evaluations=6, population=3, offspring=3)),
        )
    }
)
"""Methods that would not come to their search within the rounds of the checks as they are by default."""
_KINDS: Mapping[NormPolicy, tuple[Literal["batch", "group"], ...]] = MappingProxyType(
    {
        "averaged": ("group",),
        "bank": ("group",),
        "recalibrated": ("batch", "group"),
        "calibrated": ("batch",),
    }
)
"""Of norms on which each policy is tried: the first that is accepted."""
_SHARED, _PATHS = "", 16
_SAMPLES = 200
_PLENTY_BYTES = 10**9
_COMMUNICATION_S = 1.0


def check_methods(
    exports: LazyExports, methods: Mapping[str, type[AnyMethod]] = METHODS
) -> Iterator[tuple[str, NormPolicy, str]]:
    """Try every method; yields its name, the policy of norms, and "ok" or the reason why not."""
    for name, kind in methods.items():
        method = _SEARCHED.get(name) or kind()
        for norms in find_accepted_norms(method):
            yield name, norms, check_method(method, exports, norms)


def find_accepted_norms(method: AnyMethod) -> tuple[NormPolicy, ...]:
    """The policies of norms that a configuration accepts with a method, on the network of the checks."""
    return tuple(norms for norms in get_args(NormPolicy) if _config(method, norms) is not None)


def check_method(method: AnyMethod, exports: LazyExports, norms: NormPolicy = "averaged") -> str:
    """What three rounds of a method show: "ok", or the first thing that is not as it should be."""
    config = _config(method, norms)
    if config is None:
        return f"no configuration accepts it with norms = {norms!r}"
    try:
        context = create_context(config, "check")
        experiment = _experiment(context)
        result = run_batch(experiment, exports)
    except SubfleetError as error:
        return str(error)
    return next(_complaints(context, experiment, result), "ok")


def _experiment(context: RunContext) -> GatheredRun:
    """Three clients on digits, whose links carry a small, a middling and the second largest size of the space.

    Each has a runtime of its own, of those that the method tells. Where sizes have norms of their own, the third has
    the largest: those of the whole model are else never trained.
    """
    space = context.candidates
    banked = context.roles.aggregator.sharing_groups is not share_everything and not context.roles.aggregator.personal
    places = (0, len(space) // 2, max(0, len(space) - (1 if banked else 2)))
    whole, runtimes = load_digits(), context.config.targets
    clients = tuple(
        EmulatedDevice(
            client_id=f"client{number}",
            profile=DeviceProfile(name="checked", title="A device of a check", memory_fraction=1.0, runtimes=runtimes),
            runtime=runtimes[number % len(runtimes)],
            data=_part(whole, number),
            log=_log(space[place].weight_bytes),
        )
        for number, place in enumerate(places)
    )
    return GatheredRun(run=context.config, devices=clients, evaluation=_part(whole, len(places)))


def _config(method: AnyMethod, norms: NormPolicy) -> Run | None:
    """None where it is accepted on no kind of norms that is tried for the policy."""
    for norm in _KINDS[norms]:
        model = replace(_SUPERNET, norm=norm) if method.roles().training.draws_paths else replace(_MODEL, norm=norm)
        with contextlib.suppress(ValueError):
            return _config_with(method, norms, model)
    return None


def _config_with(method: AnyMethod, norms: NormPolicy, model: Family) -> Run:
    return Run(
        name="check",
        model=model,
        norms=norms,
        data=DataSettings(test="unused", validation_samples=50 * method.roles().training.draws_paths),
        rounds=ROUNDS,
        min_clients=3,
        training=TrainingSettings(epochs=2, batch_size=16, learning_rate=0.05),
        method=method,
        rates=(0.25, 0.5, 1.0),
        communication_s=_COMMUNICATION_S,
        clock=LogClock(),
        targets=method.INFO.runtimes,
        deploy_targets=(),
        seed=1,
    )


def _part(whole: Dataset, number: int) -> Dataset:
    here = slice(number * _SAMPLES, (number + 1) * _SAMPLES)
    return Dataset(inputs=whole.inputs[here], labels=whole.labels[here])


def _log(link_bytes: int) -> ResourceLog:
    rate_bps = 8 * (link_bytes + 1) / _COMMUNICATION_S
    reading = Reading(memory_free_bytes=_PLENTY_BYTES, downlink_bps=rate_bps, uplink_bps=rate_bps)
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device="checked", source="a check of methods", licence="none", rows=rows)


def _complaints(context: RunContext, experiment: GatheredRun, result: BatchResult) -> Iterator[str]:
    last = result.rounds[-1]
    untrained = _untrained_loss(
        context, experiment.evaluation, "" if last.model is None else last.model.architecture_id
    )
    if not last.loss < untrained:
        yield f"the loss does not fall: {untrained:.4f} before round 1 and {last.loss:.4f} after round {last.round}"
    rows = [row for record in result.rounds for row in record.clients]
    for row in rows:
        if row.status != "aggregated":
            yield f"client {row.client_id} took no part: {row.status}"
        elif row.bytes_down < row.weight_bytes or row.bytes_up < row.update_bytes:
            yield f"client {row.client_id} moved {row.bytes_down} and {row.bytes_up} bytes, less than its weights"
        elif violates(row):
            yield f"client {row.client_id} was given more than its budget"
    if context.roles.networks.path_search is not None:
        yield from _unsearched(result)
    # What a method does to the whole model after a round moves more than was trained.
    whole = (
        context.roles.aggregator.after_round is not keep_aggregate or context.roles.techniques.distillation is not None
    )
    moved = () if whole else _moved_elsewhere(context, result)
    if moved:
        yield f"tensor {moved[0]!r} moved where nobody trained it"


def _unsearched(result: BatchResult) -> Iterator[str]:
    """What of a search and of what comes after it was not done."""
    found = {one.lineage.id for one in result.result.networks if one.lineage.born_round}
    trained = {client.architecture.network for rounds in result.trained.values() for client in rounds.values()}
    if not result.supernet or not found:
        yield "the supernet was trained, but never searched"
    elif not found & trained:
        yield f"the search has found {sorted(found)}, but nobody trained any of them"


def _untrained_loss(context: RunContext, evaluation: Dataset, architecture_id: str) -> float:
    """Of the model that rounds are evaluated by, before the first; of models that clients have, the whole network."""
    network, state = context.network, init_state(context.network, context.config.seed)
    inputs, labels = torch.from_numpy(evaluation.inputs.copy()), torch.from_numpy(evaluation.labels.copy())
    # Statistics are measured and not learned: what they do to the loss is no lesson.
    evaluated = tuple(one for one in context.space if one.architecture_id == architecture_id)
    architectures = evaluated or draw_random_paths(network, _PATHS, Random(0))  # noqa: S311 - draws, keeps no secret
    losses = [
        min(
            evaluate(network, architecture, one, inputs, labels, objective=context.config.training.objective.name).loss
            for one in (state, recalibrate(network, state, architecture, [inputs]))
        )
        for architecture in architectures
    ]
    return sum(losses) / len(losses)


def _moved_elsewhere(context: RunContext, result: BatchResult) -> list[str]:
    """Tensors, of the shared model or of a copy, that changed at places that no client of it held in any round.

    Of a supernet that was searched, up to then.
    """
    before: Mapping[str, Any] = init_state(context.network, context.config.seed)
    after = unpack_state(load(result.supernet or result.model))
    clients = [
        one
        for rounds in result.trained.values()
        for one in rounds.values()
        if not result.supernet or one.architecture.network == context.network.id
    ]
    keys = [context.roles.aggregator.sharing_groups(context.network, client, after.sizes) for client in clients]
    architectures = [client.architecture for client in clients]
    if isinstance(context.config.method, FedFA):
        architectures = [graft(context.network, architecture).architecture for architecture in architectures]
    held = [_held(context.network, architecture) for architecture in architectures]
    found = []
    for copy, tensors in {_SHARED: after.shared, **after.copies}.items():
        for name, tensor in ((name, tensors[name]) for name in before if name in tensors):
            mine = [one[name] for one, its in zip(held, keys, strict=True) if its.get(name, _SHARED) == copy]
            free = ~torch.stack([torch.zeros_like(tensor, dtype=torch.bool), *mine]).any(dim=0)
            found += [] if torch.equal(before[name][free], tensor[free]) else [name]
    return found


def _held(network: Network, architecture: Architecture) -> dict[str, torch.Tensor]:
    """Which elements of each tensor of the model a submodel holds."""
    full = {name: torch.empty(decl.shape) for name, decl in network.tensors.items()}
    return find_held_elements(network, full, [StackMember(architecture=architecture, weight=1.0)])

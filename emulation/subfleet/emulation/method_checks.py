"""Runs three rounds of a method with the real server, agents and programs, and checks the result.

The loss must fall, budgets must be kept, and only trained elements may change. Every method is checked with each norm
policy that its settings accept, with batch norms if the policy concerns running statistics and the method allows them.
"""

import contextlib
import math
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
from subfleet.elastic.network import Family
from subfleet.elastic.robust_rules import StackMember, find_held_elements
from subfleet.elastic.running_statistics import recalibrate
from subfleet.emulation.batch.run import BatchResult, run_batch
from subfleet.emulation.gathering import EmulatedDevice, GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.methods import METHODS, AnyMethod
from subfleet.methods.aggregator import keep_aggregate, share_everything
from subfleet.methods.fedfa import FedFA
from subfleet.methods.fedoras import FedorAS
from subfleet.methods.techniques import NormPolicy
from subfleet.methods.tier_search import TierSearch
from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.protocol.readings import Reading
from subfleet.protocol.training import TrainingSettings
from subfleet.reporting.run_figures import violates
from subfleet.rounds.context import RunContext
from subfleet.search.supernets import EvolutionSettings
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
"""For methods that draw paths of a supernet."""
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
"""Methods that would not begin their search within the checked rounds with default parameters."""
_KINDS: Mapping[NormPolicy, tuple[Literal["batch", "group"], ...]] = MappingProxyType(
    {
        "averaged": ("group",),
        "bank": ("group",),
        "recalibrated": ("batch", "group"),
        "calibrated": ("batch",),
    }
)
"""By norm policy, the kinds of norms to check it with; the first that the settings accept is used."""
_SHARED, _PATHS = "", 16
_SAMPLES = 200
_PLENTY_BYTES = 10**9
_COMMUNICATION_S = 1.0


def check_methods(
    exports: ExportPool, methods: Mapping[str, type[AnyMethod]] = METHODS
) -> Iterator[tuple[str, NormPolicy, str]]:
    """Check every method; yields its name, the norm policy, and "ok" or the first problem."""
    for name, kind in methods.items():
        method = _SEARCHED.get(name) or kind()
        for norms in find_accepted_norms(method):
            yield name, norms, check_method(method, exports, norms)


def find_accepted_norms(method: AnyMethod) -> tuple[NormPolicy, ...]:
    """The norm policies that the settings of a run accept with a method, on the network of the checks."""
    return tuple(norms for norms in get_args(NormPolicy) if _find_config(method, norms) is not None)


def check_method(
    method: AnyMethod, exports: ExportPool, norms: NormPolicy = "averaged", model: Family | None = None
) -> str:
    """Run three rounds of a method; returns "ok" or the first problem.

    Args:
        method: the method.
        exports: writes its programs.
        norms: policy of norms.
        model: trained on 8x8 images of ten digits; by default a small network of layers, or of choices for a supernet.
    """
    try:
        gathered = gather_check(method, norms, model)
        result = run_batch(gathered, exports)
    except SubfleetError as error:
        return str(error)
    return next(_find_problems(create_context(gathered.run, "check"), gathered, result), "ok")


def gather_check(method: AnyMethod, norms: NormPolicy = "averaged", model: Family | None = None) -> GatheredRun:
    """Three clients on digits, for a method as in `check_method`.

    Their links fit a small, a medium and the second largest submodel of the space. Clients have different runtimes of
    the method. With separate norms for each size, the third client's link fits the largest submodel, because the
    norms of the whole model would otherwise never be trained.

    Raises:
        ConfigError: no settings accept the method with these norms.
    """
    config = _find_config(method, norms, model)
    if config is None:
        raise ConfigError(f"no settings accept it with norms = {norms!r}; choose others")
    context = create_context(config, "check")
    space = context.first.candidates
    banked = context.roles.aggregator.sharing_groups is not share_everything and not context.roles.aggregator.personal
    indices = (0, len(space) // 2, max(0, len(space) - (1 if banked else 2)))
    whole, runtimes = load_digits(), context.config.targets
    clients = tuple(
        EmulatedDevice(
            client_id=f"client{number}",
            profile=DeviceProfile(name="checked", title="A device of a check", memory_fraction=1.0, runtimes=runtimes),
            runtime=runtimes[number % len(runtimes)],
            data=_take_part(whole, number),
            log=_make_log(space[index].weight_bytes),
        )
        for number, index in enumerate(indices)
    )
    return GatheredRun(run=context.config, devices=clients, evaluation=_take_part(whole, len(indices)))


def _find_config(method: AnyMethod, norms: NormPolicy, model: Family | None = None) -> Run | None:
    """The settings of a check; None if they accept the method with none of the policy's kinds of norms."""
    own = _SUPERNET if method.roles().training.draws_paths else _MODEL
    for tried in [replace(own, norm=norm) for norm in _KINDS[norms]] if model is None else [model]:
        with contextlib.suppress(ValueError):
            return _build_config(method, norms, tried)
    return None


def _build_config(method: AnyMethod, norms: NormPolicy, model: Family) -> Run:
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


def _take_part(whole: Dataset, number: int) -> Dataset:
    part = slice(number * _SAMPLES, (number + 1) * _SAMPLES)
    return Dataset(inputs=whole.inputs[part], labels=whole.labels[part])


def _make_log(link_bytes: int) -> ResourceLog:
    rate_bps = 8 * (link_bytes + 1) / _COMMUNICATION_S
    reading = Reading(memory_free_bytes=_PLENTY_BYTES, downlink_bps=rate_bps, uplink_bps=rate_bps)
    rows = (LogRow(t_s=0.0, reading=reading),)
    return ResourceLog(device="checked", source="a check of methods", licence="none", rows=rows)


def _find_problems(context: RunContext, gathered: GatheredRun, result: BatchResult) -> Iterator[str]:
    last = result.rounds[-1]
    evaluated_id = "" if last.model is None else last.model.architecture_id
    untrained = _compute_untrained_loss(context, gathered.evaluation, evaluated_id)
    loss = math.inf if last.loss is None else last.loss
    if not loss < untrained:
        yield f"the loss does not fall: {untrained:.4f} before round 1 and {loss:.4f} after round {last.round}"
    rows = [row for record in result.rounds for row in record.clients]
    for row in rows:
        if row.status != "aggregated":
            yield f"client {row.client_id} did not take part: {row.status}"
        elif row.bytes_down < row.weight_bytes or row.bytes_up < row.update_bytes:
            yield f"client {row.client_id} moved {row.bytes_down} and {row.bytes_up} bytes, less than its weights"
        elif violates(row):
            yield f"client {row.client_id} exceeded its budget"
    if context.roles.networks.path_search is not None:
        yield from _find_search_problems(result)
    # A method that transforms the whole model after a round changes more than was trained.
    whole = (
        context.roles.aggregator.after_round is not keep_aggregate or context.roles.techniques.distillation is not None
    )
    changed = () if whole else _find_untrained_changes(context, result)
    if changed:
        yield f"tensor {changed[0]!r} changed where no client trained it"


def _find_search_problems(result: BatchResult) -> Iterator[str]:
    """Problems of a search: it did not happen, or the networks that it found were not trained."""
    found = {record.lineage.id for record in result.result.networks if record.lineage.born_round}
    trained = {client.architecture.network for rounds in result.trained.values() for client in rounds.values()}
    if not result.supernet or not found:
        yield "the supernet was trained, but never searched"
    elif not found & trained:
        yield f"the search found {sorted(found)}, but no client trained any of them"


def _compute_untrained_loss(context: RunContext, evaluation: Dataset, architecture_id: str) -> float:
    """The loss before the first round, of the evaluated submodel; for personalised models, of the whole network."""
    network, state = context.network, init_state(context.network, context.config.seed)
    inputs, labels = torch.from_numpy(evaluation.inputs.copy()), torch.from_numpy(evaluation.labels.copy())
    # Running statistics are measured and not learned, so a lower loss by them does not count.
    evaluated = tuple(size for size in context.space if size.architecture_id == architecture_id)
    architectures = evaluated or draw_random_paths(network, _PATHS, Random(0))  # noqa: S311 - draws, keeps no secret
    losses = [
        min(
            evaluate(
                network, architecture, tensors, inputs, labels, objective=context.config.training.objective.name
            ).loss
            for tensors in (state, recalibrate(network, state, architecture, [inputs]))
        )
        for architecture in architectures
    ]
    return sum(losses) / len(losses)


def _find_untrained_changes(context: RunContext, result: BatchResult) -> list[str]:
    """Tensors of the shared model or of a copy with changed elements that none of its clients held in any round.

    For a supernet, the rounds before its search.
    """
    before: Mapping[str, Any] = init_state(context.network, context.config.seed)
    after = unpack_state(load(result.supernet or result.model))
    clients = [
        client
        for rounds in result.trained.values()
        for client in rounds.values()
        if not result.supernet or client.architecture.network == context.network.id
    ]
    keys = [context.roles.aggregator.sharing_groups(context.network, client, after.sizes) for client in clients]
    architectures = [client.architecture for client in clients]
    if isinstance(context.config.method, FedFA):
        architectures = [graft(context.network, architecture).architecture for architecture in architectures]
    full = {name: torch.empty(decl.shape) for name, decl in context.network.tensors.items()}
    members = [StackMember(architecture=architecture, weight=1.0) for architecture in architectures]
    held = [find_held_elements(context.network, full, [member]) for member in members]
    changed = []
    for copy, tensors in {_SHARED: after.shared, **after.copies}.items():
        for name, tensor in ((name, tensors[name]) for name in before if name in tensors):
            masks = [mask[name] for mask, groups in zip(held, keys, strict=True) if groups.get(name, _SHARED) == copy]
            free = ~torch.stack([torch.zeros_like(tensor, dtype=torch.bool), *masks]).any(dim=0)
            changed += [] if torch.equal(before[name][free], tensor[free]) else [name]
    return changed

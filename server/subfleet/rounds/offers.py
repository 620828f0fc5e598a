"""The offers and declarations of clients, from their profiles and telemetry. Pure."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from types import MappingProxyType

from subfleet.elastic.families import AnyFamily
from subfleet.elastic.network import Network
from subfleet.protocol.class_names import find_class_indices
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.input_statistics import InputStatistics, find_scale_problem
from subfleet.protocol.messages import ArchitectureProblem, Profile, Telemetry
from subfleet.protocol.readings import Budget, LogLow, Reading
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, Explicit, Full, IndexSet, Roll
from subfleet.protocol.text import make_printable
from subfleet.rounds.context import RunContext
from subfleet.rounds.judging import Verdict, reply
from subfleet.rounds.signals import Reply
from subfleet.rounds.state import ClientState, Offer, RunState
from subfleet.search.candidates import build_budget, limit_forward_macs
from subfleet.settings.named_networks import find_client_network
from subfleet.settings.run import Run
from subfleet.tasks import shape_problem

MOST_CHARACTERS = 400  # of a reason in tables and logs
NOT_AVAILABLE = "the device is not available now"
"""Why a client that could take part was skipped."""


def build_client(
    context: RunContext, state: RunState, profile: Profile, telemetry: Telemetry, *, suited: bool = False
) -> ClientState:
    """The state of a client that has sent its telemetry; skipped if it cannot take part.

    Args:
        context: the run context.
        state: the run's state. Free disk bytes from an earlier refusal count if the telemetry has none.
        profile: the client's profile.
        telemetry: the client's telemetry.
        suited: whether its profile is known to suit the run.
    """
    if telemetry.disk_budget_bytes is None:
        telemetry = replace(telemetry, disk_budget_bytes=state.disks.get(profile.client_id))
    class_counts, _ = count_classes(context.config, profile)
    client = ClientState(
        client_id=profile.client_id,
        device=profile.device,
        stage="answered",
        offer=Offer(
            runtime=find_runtime(context, profile),
            packing_width=profile.packing_width,
            macs_per_s=profile.macs_per_s,
            training_watts=profile.training_watts,
            budget=_build_budget(context, profile, telemetry, telemetry.reading, telemetry.memory_budget_bytes),
            lasting=_build_lasting_budget(context, profile, telemetry),
            memory_free_bytes=telemetry.reading.memory_free_bytes,
            memory_budget_bytes=_limit_memory_bytes(context, profile, telemetry.memory_budget_bytes),
            sample_count=profile.sample_count,
            telemetry_id=telemetry.message_id,
            class_counts=class_counts,
            data_warning=find_scale_warning(context, profile),
        ),
    )
    reason = "" if suited else find_profile_problem(context, profile)
    if context.roles.assigner.declarations:
        declared = judge_declaration(context, profile, state.brought.get(profile.client_id, ()))
        client = replace(client, offer=replace(client.offer, architecture=declared.size, brought=declared.network))
        reason = reason or declared.reason
    if reason:  # as long as its profile does not change
        return replace(client, stage="skipped", reason=reason[:MOST_CHARACTERS], lasts="lasting")
    if not telemetry.reading.available:
        return replace(client, stage="skipped", reason=NOT_AVAILABLE)
    return client


def find_runtime(context: RunContext, profile: Profile) -> str:
    """The program target of the run that a client prefers; empty if it runs none."""
    return next((name for name in profile.runtimes if name in context.config.targets), "")


def find_profile_problem(context: RunContext, profile: Profile) -> str:
    """Why a client cannot take part with this profile, whatever it declares; empty if it can."""
    reason = find_samples_problem(context.config, profile)
    if not reason and not find_runtime(context, profile):
        runtimes, targets = ", ".join(profile.runtimes), ", ".join(context.config.targets)
        reason = f"it runs {runtimes}, but the run has programs for {targets}"
    reason = reason or count_classes(context.config, profile)[1]
    if context.config.data.check == "refuse":
        reason = reason or find_scale_warning(context, profile)
    return reason


def _build_budget(
    context: RunContext, profile: Profile, telemetry: Telemetry, link: Reading | LogLow, offered_bytes: int
) -> Budget:
    return build_budget(
        link,
        _limit_memory_bytes(context, profile, offered_bytes),
        communication_s=context.config.communication_s,
        forward_macs=_limit_forward_macs(context, profile, telemetry.round or 1),
        disk_bytes=telemetry.disk_budget_bytes,
    )


def _limit_forward_macs(context: RunContext, profile: Profile, round_number: int) -> int | None:
    """Multiply-accumulates that a sample may take, by the seconds of a round and of a batch; None is no limit."""
    config = context.config
    if profile.macs_per_s is None or not (config.training_s or config.batch_s):
        return None
    training = context.training(round_number)
    limits = ((config.training_s, training.sample_passes(profile.sample_count)), (config.batch_s, training.batch_size))
    limited = [limit_forward_macs(profile.macs_per_s, seconds, count) for seconds, count in limits]
    return min((most for most in limited if most is not None), default=None)


def _build_lasting_budget(context: RunContext, profile: Profile, telemetry: Telemetry) -> Budget | None:
    """The budget that its log has for most of its time, as it reports it."""
    low = telemetry.log_low
    if low is None or context.log_quantile is None:
        return None
    return _build_budget(context, profile, telemetry, low, low.memory_budget_bytes)


def _limit_memory_bytes(context: RunContext, profile: Profile, offered_bytes: int) -> int:
    limits = context.config.memory_limits
    return limits.bound(offered_bytes, device=profile.device, client_id=profile.client_id)


MOST_NETWORKS = 4
"""Networks of its own that a client may declare in a run: each may need another union model."""
_OTHERWISE: ArchitectureProblem = "not_in_space"


@dataclass(frozen=True, slots=True, kw_only=True)
class Declaration:
    """A judged declaration.

    Attributes:
        size: the declared size of the method's space; None if it is none.
        network: the device's own network; None if it declares none that can take part.
        problem: what is wrong; None if it is valid, or nothing is declared.
        reason: the problem in words.
    """

    size: Architecture | None = None
    network: AnyFamily | None = None
    problem: ArchitectureProblem | None = None
    reason: str = ""


def judge_declaration(context: RunContext, profile: Profile, before: tuple[str, ...] = ()) -> Declaration:
    """Judge the declaration of a device. Only the size of a submodel counts, wherever it lies on its axes.

    Args:
        context: the run context.
        profile: the device's profile.
        before: digests of the networks that it has declared before, see `remember_network`.
    """
    architecture = profile.architecture
    if architecture is None and not profile.network:
        return Declaration(
            reason="the method needs declared architectures, but the device declares none; declare one with "
            "--architecture, or in its profile"
        )
    if not context.roles.assigner.declarations:
        return Declaration(
            problem="not_used",
            reason=f"the run's method {context.config.method.TYPE!r} uses no declarations and assigns what fits",
        )
    if architecture is None:
        return _judge_network(context, profile.network, before)
    try:
        size = context.network.size_of(architecture)
    except ConfigError as error:
        problems = (*_list_problems(context.network, architecture), _OTHERWISE)
        return Declaration(problem=problems[0], reason=make_printable(str(error))[:MOST_CHARACTERS])
    known = next((other for other in context.space if (other.axes, other.blocks) == (size.axes, size.blocks)), None)
    if known is None:
        smallest, largest = context.space[0].name, context.space[-1].name
        return Declaration(
            problem="not_in_space",
            reason=f"the declared architecture is not one of the {len(context.space)} sizes of the run, from "
            f"{smallest!r} to {largest!r}; declare a size that `subfleet preflight --json` lists, or change the run's "
            "rates",
        )
    return Declaration(size=known)


def reply_to_declaration(context: RunContext, profile: Profile, before: tuple[str, ...] = ()) -> tuple[Reply, ...]:
    """The answer to a profile that declares an architecture; see `judge_declaration` for the arguments."""
    if profile.architecture is None and not profile.network:
        return ()
    declaration = judge_declaration(context, profile, before)
    status: Verdict = "refused" if declaration.size is None and declaration.network is None else "accepted"
    return (reply(profile.client_id, profile.message_id, status, declaration.reason, problem=declaration.problem),)


def remember_network(state: RunState, client: ClientState) -> RunState:
    """The state that remembers a client's own network."""
    known = state.brought.get(client.client_id, ())
    if client.offer.brought is None or (digest := _compute_digest(client.offer.brought)) in known:
        return state
    return replace(state, brought=MappingProxyType({**state.brought, client.client_id: (*known, digest)}))


def _judge_network(context: RunContext, text: str, before: tuple[str, ...]) -> Declaration:
    try:
        network = find_client_network(text, context.config.model, context.config.networks)
    except ConfigError as error:
        reason = make_printable(f"its declared network is invalid: {error}")[:MOST_CHARACTERS]
        return Declaration(problem="no_network", reason=reason)
    if len(before) >= MOST_NETWORKS and _compute_digest(network) not in before:
        return Declaration(
            problem="too_many",
            reason=f"it has declared {len(before)} networks in this run and declares another, but may declare only "
            f"{MOST_NETWORKS}; declare an earlier one again",
        )
    return Declaration(network=network)


@lru_cache(maxsize=2**12)  # each heartbeat of a client repeats it
def _compute_digest(network: AnyFamily) -> str:
    return hashlib.sha256(canonical_json(network)).hexdigest()[:16]


def _list_problems(network: Network, architecture: Architecture) -> Iterator[ArchitectureProblem]:
    """What is wrong with an invalid architecture, the most specific first; groups and orders are not checked."""
    if any(name not in network.axes for name, _ in architecture.axes):
        yield "unknown_axis"
    if architecture.choices or not set(architecture.blocks) <= {block.name for block in network.blocks}:
        yield "unknown_block"
    known = ((index_set, network.axes[name]) for name, index_set in architecture.axes if name in network.axes)
    if any(_compute_needed_size(index_set) > axis.size for index_set, axis in known):
        yield "too_large"


def _compute_needed_size(index_set: IndexSet) -> int:
    """The size that an axis needs for these indices."""
    if isinstance(index_set, Full):
        return 0
    if isinstance(index_set, Explicit):
        return max(index_set.indices) + 1
    return max(index_set.size, index_set.start + 1) if isinstance(index_set, Roll) else index_set.size


def count_classes(config: Run, profile: Profile) -> tuple[tuple[int, ...], str]:
    """The number of a client's labels of each of the run's classes; and why it cannot take part, else an empty text.

    The client maps its data by the same names and the same rule.
    """
    class_count, counts = config.model.class_count, profile.class_counts
    if not config.training.objective.over_classes:
        return (), ""  # whole numbers are targets, too
    if not counts:
        return (), "its labels are floating point numbers, but the run's labels are classes"
    if not profile.class_names:
        problem = f"its data have {len(counts)} classes, but the model has {class_count}"
        return counts, problem if len(counts) > class_count else ""
    try:
        indices = find_class_indices(profile.class_names, config.data.classes, class_count)
    except ValueError as error:
        return (), str(error)
    ordered = [0] * class_count
    for index, count in zip(indices, counts, strict=True):
        ordered[index] = count
    return tuple(ordered), ""


REMEDY = "scale them alike, or set check in [data] of the run's file"


def find_samples_problem(config: Run, profile: Profile) -> str:
    """Why a client's samples cannot be fed to the run's model; empty if they can, as far as is known."""
    transform = config.data.transform
    if profile.sizes_differ and (transform is None or not transform.fixes_size):
        return "its images differ in size, and the run does not resize them; set resize in [data.transform]"
    shapes = (profile.input_shape, *profile.other_input_shapes)
    problems = [_find_shape_problem(config, shape) for shape in shapes]
    if all(problems):
        return f"its samples {problems[0]}"
    return "" if profile.inputs is None else _find_kind_problem(config, profile.inputs)


def _find_shape_problem(config: Run, shape: tuple[int, ...]) -> str:
    transform = config.data.transform
    if transform is None:
        return shape_problem(shape, config.model.input_shape)
    try:
        return shape_problem(transform.shape_of(shape), config.model.input_shape)
    except ValueError as error:
        return f"cannot be transformed by the run's data.transform: {error}"


def _find_kind_problem(config: Run, inputs: InputStatistics) -> str:
    """Whether the samples are indices or numbers unlike the model's inputs, or beyond its vocabulary."""
    vocabulary: int = getattr(config.model, "vocabulary", 0)
    expected = "indices" if vocabulary else "numbers"
    if inputs.kind != expected:
        return f"its samples are {inputs.kind}, but the model takes {expected}"
    if vocabulary and inputs.maximum >= vocabulary:
        return f"its samples go up to {inputs.maximum:.0f}, but the model takes indices below {vocabulary}"
    return ""


def find_scale_warning(context: RunContext, profile: Profile) -> str:
    """Why a client's inputs and the evaluation data differ in scale; empty if they do not, as far as is known."""
    evaluation = context.evaluation_inputs
    if context.config.data.check == "off" or evaluation is None or profile.inputs is None:
        return ""
    problem = find_scale_problem(profile.inputs, evaluation)
    if not problem:
        return ""
    return (
        f"its inputs range from {profile.inputs}, those of the evaluation data from {evaluation}: {problem}; {REMEDY}"
    )

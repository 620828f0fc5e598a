"""Strategies for all messages, derived from their annotations, so that new fields are covered automatically."""

import dataclasses
import types
import typing
from typing import Any

from hypothesis import strategies as st

from subfleet.protocol.blobs import BlobRef, ByteRange
from subfleet.protocol.calibration import Calibration, NormLayer
from subfleet.protocol.candidate_scores import CandidateScore
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.input_statistics import InputStatistics
from subfleet.protocol.limits import MAX_LOSS
from subfleet.protocol.messages import MAX_SAMPLES, MESSAGES, Message
from subfleet.protocol.metric_sums import SCORE_BINS, MetricSums
from subfleet.protocol.paths import PathScore
from subfleet.protocol.schema import MAX_INTEGER
from subfleet.protocol.submodel import Architecture, Explicit, Full, Prefix, Roll
from subfleet.protocol.task import Deploy, Score, TaskSubmodel, Work
from subfleet.protocol.text import CONTROL_CHARACTERS
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.protocol.transform import DataTransform

_CLIENT_IDS = st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}", fullmatch=True)
_SIZES = st.integers(1, MAX_INTEGER)
_CHARACTERS = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
_NAMES = st.text(_CHARACTERS.filter(lambda character: not CONTROL_CHARACTERS.match(character)), max_size=12)
_PRINTABLE = st.from_regex(r"[ -~]{1,12}", fullmatch=True)
_CLASS_NAMES = st.from_regex(r"[!-~]{1,12}", fullmatch=True)
_INDEX_SETS = st.one_of(
    st.builds(Prefix, size=_SIZES),
    st.builds(Roll, start=st.integers(0, MAX_INTEGER), size=_SIZES),
    st.builds(Explicit, indices=st.lists(st.integers(0, 99), min_size=1, max_size=6, unique=True).map(tuple)),
    st.builds(Full),
)
ARCHITECTURES = st.builds(
    Architecture,
    axes=st.dictionaries(_NAMES, _INDEX_SETS, max_size=4).map(lambda axes: tuple(sorted(axes.items(), key=_first))),
    blocks=st.lists(_NAMES, unique=True, max_size=4).map(tuple),
    choices=st.dictionaries(_NAMES, st.lists(_NAMES, min_size=1, max_size=3, unique=True).map(tuple), max_size=3).map(
        lambda choices: tuple(choices.items())
    ),
    name=_NAMES,
    network=st.just("") | _NAMES,
)
_POPULATIONS = st.lists(st.lists(_NAMES, min_size=1, max_size=2).map(tuple), max_size=2).map(tuple)
_BLOBS = st.builds(BlobRef, sha256=st.from_regex(r"[0-9a-f]{64}", fullmatch=True), size_bytes=_SIZES)
_BINS = st.lists(st.integers(0, 2**50), min_size=2, max_size=2).map(lambda counts: tuple(counts) * (SCORE_BINS // 2))
_SUMS = st.one_of(
    st.builds(MetricSums),
    st.builds(
        MetricSums,
        class_predicted=st.lists(st.integers(0, 2**50), max_size=4).map(tuple),
        positives=_BINS,
        negatives=_BINS,
    ),
    st.lists(st.floats(0, 2.0**128), min_size=1, max_size=3).map(
        lambda sums: MetricSums(
            absolute_errors=tuple(sums),
            squared_errors=tuple(sums),
            targets=tuple(-number for number in sums),
            squared_targets=tuple(sums),
        )
    ),
)
_BY_TYPE: dict[Any, st.SearchStrategy[Any]] = {
    str: _NAMES,
    bool: st.booleans(),
    int: _SIZES,
    float: st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    Architecture: ARCHITECTURES,
    BlobRef: _BLOBS,
    ByteRange: st.builds(ByteRange, offset=st.integers(0, MAX_INTEGER), length=_SIZES),
    OptimiserSettings: st.builds(
        OptimiserSettings, name=st.just("sgd"), momentum=st.floats(0, 0.99), weight_decay=st.floats(0, 1)
    ),
    TrainingSettings: st.builds(TrainingSettings),
    PathScore: st.builds(PathScore, loss=st.floats(0, MAX_LOSS, exclude_max=True), accuracy=st.floats(0, 1)),
    CandidateScore: st.one_of(
        st.builds(CandidateScore, score=st.floats(allow_nan=False, allow_infinity=False)),
        st.builds(CandidateScore, score=st.none(), reason=_PRINTABLE),
    ),
    Calibration: st.builds(
        Calibration,
        norms=st.lists(
            st.builds(
                NormLayer,
                name=_NAMES,
                positions=st.integers(1, 2**31),
                momentum=st.floats(0.001, 1),
                scale=st.floats(0.01, 2),
            ),
            min_size=1,
            max_size=3,
            unique_by=lambda norm: norm.name,
        ).map(tuple),
    ),
    MetricSums: _SUMS,
    InputStatistics: st.lists(st.floats(0, 1e30), min_size=3, max_size=3).map(
        lambda numbers: InputStatistics(
            kind="numbers",
            minimum=-max(numbers),
            maximum=max(numbers),
            mean=numbers[0] - numbers[1] / 2,
            deviation=numbers[2],
        )
    ),
    EvaluationSettings: st.builds(
        EvaluationSettings, batch_size=_SIZES, per_class=st.booleans(), population=_POPULATIONS
    ),
    DataTransform: st.builds(
        DataTransform,
        channels=st.sampled_from([0, 1, 3]),
        resize=st.lists(st.integers(64, 4096), max_size=2).map(tuple),
        crop=st.lists(st.integers(1, 64), max_size=2).map(tuple),
        mean=st.tuples(st.floats(-1e6, 1e6)),
        deviation=st.tuples(st.floats(1e-6, 1e6)),
    ),
}
_COUNTS = st.dictionaries(_NAMES, st.integers(0, 2**53), max_size=3).map(lambda counts: tuple(counts.items()))
_BY_FIELD: dict[str, st.SearchStrategy[Any]] = {
    "operator_examples": st.dictionaries(_NAMES, _COUNTS, max_size=2).map(lambda examples: tuple(examples.items())),
    "client_id": _CLIENT_IDS,
    "holder": _CLIENT_IDS,
    "log_quantile": st.none() | st.floats(0, 1, exclude_max=True),
    "device": _PRINTABLE,
    "operators": st.lists(_PRINTABLE, max_size=3).map(tuple),
    "macs_per_s": st.one_of(st.none(), st.floats(1e-3, 1e18)),
    "training_watts": st.one_of(st.none(), st.floats(1e-3, 1e4)),
    "runtimes": st.lists(_PRINTABLE, min_size=1, max_size=3).map(tuple),
    "sample_count": st.integers(1, MAX_SAMPLES),
    "held_out_count": st.integers(0, MAX_SAMPLES),
    "sample_bytes": st.integers(0, 2**32),
    "loss": st.floats(0, MAX_LOSS, exclude_max=True),
    "square_loss": st.none() | st.floats(0, MAX_LOSS, exclude_max=True),
    "memory_fraction": st.floats(0.001, 1),
    "max_training_bytes": st.one_of(st.none(), st.integers(1, 2**60)),
    "battery_fraction": st.one_of(st.none(), st.floats(0, 1)),
    "cpu_load": st.one_of(st.none(), st.floats(0, 1)),
    "fraction": st.floats(0.001, 1),
    "levels": st.integers(1, 127),
    "bucket_size": st.integers(1, 2**20),
    "class_names": st.just(()),
    "batches": st.integers(2, 100),
    "classes": st.lists(_CLASS_NAMES, max_size=3, unique=True).map(tuple),
}


def _first(pair: tuple[str, Any]) -> str:
    return pair[0]


def _values_of(kind: Any) -> st.SearchStrategy[Any]:
    origin, members = typing.get_origin(kind), typing.get_args(kind)
    if kind in _BY_TYPE:
        return _BY_TYPE[kind]
    if origin is typing.Literal:
        return st.sampled_from(members)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(st.none() if member is type(None) else _values_of(member) for member in members))
    if origin is tuple:
        return st.lists(_values_of(members[0]), min_size=1, max_size=3).map(tuple)
    if origin is dict:
        return st.dictionaries(_NAMES, _values_of(members[1]), max_size=3)
    return _instances(kind)


def _instances(kind: Any, **fixed: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    hints = typing.get_type_hints(kind)
    names = [field.name for field in dataclasses.fields(kind)]
    fields = {name: _BY_FIELD[name] if name in _BY_FIELD else _values_of(hints[name]) for name in names}
    return st.builds(kind, **fields | fixed)


_SERVER_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "run_id": _PRINTABLE,
    "message_id": _PRINTABLE,
    "deadline_s": st.floats(0, 1e9),
}
"""Fields from which devices compose ids, and deadlines."""
_ROUND_FIELDS: dict[str, st.SearchStrategy[Any]] = dict.fromkeys(
    ("round", "round_count", "attempt"), st.integers(0, 2**31 - 1)
)


@st.composite
def _tasks(draw: st.DrawFn) -> Message:
    """Score tasks have several submodels, other tasks one; only deploy tasks have no weights."""
    work = draw(_values_of(Work))
    weights = st.none() if isinstance(work, Deploy) else _BLOBS
    submodels = draw(st.lists(_instances(TaskSubmodel, weights=weights), min_size=1, max_size=3))
    count = None if isinstance(work, Score | Deploy) else 1
    fixed = _SERVER_FIELDS | {
        "task_id": _PRINTABLE,
        "work": st.just(work),
        "submodels": st.just(tuple(submodels[:count])),
    }
    message: Message = draw(_instances(MESSAGES["task"], **fixed))
    return message


@st.composite
def _evaluations(draw: st.DrawFn) -> Message:
    """No class has more correct labels than labels, and the class counts add up to the label count."""
    counts = draw(st.lists(st.integers(0, 2**30), max_size=4).filter(lambda numbers: not numbers or sum(numbers) > 0))
    message: Message = draw(
        _instances(
            MESSAGES["evaluated"],
            accuracy=st.floats(0, 1),
            label_count=st.just(sum(counts)) if counts else st.integers(1, 2**50),
            class_counts=st.just(tuple(counts)),
            class_correct=st.tuples(*(st.integers(0, count) for count in counts)),
        )
    )
    return message


@st.composite
def _profiles(draw: st.DrawFn) -> Message:
    """A profile names all of its classes or none, and declares a submodel, a network or nothing."""
    declared = st.none() | st.builds(dataclasses.replace, ARCHITECTURES, name=_PRINTABLE)
    draft = draw(_instances(MESSAGES["profile"], network=st.just(""), architecture=declared))
    network = "" if draft.architecture is not None else draw(st.just("") | _PRINTABLE)
    count = draw(st.sampled_from([0, len(draft.class_counts)]))
    names = draw(st.lists(_CLASS_NAMES, min_size=count, max_size=count, unique=True))
    return typing.cast("Message", dataclasses.replace(draft, class_names=tuple(names), network=network))


MESSAGE_STRATEGIES: dict[str, st.SearchStrategy[Message]] = {
    **{name: _instances(kind) for name, kind in MESSAGES.items()},
    "task": _tasks(),
    "round": _instances(MESSAGES["round"], **_SERVER_FIELDS, **_ROUND_FIELDS),
    "profile": _profiles(),
    "evaluated": _evaluations(),
}
EVERY_MESSAGE = st.one_of(*MESSAGE_STRATEGIES.values())

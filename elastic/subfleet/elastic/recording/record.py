"""A recorded network as plain data: axes, tensors, blocks and the calls of functions in training and evaluation."""

import base64
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from subfleet.elastic.axes import Axis
from subfleet.protocol.errors import ConfigError

_LINE_CHARACTERS = 4000
_MOST_BYTES = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedTensor:
    """A tensor of the module.

    Attributes:
        name: in its state.
        shape: sizes, see `subfleet.elastic.recording.sizes`.
        parameter: whether it is a parameter; else a buffer of its state.
        trained: whether training changes it.
        role: see `subfleet.elastic.network.TensorDecl`.
        positions: number of places of a sample at which it is applied.
        start: mean and standard deviation of the values that the module begins with; None if they follow from its role.
        values: these values, encoded, if training does not change them and they are few; else empty.
    """

    name: str
    shape: tuple[Any, ...]
    parameter: bool
    trained: bool
    role: str
    positions: int
    start: tuple[float, float] | None
    values: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBlock:
    """A block: a layer that a submodel can leave out, or that others are like.

    Attributes:
        name: the path of its layer.
        section: index of its section.
        kept: whether no submodel leaves it out.
        reads: axis of its input's channels; empty if they are not cut.
        gives: axis of its output's channels, likewise; the same one if leaving the block out needs nothing else.
    """

    name: str
    section: int
    kept: bool = False
    reads: str = ""
    gives: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPlan:
    """The calls in one mode.

    Attributes:
        calls: see `subfleet.elastic.recording.encoding`.
        out: number of the result.
        blocks: by block, its first call, the call after it, and the numbers of its input and its result.
        constants: encoded tensors that belong to no layer.
    """

    calls: Sequence[Any]
    out: int
    blocks: dict[str, tuple[int, int, int, int]]
    constants: Sequence[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedProduct:
    """A product of computed values; see `subfleet.elastic.network.MatrixProduct`."""

    result: tuple[Any, ...]
    summed: tuple[Any, ...]
    layer: str


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class NetworkRecord:
    """A recorded network.

    Attributes:
        symbols: size of the vocabulary if inputs are tokens; 0 if they are numbers.
        class_count: number of classes, labels or numbers that it predicts.
        predicts: what it predicts for: "sample", "token" or "pixel".
        axes: in the order of its tensors.
        sums: parts of its concatenations by name; a part is a list of names of axes and numbers.
        tensors: in the order of its state.
        fixed: buffers that are not in its state or no finite floating-point numbers: name, and the encoded tensor.
        blocks: in network order.
        training: its calls in training.
        evaluation: its calls in evaluation.
        products: of attention and the like.
        whole: dimensions that are kept whole, as tensor name and place, by reason.
        loss: the record of its own loss, see `subfleet.elastic.recording.losses`; None without one.
    """

    symbols: int
    class_count: int
    predicts: Literal["sample", "token", "pixel"]
    axes: tuple[Axis, ...]
    sums: dict[str, tuple[tuple[str | int, ...], ...]]
    tensors: tuple[RecordedTensor, ...]
    fixed: tuple[Any, ...]
    blocks: tuple[RecordedBlock, ...]
    training: RecordedPlan
    evaluation: RecordedPlan
    products: tuple[RecordedProduct, ...]
    whole: dict[str, tuple[str, ...]]
    loss: "NetworkRecord | None" = None

    def __deepcopy__(self, memo: object) -> "NetworkRecord":
        """Nothing of it changes, so that copies of a module share it."""
        return self


def pack_record(record: NetworkRecord) -> tuple[str, ...]:
    """A record as compressed JSON in lines of text; equal records have equal lines."""
    text = json.dumps(_to_plain(record), separators=(",", ":"), sort_keys=True, allow_nan=False)
    packed = base64.b85encode(zlib.compress(text.encode(), 9)).decode()
    return tuple(packed[start : start + _LINE_CHARACTERS] for start in range(0, len(packed), _LINE_CHARACTERS))


@lru_cache(maxsize=64)
def unpack_record(lines: tuple[str, ...]) -> NetworkRecord:
    """Unpack the lines of `pack_record`.

    Raises:
        ConfigError: they are damaged, or too long.
    """
    try:
        decompressor = zlib.decompressobj()
        content = decompressor.decompress(base64.b85decode("".join(lines)), _MOST_BYTES)
        if decompressor.unconsumed_tail:
            raise ConfigError(f"a recorded network has more than {_MOST_BYTES} bytes")
        plain = json.loads(content)
        return _read_record(plain)
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise ConfigError(f"a recorded network is damaged: {error}; record it again") from error


def _read_record(plain: dict[str, Any]) -> NetworkRecord:
    return NetworkRecord(
        symbols=plain["symbols"],
        class_count=plain["class_count"],
        predicts=plain["predicts"],
        axes=tuple(Axis(**axis) for axis in plain["axes"]),
        sums={name: tuple(map(tuple, parts)) for name, parts in plain["sums"].items()},
        tensors=tuple(
            RecordedTensor(**{**item, "shape": tuple(item["shape"]), "start": item["start"] and tuple(item["start"])})
            for item in plain["tensors"]
        ),
        fixed=tuple(plain["fixed"]),
        blocks=tuple(RecordedBlock(**block) for block in plain["blocks"]),
        training=_read_plan(plain["training"]),
        evaluation=_read_plan(plain["evaluation"]),
        products=tuple(
            RecordedProduct(result=tuple(item["result"]), summed=tuple(item["summed"]), layer=item["layer"])
            for item in plain["products"]
        ),
        whole={reason: tuple(names) for reason, names in plain["whole"].items()},
        loss=_read_record(plain["loss"]) if "loss" in plain else None,
    )


def _read_plan(plain: dict[str, Any]) -> RecordedPlan:
    blocks = {name: tuple(numbers) for name, numbers in plain["blocks"].items()}
    return RecordedPlan(calls=plain["calls"], out=plain["out"], blocks=blocks, constants=plain["constants"])


def _to_plain(value: Any) -> Any:
    if hasattr(value, "__dataclass_fields__"):
        fields = {name: getattr(value, name) for name in value.__dataclass_fields__}
        return {name: _to_plain(field) for name, field in fields.items() if name != "loss" or field is not None}
    if isinstance(value, dict):
        return {key: _to_plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list)):
        return [_to_plain(item) for item in value]
    return value

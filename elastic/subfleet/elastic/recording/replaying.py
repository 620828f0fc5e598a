"""Builds a module of any size from a recorded network."""

import base64
from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from subfleet.elastic.axes import add_sums
from subfleet.elastic.recording.expressions import compute_size
from subfleet.elastic.recording.functions import list_functions
from subfleet.elastic.recording.inserting import list_ends, list_unused
from subfleet.elastic.recording.record import NetworkRecord, RecordedPlan
from subfleet.protocol.errors import ConfigError


class _Layer(nn.Module):
    """A layer of the recorded module: it holds its tensors, and runs the calls that it made."""

    def forward(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> Any:
        return function(*args, **kwargs)


class ReplayedModule(nn.Module):
    """A recorded network with given sizes. Names of its tensors are those of the recorded module.

    Args:
        record: the network.
        sizes: number of kept indices by axis and sum.
        parts: names of the kept blocks.

    Attributes:
        replaced_blocks: functions that compute some blocks, in place of `compute_block` and with its arguments after
            the name.
        own_loss: maps outputs and labels to the loss of each label that training minimises in place of the objective's;
            None without one.
    """

    def __init__(self, record: NetworkRecord, sizes: Mapping[str, int], parts: frozenset[str]) -> None:
        super().__init__()
        self._record = record
        self._unused = {mode: list_unused(plan) for mode, plan in ((True, record.training), (False, record.evaluation))}
        self._whole = add_sums(record.sums, {axis.name: axis.size for axis in record.axes})
        self.replaced_blocks: dict[str, Callable[..., Sequence[Tensor]]] = {}
        self.own_loss = None if record.loss is None else _OwnLoss(record, record.loss)
        self._sizes = {name: int(size) for name, size in sizes.items()}
        self._dropped = frozenset(block.name for block in record.blocks if not block.kept) - parts
        dropped = tuple(f"{name}." for name in self._dropped)
        for tensor in record.tensors:
            if tensor.name.startswith(dropped):
                continue
            layer, _, own = tensor.name.rpartition(".")
            holder = self._add_layer(layer)
            shape = tuple(compute_size(size, sizes) for size in tensor.shape)
            values = torch.empty(shape)
            if tensor.parameter or not tensor.trained:  # what is frozen needs no output in programs
                holder.register_parameter(own, nn.Parameter(values, requires_grad=tensor.trained))
            else:
                holder.register_buffer(own, values)
        for name, *encoded in record.fixed:
            if not name.startswith(dropped):
                layer, _, own = name.rpartition(".")
                # A plain attribute: constants are in no state, and may be integers.
                setattr(self._add_layer(layer), own, _decode_tensor(*encoded))
        for mode, plan in (("training", record.training), ("evaluation", record.evaluation)):
            for number, encoded in enumerate(plan.constants):
                setattr(self, f"{mode}_constant{number}", _decode_tensor(*encoded))
        for call in (*record.training.calls, *record.evaluation.calls):
            if not f"{call[4]}.".startswith(dropped):
                self._add_layer(call[4])

    def _add_layer(self, path: str) -> "_Layer | ReplayedModule":
        layer: Any = self
        for name in path.split(".") if path else ():
            if name not in layer._modules:  # noqa: SLF001 - names such as "add" are attributes of modules
                layer._modules[name] = _Layer()  # noqa: SLF001
            layer = layer._modules[name]  # noqa: SLF001
        found: _Layer | ReplayedModule = layer
        return found

    def forward(self, inputs: Tensor) -> Tensor:
        """Make the calls of the recorded run. Logits of pixels have the classes last, as training programs expect."""
        replay = _Replay(self, inputs.device, len(inputs), {0: inputs})
        plan, position, unused = self._plan, 0, self._unused[self.training]
        spans = {name: plan.blocks[name][:2] for name in (*self._dropped, *self.replaced_blocks)}
        special = {start: name for name, (start, stop) in spans.items() if start < stop}
        while position < len(plan.calls):
            begin, name = position, special.get(position)
            if name is None:
                replay.make(plan.calls[position])
                position += 1
            else:
                position = self._pass_block(replay, plan, name)
            for number in chain.from_iterable(unused[begin:position]):
                replay.values.pop(number, None)
        logits = replay.values[plan.out]
        return logits.permute(0, 2, 3, 1) if self._record.predicts == "pixel" else logits

    def _pass_block(self, replay: "_Replay", plan: RecordedPlan, name: str) -> int:
        """Leave out a block, or let its replacement compute it; returns the number of calls before what follows it."""
        _, stop, source, out = plan.blocks[name]
        if name in self._dropped:
            replay.values[out] = replay.values[source]
        else:
            read, given = list_ends(plan, name)
            results = self.replaced_blocks[name](replay.batch, *(replay.values[number] for number in read))
            replay.values |= zip(given, results, strict=True)
        return stop

    @property
    def _plan(self) -> RecordedPlan:
        return self._record.training if self.training else self._record.evaluation

    def list_blocks(self) -> tuple[str, ...]:
        """Names of its blocks."""
        return tuple(block.name for block in self._record.blocks if block.name not in self._dropped)

    def compute_block(self, name: str, batch: int, *given: Tensor) -> tuple[Tensor, ...]:
        """Make the calls of a block alone.

        Args:
            name: of the block.
            batch: number of samples of the batch.
            given: the results of other calls that it reads.

        Returns:
            Its results that other calls read.
        """
        read, gives = list_ends(self._plan, name)
        replay = _Replay(self, given[0].device, batch, dict(zip(read, given, strict=True)))
        start, stop, *_ = self._plan.blocks[name]
        for call in self._plan.calls[start:stop]:
            replay.make(call)
        return tuple(replay.values[number] for number in gives)

    def find_layer(self, path: str) -> Any:
        """The layer with a path."""
        layer: Any = self
        for name in path.split(".") if path else ():
            layer = layer._modules[name]  # noqa: SLF001
        return layer

    def find_tensor(self, name: str) -> Tensor:
        """A parameter or buffer."""
        layer, _, own = name.rpartition(".")
        tensor: Tensor = getattr(self.find_layer(layer), own)
        return tensor

    def find_dtype(self) -> torch.dtype:
        """The type of its parameters; float32 when it was recorded."""
        return next(
            (parameter.dtype for parameter in self.parameters() if parameter.is_floating_point()), torch.float32
        )

    def find_constant(self, number: int) -> Tensor:
        """A tensor that neither the recorded module nor its calls own."""
        tensor: Tensor = getattr(self, f"{'training' if self.training else 'evaluation'}_constant{number}")
        return tensor

    def compute_whole(self, size: Any) -> int:
        """A size in the whole network."""
        return int(compute_size(size, self._whole))

    def compute_size(self, size: Any, batch: int) -> int:
        """A size in this module."""
        return int(compute_size(size, self._sizes, batch))


def replay_whole(record: NetworkRecord) -> ReplayedModule:
    """The whole recorded network, with all blocks; its tensors have no values yet."""
    sizes = add_sums(record.sums, {axis.name: axis.size for axis in record.axes})
    return ReplayedModule(record, sizes, frozenset(block.name for block in record.blocks))


class _OwnLoss:
    """The recorded loss of a network.

    Args:
        network: whose outputs it takes; those of pixels have the classes last.
        loss: its loss.
    """

    def __init__(self, network: NetworkRecord, loss: NetworkRecord) -> None:
        self._module = ReplayedModule(loss, {}, frozenset())
        self._pixels = network.predicts == "pixel"

    def __call__(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Compute the loss of each label, in the labels' shape."""
        outputs = outputs.permute(0, 3, 1, 2) if self._pixels else outputs
        samples = torch.cat([outputs.flatten(1), labels.reshape(len(outputs), -1).to(outputs.dtype)], 1)
        losses: Tensor = self._module(samples)
        return losses.reshape(labels.shape)


class _Replay:
    """The results of a run so far."""

    def __init__(self, module: ReplayedModule, device: torch.device, batch: int, values: dict[int, Tensor]) -> None:
        self._module = module
        self._functions = list_functions()
        self.batch, self.values = batch, values
        self._decoders: Mapping[str, Callable[[Any], Any]] = {
            "value": self.values.__getitem__,
            "state": lambda name: module.find_tensor(name).to(device),
            "constant": lambda number: module.find_constant(number).to(device),
            "size": lambda size: module.compute_size(size, batch),
            "whole": module.compute_whole,
            "tuple": lambda items: tuple(map(self._decode, items)),
            "slice": lambda bounds: slice(*map(self._decode, bounds)),
            "dtype": lambda name: module.find_dtype() if name == "float32" else _read_type(name),
            "device": lambda _: device,
            "float": float,
            "ellipsis": lambda _: Ellipsis,
            "dict": lambda pairs: {key: self._decode(item) for key, item in pairs},
        }

    def make(self, call: list[Any]) -> None:
        """Make a recorded call, and keep its results."""
        name, args, kwargs, numbers, layer = call
        if name not in self._functions:
            raise ConfigError(f"layer {layer!r} calls {name}, which a recorded network cannot call")
        given = [self._decode(item) for item in args], {key: self._decode(item) for key, item in kwargs.items()}
        path = self._module.find_layer(layer)
        function = self._functions[name]
        out = path(function, *given) if isinstance(path, _Layer) else function(*given[0], **given[1])
        for number, result in zip(numbers, out, strict=True) if isinstance(numbers, list) else [(numbers, out)]:
            if number is not None:
                self.values[number] = result

    def _decode(self, value: Any) -> Any:
        if isinstance(value, dict):
            ((kind, content),) = value.items()
            return self._decoders[kind](content)
        return [self._decode(item) for item in value] if isinstance(value, list) else value


def _read_type(name: str) -> torch.dtype:
    kind = getattr(torch, name, None)
    if not isinstance(kind, torch.dtype):
        raise ConfigError(f"a recorded network has the type {name!r:.80}, which is none of PyTorch's; record it again")
    return kind


def _decode_tensor(dtype: str, shape: list[int], content: str) -> Tensor:
    """Decode what `subfleet.elastic.recording.encoding.encode_tensor` encoded."""
    numbers = bytearray(base64.b85decode(content))
    kind = _read_type(dtype)
    return torch.frombuffer(numbers, dtype=kind).reshape(shape) if numbers else torch.empty(shape, dtype=kind)

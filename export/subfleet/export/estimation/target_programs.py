"""The kernels that each target runs for a step, with their layers, from a traced graph or the runtime's own graph."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import onnx
import torch
from torch import fx

from subfleet.export.layouts import settle_layouts
from subfleet.export.lowerings.taps import MOST_COLUMNS
from subfleet.export.lowerings.winograd import FEWEST_CHANNELS
from subfleet.export.memory.blocks import BlockRequest, KernelCall, calls_of, size_bytes_of
from subfleet.export.memory.executorch_plan import BASE_BYTES, GROWTH_LINES, PROGRAM_COPIES
from subfleet.export.memory.onnx_arena import simulate_arena
from subfleet.export.memory.onnx_plan import FIRST_SESSION_BYTES, TRAINING_BYTES, VALUE_BYTES, executed_calls
from subfleet.export.memory.onnx_run import TensorType, read_onnx
from subfleet.export.memory.step_bytes import COUNTED_STEP_BYTES
from subfleet.export.nodes import argument, shape_of
from subfleet.export.steps.step import Step
from subfleet.export.targets import torch as eager
from subfleet.export.targets.executorch import ExecutorchTarget
from subfleet.export.targets.onnx import OnnxTarget, training_model
from subfleet.export.targets.xnnpack.delegating import DelegateRegion, prepare, region_graph, split_regions
from subfleet.export.targets.xnnpack.operators import is_supported, part, product_by_transposed
from subfleet.export.targets.xnnpack.reductions import LONGEST_PRODUCT, list_row_products
from subfleet.export.tracing import inputs_of, results_of, trace
from subfleet.protocol.memory_plan import USUAL_WIDTH
from subfleet.protocol.programs import Role

_NONE = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProgram:
    """The kernels of a program, in order.

    Attributes:
        calls: of the kernels.
        names: of the step's values among those of the calls.
        base_bytes: of the runtime, for any program.
        value_bytes: for each of the step's values.
        lines: factors and constants; the smallest result for the most bytes of blocks in use is what the runtime takes,
            but for blocks that outlive a part of the program.
        holes: the factor of the buffers of these blocks over the most that are in use at once.
        measure_arena: returns what the allocator takes instead.
        held_factors: by role, planned bytes divided by those of the step's values, if that is not 1.
        unrolls: whether a convolution is a product for each position of its kernel.
        joined: the fraction of what is held for these that becomes a single one if a kernel of at most nine positions
            has fewer inputs than the first of `narrow_channels`.
        single_bytes: what is held for the calls of a 3x3 convolution that is cut to one position.
        narrow_bytes: the most that is held for the calls of a 3x3 convolution with fewer inputs than the first of
            `narrow_channels`, and with fewer inputs or outputs than the second.
        narrow_channels: see `narrow_bytes`.
    """

    calls: tuple[KernelCall, ...]
    names: Mapping[str, str]
    base_bytes: int
    value_bytes: int = 0
    lines: tuple[tuple[float, float], ...] = ((1.0, 0.0),)
    holes: float = 1.0
    measure_arena: Callable[[Iterable[BlockRequest]], int] | None = None
    held_factors: Mapping[Role, float] = field(default_factory=dict)
    unrolls: bool = False
    joined: float = 0.0
    single_bytes: int = 0
    narrow_bytes: tuple[int, int] = (_NONE, _NONE)
    narrow_channels: tuple[int, int] = (0, 0)


def layers_of(program: TracedProgram, step: Step, order: Sequence[str]) -> list[int]:
    """Return for each call the position of the tensor that identifies its layer; -1 for none.

    In the forward pass it is the last tensor that was read. In the backward pass it is the only tensor with a gradient
    that depends on the call, or else the first one that was read again. A call that only cuts or reshapes belongs to
    the layer that reads its result, if it is one. A pool belongs to the layer behind it, with its gradient: a block
    that may be left out gives as much as it is given, so the pool behind it stays without it.
    """
    positions, names = {name: position for position, name in enumerate(order)}, program.names
    read_values = (value for value in step.inputs if value.role in {"parameter", "frozen", "buffer"})
    held = {names[value.name]: positions[value.tensor] for value in read_values if value.tensor in positions}
    given = {names[value.name]: positions[value.tensor] for value in step.outputs if value.tensor in positions}
    follows = _outcomes(program.calls, given, names["loss"])
    behind = _layers_behind([call for call, (forward, *_) in zip(program.calls, follows, strict=True) if forward], held)
    pooled = dict[str, int]()  # the layer behind the pool that computes a value
    layer_of, backward, layers = dict[str, int](), set[str](), list[int]()  # by computed value
    for call, (forward, first, last) in zip(program.calls, follows, strict=True):
        read = {held[name] for name in call.inputs if name in held}
        seen = [layer_of[name] for name in call.inputs if name in layer_of]
        if len(read) == 1 and all(name in held for name in call.inputs):
            layer = min(read)
            held.update(dict.fromkeys(call.outputs, layer))  # such as a transposed weight
        else:
            again = [layer_of[name] for name in call.inputs if name in backward and layer_of[name] >= 0]
            back = first if first == last else min([*read, *again], default=max(seen, default=-1))
            layer = max([-1, *read, *seen]) if forward else back
            layer_of.update(dict.fromkeys(call.outputs, layer))
            backward.update(() if forward else call.outputs)
        if call.pools:
            known, own = (behind, call.outputs) if forward else (pooled, call.inputs)
            layer = max((known[name] for name in own if name in known), default=layer)
            pooled.update(dict.fromkeys(call.outputs, layer))
        layers.append(layer)
    readers: dict[str, set[int]] = {}
    for at in reversed(range(len(layers))):
        call = program.calls[at]
        reading = {layer for name in call.outputs for layer in readers.get(name, ())}
        if call.passes_on and len(reading) == 1:
            (layers[at],) = reading
        for name in call.inputs:
            readers.setdefault(name, set()).add(layers[at])
    return layers


def _layers_behind(calls: Sequence[KernelCall], held: Mapping[str, int]) -> dict[str, int]:
    """Return for each value the position of the first tensor that calls read together with what depends on it."""
    behind = dict[str, int]()
    for call in reversed(calls):
        read = [held[name] for name in call.inputs if name in held]
        ahead = read or [behind[name] for name in call.outputs if name in behind]
        behind.update({name: min(*ahead, behind.get(name, _NONE)) for name in call.inputs if ahead})
    return behind


def _outcomes(calls: Sequence[KernelCall], given: Mapping[str, int], loss: str) -> list[tuple[bool, int, int]]:
    """Return whether the loss depends on each call, and the first and the last tensor with a new value that does."""
    follows = [
        (loss in call.outputs, min(own, default=_NONE), max(own, default=-1))
        for call in calls
        for own in [[given[name] for name in call.outputs if name in given]]
    ]
    makers = {name: at for at, call in enumerate(calls) for name in call.outputs}
    for at in reversed(range(len(calls))):
        forward, first, last = follows[at]
        for maker in {makers[name] for name in calls[at].inputs if name in makers}:
            also, lowest, highest = follows[maker]
            follows[maker] = also or forward, min(lowest, first), max(highest, last)
    return follows


aten = torch.ops.aten
_PASSED_ON = frozenset({part, aten.view.default, aten.constant_pad_nd.default})
_JOINS = frozenset({
    aten.add.Tensor, aten.sub.Tensor, aten.cat.default, aten.view.default, aten.permute.default,
})  # fmt: skip
_TURNS = frozenset({aten.permute.default, aten.transpose.int, aten.t.default})
_PRODUCTS = frozenset({aten.mm.default, aten.bmm.default, product_by_transposed})
_SUMS = frozenset({aten.sum.dim_IntList, aten.mean.dim})
_PRODUCT_KINDS, _JOIN = ("BatchMatrixMultiply", "FullyConnected"), "Concatenate"
_PRODUCT_BYTES, _NODE_BYTES, _PART_BYTES, _BORDER_BYTES, _METHOD_BYTES = 3_150, 1_490, 900, 620, 57_000
"""Bytes of the runtime's structures and of all copies of the program: for a product of XNNPACK's, for another of its
nodes that concatenates nothing, for each tensor that is concatenated, for each that a region reads or gives, and for
any program. Over 36 submodels of 12 networks they give 0.99 to 1.013 of what was counted. A kernel of the runtime's own
takes next to nothing."""
_PLAIN_BYTES = (270_000, 405_000)
"""For the calls of a 3x3 convolution with so few inputs that its taps are laid side by side, and with too few channels
for Winograd's algorithm. Counted: 260 to 277 kB, and 398 to 410 kB, with stride 1."""
_SINGLE_BYTES = 110_000
"""For those of a convolution that is cut to one position. Counted: 107 to 161 kB."""
_JOINED = 0.6
"""Of 18 calls for a tap, 11 are those of the output and of the weights' gradient (`lowerings.taps`)."""
HOLES, _SCRATCH_BYTES = 1.05, 10_000
"""The factor of buffers over the blocks that are in use at once, and what XNNPACK's operators take besides. Measured: 2
to 70 kB in small networks."""


def executorch_program(step: Step) -> TracedProgram:
    """Trace the step for ExecuTorch.

    Tensors that outlive a region of XNNPACK's are in the program's own buffer, all others in XNNPACK's workspace.
    """
    graph = settle_layouts(trace(step, ExecutorchTarget.lowerings))
    prepare(graph)
    calls, given = list[KernelCall](), {node.name for node in inputs_of(graph)}
    parts = set[str]()  # of tensors, and what joins them, such as Winograd's transforms
    for number, region in enumerate(split_regions(graph.graph, is_supported)):
        delegated = isinstance(region, DelegateRegion)
        nodes = region.nodes if isinstance(region, DelegateRegion) else region
        held = _held_in_region(region) if isinstance(region, DelegateRegion) else [(0, ())] * len(nodes)
        for call, node, (object_bytes, constants) in zip(calls_of(nodes), nodes, held, strict=True):
            read_as_held = node.target in _TURNS and call.inputs[0] in given  # such as a layer's transposed weight
            shares = (call.shares and not delegated) or read_as_held
            own = replace(
                call,
                shares=shares,
                overwrites=_overwritable_inputs(node),
                part=number,
                after_bytes=_packed_bytes(node),
                pools=node.target is aten.max_pool2d_with_indices.default,
            )
            sizes = tuple((size, 0) for size in (*constants, sum_bytes(node)) if size)
            pads = node.target is aten.constant_pad_nd.default
            if node.target is part or (node.target in _JOINS and parts.issuperset(call.inputs)):
                parts.update(call.outputs)
            passes_on = node.target in _PASSED_ON or not parts.isdisjoint(call.outputs)
            calls.append(replace(own, object_bytes=object_bytes, constants=sizes, passes_on=passes_on, pads=pads))
    return TracedProgram(
        calls=tuple(calls),
        names=_names(graph, step),
        base_bytes=BASE_BYTES + _METHOD_BYTES + COUNTED_STEP_BYTES,  # two counts are rounded up
        lines=tuple((HOLES * factor, _SCRATCH_BYTES * factor + more_bytes) for factor, more_bytes in GROWTH_LINES),
        holes=HOLES,
        unrolls=True,
        joined=_JOINED,
        single_bytes=_SINGLE_BYTES,
        narrow_bytes=_PLAIN_BYTES,
        narrow_channels=(MOST_COLUMNS // 9 + 1, FEWEST_CHANNELS),
    )


def torch_program(step: Step) -> TracedProgram:
    """Trace the step for PyTorch, where plans only count tensors."""
    graph = trace(step, {})
    nodes = [node for node in graph.graph.nodes if node.op == "call_function"]
    return TracedProgram(
        calls=tuple(
            replace(call, object_bytes=eager.operator_bytes(node))
            for call, node in zip(calls_of(nodes), nodes, strict=True)
        ),
        names=_names(graph, step),
        base_bytes=eager.BASE_BYTES,
        lines=((1 + eager.ACTIVATION_FRACTION, 0.0),),
        held_factors={
            "parameter": 1 + eager.PARAMETER_FRACTION / 2,  # read and returned; the fraction is of one of them
            "optimiser_state": 1 + eager.OPTIMISER_FRACTION,
            "gradient": 1 + eager.OPTIMISER_FRACTION,
        },
    )


def _overwritable_inputs(node: fx.Node) -> tuple[str, ...]:
    """Return the inputs of an elementwise node that nothing else reads.

    XNNPACK copies a tensor to give it another shape, in place if it can.
    """
    in_place = torch.Tag.pointwise in getattr(node.target, "tags", ()) or node.target is aten.view.default
    return tuple(input_node.name for input_node in node.all_input_nodes if in_place and len(input_node.users) == 1)


def _packed_bytes(node: fx.Node) -> tuple[int, ...]:
    """Return the size of a product's second factor, which is copied in another layout if it was computed."""
    factor = node.args[1] if node.target in _PRODUCTS else None
    return (size_bytes_of(factor),) if isinstance(factor, fx.Node) and factor.op == "call_function" else ()


def sum_bytes(node: fx.Node) -> int:
    """Return the bytes of a short sum over last dimensions: products with padded columns of ones."""
    dims, count = argument(node, 1) if node.target in _SUMS else (), 1
    sizes = shape_of(node.all_input_nodes[0]) if dims else ()
    for index, size in reversed(list(enumerate(sizes))):
        if size > 1 and index not in dims and index - len(sizes) not in dims:
            break
        count *= size
    return 4 * USUAL_WIDTH * sum(list_row_products(count)) if 1 < count <= LONGEST_PRODUCT else 0


def _held_in_region(region: DelegateRegion) -> list[tuple[int, tuple[int, ...]]]:
    """Return the bytes of each node's calls of XNNPACK, with what these read and give outside, and of its constants."""
    graph, pending = region_graph(region), 0
    givers = {graph.value(node): at for at, node in reversed([*enumerate(region.nodes)])}
    inputs = {graph.value(node) for node in region.inputs}
    object_bytes = [_BORDER_BYTES * (node in region.outputs) for node in region.nodes]
    constants, read, stored = [list[int]() for _ in region.nodes], list[int](), {**graph.stored}
    for kind, values, output in graph.calls():
        pending += _PRODUCT_BYTES if kind in _PRODUCT_KINDS else _NODE_BYTES
        if kind.startswith(_JOIN):
            pending += _PART_BYTES * len(values) - _NODE_BYTES
        pending += _BORDER_BYTES * len(inputs & {*values})
        inputs -= {*values}
        read += [PROGRAM_COPIES * len(stored.pop(graph.stored_name(value), b"")) for value in values]
        if output in givers:
            object_bytes[givers[output]] += pending
            constants[givers[output]] += read
            pending, read = 0, []
    object_bytes[-1] += pending  # copies of constants and inputs that are given
    constants[-1] += read
    return [*zip(object_bytes, map(tuple, constants), strict=True)]


def _names(graph: fx.GraphModule, step: Step) -> Mapping[str, str]:
    nodes = (*inputs_of(graph), *results_of(graph))
    return {value.name: node.name for value, node in zip((*step.inputs, *step.outputs), nodes, strict=True)}


_SESSION_NODE_BYTES, _SESSION_VALUE_BYTES = 2_430, 1_670
"""Bytes of a session's objects for a node that runs, and for a value of the program, which leaves something even if its
node is fused. Over 72 submodels of 12 networks, with constants, they give 0.96 to 1.04 of what was counted."""
STRIPE_COLUMNS = 16
"""Columns that ONNX Runtime's products read at once, on any processor (`MlasGemmPackBSize`)."""
_PRODUCT_NODES = frozenset({"FusedMatMul", "Gemm", "MatMul"})


def onnx_program(step: Step) -> TracedProgram:
    """Load the step's program, and read how the runtime would run it."""
    body = training_model(trace(step, OnnxTarget.lowerings), step)
    graph = read_onnx(body)
    nodes, written = graph.graph.node, onnx.load_model_from_string(body).graph.node
    value_counts = _count_values(written, nodes)
    constant_bytes = {entry.name: graph.types[entry.name].size_bytes for entry in graph.graph.initializer}
    columns = _striped_constants(nodes, {name: graph.types[name] for name in constant_bytes})
    for name, count in columns.items():
        constant_bytes[name] += constant_bytes[name] // count * (-count % STRIPE_COLUMNS)
    pooled = _pooled_values(nodes)
    # Blocks that may be left out come first on the way back.
    backwards = reversed([*zip(nodes, executed_calls(graph), strict=True)])
    calls = (
        replace(
            call,
            pools=not pooled.isdisjoint(call.outputs),
            passes_on=node.op_type in ("Reshape", "Resize"),
            object_bytes=_SESSION_NODE_BYTES + _SESSION_VALUE_BYTES * sum(value_counts[name] for name in call.outputs),
            constants=tuple(
                (constant_bytes.pop(name), columns.get(name, 0))
                for name in dict.fromkeys(call.inputs)
                if name in constant_bytes
            ),
        )
        for node, call in backwards
    )
    return TracedProgram(
        calls=tuple(calls)[::-1],
        names={value.name: value.name for value in (*step.inputs, *step.outputs)},
        base_bytes=FIRST_SESSION_BYTES + TRAINING_BYTES + COUNTED_STEP_BYTES // 2,  # a count is rounded up
        value_bytes=VALUE_BYTES,
        measure_arena=lambda requests: simulate_arena(requests).resident_bytes,
    )


def _pooled_values(nodes: Sequence[onnx.NodeProto]) -> set[str]:
    """Return the values that pools compute on planes, in the forward and the backward pass."""
    pooled = set[str]()
    for node in nodes:
        if node.op_type == "Resize" or (node.op_type != "Reshape" and not pooled.isdisjoint(node.input)):
            pooled.update(node.output)
    return pooled.union(*(node.output for node in nodes if node.op_type == "MaxPool"))


def _striped_constants(nodes: Sequence[onnx.NodeProto], constants: Mapping[str, TensorType]) -> dict[str, int]:
    """Return the columns of constant matrices that are the second factor of products.

    The runtime keeps these in padded stripes of columns, not as they are, once for all products that read them.
    """
    found = dict[str, int]()
    for node in nodes:
        shape = constants[node.input[1]].shape if node.op_type in _PRODUCT_NODES and node.input[1] in constants else ()
        if len(shape) == 2:
            turned = any(entry.name == "transB" and entry.i for entry in node.attribute)
            found[node.input[1]] = shape[0 if turned else 1]
    return found


def _count_values(written: Sequence[onnx.NodeProto], nodes: Sequence[onnx.NodeProto]) -> Counter[str]:
    """Count the program's values by the node that alone reads them, which is named by its result.

    Values of nodes that were fused into it, or folded to a constant that it reads, count for it too.
    """
    owners = {name: name for node in nodes for name in node.output}
    for node in reversed(written):
        (owner, *_) = [owners[name] for name in node.output if name in owners] or [""]
        for name in (*node.output, *node.input):
            owners.setdefault(name, owner)
    names = {name for node in written for name in (*node.input, *node.output)}
    return Counter(owners[name] for name in names)

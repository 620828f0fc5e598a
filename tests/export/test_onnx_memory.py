"""The exporter's model of ONNX Runtime's memory, compared with the runtime's own log."""

import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper

from subfleet.export.memory.blocks import peak_bytes
from subfleet.export.memory.heap import heap_bytes, measure_passing_bytes
from subfleet.export.memory.onnx_arena import PAGE_BYTES, Arena, simulate_arena
from subfleet.export.memory.onnx_plan import Scratch, arena_requests, list_heap_bytes, plan_onnx, scratch_of
from subfleet.export.memory.onnx_run import run_onnx, session_options
from subfleet.export.steps import Step
from subfleet.protocol.programs import ValueInfo
from subfleet.trainers.onnx_sessions import open_session

pytestmark = [pytest.mark.slow, pytest.mark.export]
MEBIBYTE = 2**20
FIRST_TABLE = MEBIBYTE // 256 * 8
SIZE = (16, 8, 10, 10)  # 51,200 bytes
BLOCK = 51_200


def program(nodes: list[Any], inputs: Mapping[str, tuple[int, ...]], results: list[str], **constants: Any) -> bytes:
    """A model of float32 values; a node is an operator, its inputs, its outputs and its attributes."""
    graph = helper.make_graph(
        [
            helper.make_node(op, arguments, outputs, **(rest[0] if rest else {}))
            for op, arguments, outputs, *rest in nodes
        ],
        "memory",
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in inputs.items()],
        [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in results],
        [onnx.numpy_helper.from_array(np.array(array), name) for name, array in constants.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    return bytes(model.SerializeToString())


def values(inputs: Mapping[str, tuple[int, ...]]) -> list[ValueInfo]:
    return [ValueInfo(name=name, dtype="F32", shape=shape, role="input") for name, shape in inputs.items()]


def test_a_page_counts_once_it_is_written() -> None:
    arena = Arena()
    first = arena.allocate(100)
    assert arena.resident_bytes == PAGE_BYTES + FIRST_TABLE
    arena.free(first)
    assert arena.allocate(PAGE_BYTES) == first  # the same block: one page more, since a region begins inside a page
    assert arena.resident_bytes == 2 * PAGE_BYTES + FIRST_TABLE


def test_the_smallest_hole_is_taken_and_neighbours_join() -> None:
    arena = Arena()
    holes = [arena.allocate(1000) for _ in range(3)]
    arena.free(holes[1])
    assert arena.allocate(300) == holes[1]  # halved: the other half is free
    small = arena.allocate(500)
    assert small == holes[1] + 512
    arena.free(holes[1])
    arena.free(small)
    arena.free(holes[0])
    assert arena.allocate(2048) == holes[0]


def test_a_hole_is_only_cut_where_it_is_twice_as_large() -> None:
    arena = Arena()
    holes = [arena.allocate(1024) for _ in range(2)]
    arena.free(holes[0])
    assert arena.allocate(600) == holes[0]
    assert arena.allocate(256) == holes[1] + 1024  # not the rest of the hole


def test_regions_double() -> None:
    arena = Arena()
    arena.allocate(10)
    arena.allocate(MEBIBYTE)
    arena.allocate(3 * MEBIBYTE)
    arena.allocate(3 * MEBIBYTE)
    assert arena.region_bytes == tuple(size * MEBIBYTE for size in (1, 2, 4, 8))


def test_memory_requests_of_a_run() -> None:
    """Reshaping is free, ReLU overwrites its input, a sum does not, and results belong to the caller."""
    nodes = [
        ("Mul", ["x", "two"], ["a"]),
        ("Reshape", ["a", "flat"], ["b"]),
        ("Relu", ["b"], ["c"]),
        ("Add", ["c", "two"], ["d"]),
        ("Tanh", ["d"], ["y"]),
    ]
    body = program(nodes, {"x": SIZE}, ["y"], two=np.float32(2), flat=np.array([16, 800]))
    graph = run_onnx(body, values({"x": SIZE}))
    assert list(arena_requests(graph)) == [("a", BLOCK), ("d", BLOCK), ("a", None), ("d", None)]
    assert peak_bytes(arena_requests(graph)) == 2 * BLOCK
    assert [value.name for value in graph.graph.output] == ["y"]


def test_a_value_lives_until_its_last_reader() -> None:
    nodes = [
        ("Exp", ["x"], ["a"]),
        ("Neg", ["a"], ["b"]),
        ("Exp", ["b"], ["c"]),
        ("Sub", ["c", "a"], ["y"]),
    ]
    graph = run_onnx(program(nodes, {"x": SIZE}, ["y"]), values({"x": SIZE}))
    assert peak_bytes(arena_requests(graph)) == 3 * BLOCK


def patches(*, filters: int, limit: int, above_bytes: int) -> Scratch:
    return ((), (above_bytes if filters > limit else 65_536,))


@pytest.mark.parametrize(
    ("node", "shapes", "scratch"),
    [
        (
            ("Conv", {"pads": [1] * 4}),
            [(2, 3, 8, 8), (4, 3, 3, 3)],
            patches(filters=4, limit=64, above_bytes=4 * 64 * 27),
        ),
        (
            ("Conv", {"pads": [1] * 4}),
            [(2, 8, 2, 2), (16, 8, 3, 3)],
            patches(filters=16, limit=4, above_bytes=4 * 4 * 8 * 9),
        ),
        (("Conv", {}), [(2, 3, 8, 8), (4, 3, 1, 1)], ((), ())),
        (("ConvTranspose", {}), [(2, 3, 8, 8), (3, 5, 3, 3)], ((), (4 * 5 * 9 * 64,))),
        (("Softmax", {"axis": 1}), [(2, 3, 4)], ((), (96, 96))),
        (("Softmax", {"axis": -1}), [(2, 3, 4)], ((), ())),
        (("Sum", {}), [(2, 3), (2, 3), (2, 3)], ((24,), ())),
    ],
)
def test_scratch_memory(node: tuple[str, Any], shapes: list[tuple[int, ...]], scratch: Scratch) -> None:
    operator, attributes = node
    inputs = {f"x{index}": shape for index, shape in enumerate(shapes)}
    body = program([(operator, list(inputs), ["y"], attributes)], inputs, ["y"])
    graph = run_onnx(body, values(inputs))
    (operation,) = graph.graph.node
    assert scratch_of(operation, graph.types) == scratch


@pytest.mark.skipif(measure_passing_bytes(lambda: np.ones(10**6).sum()) == 0, reason="this kernel keeps no peak")
@pytest.mark.parametrize(
    ("given", "expanded", "count"),
    [
        ((4_000_000, 1), (4_000_000, 3), 4_000_000),
        ((3, 4_000_000), (3, 4_000_000), 0),
        ((1, 4_000_000), (3, 4_000_000), 1),
    ],
)
def test_indices_that_expand_lists_come_from_the_heap(
    given: tuple[int, ...], expanded: tuple[int, ...], count: int
) -> None:
    body = program([("Expand", ["x", "shape"], ["y"])], {"x": given}, ["y"], shape=np.array(expanded))
    graph = run_onnx(body, values({"x": given}))
    listed = [list_heap_bytes(node, graph.types) for node in graph.graph.node]
    assert listed == [8 * count] * len(listed)
    session, x = onnxruntime.InferenceSession(body, session_options()), np.zeros(given, np.float32)
    session.run(None, {"x": x})  # the arena keeps what it takes
    # Holes of this process's heap are up to 2 MB; the indices of one of these are 32 MB.
    assert measure_passing_bytes(lambda: session.run(None, {"x": x})) == pytest.approx(8 * count, abs=4 * MEBIBYTE)


def test_indices_that_a_scattering_lists_come_from_the_heap() -> None:
    inputs = {"x": (9,), "added": (5,)}
    scattering = ("ScatterElements", ["x", "places", "added"], ["y"], {"reduction": "add"})
    graph = run_onnx(program([scattering], inputs, ["y"], places=np.arange(5)), values(inputs))
    (node,) = graph.graph.node
    assert list_heap_bytes(node, graph.types) == 5 * 8


def test_a_plan_holds_the_indices_of_one_kernel() -> None:
    """Each kernel lists its own and returns them."""
    body = program(
        [("Expand", ["x", "two"], ["y"]), ("Expand", ["y", "three"], ["z"])],
        {"x": (1000, 1)}, ["z"], two=np.array([1000, 2]), three=np.array([3, 1000, 2]),
    )  # fmt: skip
    step = Step(run=lambda *_: (), reference=lambda *_: (), inputs=tuple(values({"x": (1000, 1)})), outputs=())
    graph = run_onnx(body, step.inputs)
    taken = simulate_arena(list(arena_requests(graph))).resident_bytes
    plan = plan_onnx(body, step)
    assert plan.activation_bytes + plan.workspace_bytes == taken + 8 * 1000


REPORT = """
import sys
import numpy as np
import onnxruntime
onnxruntime.set_default_logger_severity(1)
from subfleet.export.memory.onnx_run import session_options
session = onnxruntime.InferenceSession(sys.argv[1], session_options(), providers=["CPUExecutionProvider"])
binding = session.io_binding()
held = []
for values, bind in ((session.get_inputs(), binding.bind_input), (session.get_outputs(), binding.bind_output)):
    for value in values:
        held.append(np.zeros(value.shape, np.float32))
        bind(value.name, "cpu", 0, np.float32, value.shape, held[-1].ctypes.data)
sys.stderr.write("BEGIN\\n")
sys.stderr.flush()
for _ in range(3):
    session.run_with_iobinding(binding)
"""


def test_the_arena_grows_as_the_runtime_says(tmp_path: Path) -> None:
    """A chain of convolutions that keeps all its values until the end, so that regions must be added."""
    nodes: list[Any] = []
    for layer in range(12):
        nodes.append(("Conv", [f"h{layer}", "w"], [f"c{layer}"], {"pads": [1] * 4}))
        nodes.append(("Exp", [f"c{layer}"], [f"h{layer + 1}"]))
    nodes.extend(("Mul", [f"h{layer}", f"s{12 - layer}"], [f"s{13 - layer}"]) for layer in range(12, 0, -1))
    inputs = {"h0": (4, 8, 48, 48), "w": (8, 8, 3, 3), "s0": (4, 8, 48, 48)}
    body = program(nodes, inputs, ["s12"])
    model = onnx.load_from_string(body)
    shape = [helper.make_tensor_value_info("s12", TensorProto.FLOAT, (4, 8, 48, 48))]
    del model.graph.output[:]
    model.graph.output.extend(shape)
    path = tmp_path / "model.onnx"
    path.write_bytes(model.SerializeToString())
    graph = run_onnx(path.read_bytes(), values(inputs))
    log = subprocess.run([sys.executable, "-c", REPORT, str(path)], capture_output=True, text=True, check=True).stderr
    extensions = re.findall(r"Extended allocation by (\d+) bytes", log.partition("BEGIN")[2])
    assert len(extensions) >= 3
    assert simulate_arena(arena_requests(graph)).region_bytes == tuple(int(size) for size in extensions)


def test_a_region_of_the_arena_is_at_most_a_gibibyte_if_blocks_are_smaller() -> None:
    """The sizes are those that the runtime logs for such blocks."""
    arena = Arena()
    for _ in range(30):
        arena.allocate(150 * MEBIBYTE)
    assert arena.region_bytes == tuple(size * MEBIBYTE for size in (256, 256, 512, *[1024] * 5))
    arena.allocate(1500 * MEBIBYTE)
    assert arena.region_bytes[-1] == 2048 * MEBIBYTE


def test_the_plan_is_made_with_the_settings_of_the_trainer() -> None:
    planned = session_options()
    body = program([("Exp", ["x"], ["y"])], {"x": (1,)}, ["y"])
    used = open_session(onnxruntime, body, 1).get_session_options()
    for setting in (
        "enable_cpu_mem_arena",
        "enable_mem_pattern",
        "enable_mem_reuse",
        "graph_optimization_level",
        "execution_mode",
        "execution_order",
    ):
        assert getattr(planned, setting) == getattr(used, setting), setting


COUNT_TWICE = """
import sys
from subfleet.export.memory.onnx_run import run_onnx
from subfleet.protocol.programs import ValueInfo
body, x = sys.stdin.buffer.read(), ValueInfo(name="h0", dtype="F32", shape=(4,), role="input")
print(*(run_onnx(body, (x,)).session_bytes for _ in range(2)))
"""


@pytest.mark.skipif(heap_bytes() is None, reason="this C library does not count its heap")
def test_the_first_program_of_a_process_counts_no_more_than_the_next() -> None:
    """The first session allocates 15 kB for all later ones with these operators."""
    chain = [(("Exp", "Neg", "Tanh", "Sqrt")[layer % 4], [f"h{layer}"], [f"h{layer + 1}"]) for layer in range(240)]
    body = program(chain, {"h0": (4,)}, ["h240"])
    output = subprocess.run([sys.executable, "-c", COUNT_TWICE], input=body, capture_output=True, check=True).stdout
    first, second = map(int, output.split())
    assert abs(first - second) < 10_000


@pytest.mark.skipif(heap_bytes() is None, reason="this C library does not count its heap")
def test_a_constant_that_the_runtime_folds_counts_once() -> None:
    """A session that writes its graph keeps a copy of a matrix."""
    body = program([("Expand", ["row", "shape"], ["c"]), ("MatMul", ["x", "c"], ["y"])],
        {"x": (1, 2)}, ["y"], row=np.ones((2, 1), np.float32), shape=np.array([2, 1_000_000]),
    )  # fmt: skip
    assert 8_000_000 <= run_onnx(body, values({"x": (1, 2)})).session_bytes < 9_000_000


def test_the_heap_is_counted() -> None:
    before = heap_bytes()
    if before is None:
        pytest.skip("this C library does not count its heap")
    array = np.zeros(10**7, np.uint8)
    after = heap_bytes()
    assert after is not None
    assert array.nbytes <= after - before < array.nbytes + 10**6

"""The native binding: arrays in and out, memory, threads, and invalid programs."""

import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

native = pytest.importorskip(
    "subfleet_executorch", reason="subfleet-executorch is not built; run: make native (needs a C++ compiler)"
)
pytest.importorskip("executorch")
from trainers import pte_cases  # noqa: E402

pytestmark = [pytest.mark.export, pytest.mark.slow]
Array = npt.NDArray[np.generic]


@pytest.fixture(scope="module")
def types() -> bytes:
    return pte_cases.types(planned=False)


@pytest.fixture(scope="module")
def big() -> bytes:
    return pte_cases.big()


def arguments() -> list[Array]:
    return [np.arange(6, dtype=np.float32).reshape(2, 3), np.arange(3), np.array([True, False, True])]


def results() -> list[Array]:
    return [np.full((2, 3), 9, np.float32), np.full(3, 9), np.zeros(3, bool), np.full((2, 3), 9, np.float32)]


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("planned", [False, True])
def test_every_type_goes_in_and_out(planned: bool) -> None:
    method = native.Program(pte_cases.types(planned=planned)).load_method()
    assert [(info.dtype, info.shape, info.planned) for info in method.inputs] == [
        ("float32", (2, 3), planned),
        ("int64", (3,), planned),
        ("bool", (3,), planned),
    ]
    assert [info.size_bytes for info in method.outputs] == [24, 24, 3, 24]
    inputs, outputs = arguments(), results()
    method.execute(inputs, outputs)
    np.testing.assert_array_equal(outputs[0], inputs[0] * 2)
    np.testing.assert_array_equal(outputs[1], [1, 2, 3])
    np.testing.assert_array_equal(outputs[2], [False, True, False])
    np.testing.assert_array_equal(outputs[3], inputs[0])
    np.testing.assert_array_equal(inputs[0], arguments()[0])


def test_outputs_can_be_inputs_of_the_next_run(types: bytes) -> None:
    method = native.Program(types).load_method()
    inputs, outputs = arguments(), results()
    for _ in range(5):
        method.execute(inputs, outputs)
        inputs, outputs = [outputs[0], outputs[1], inputs[2]], [inputs[0], inputs[1], outputs[2], outputs[3]]
    np.testing.assert_array_equal(inputs[0], arguments()[0] * 32)
    np.testing.assert_array_equal(inputs[1], arguments()[1] + 5)


def test_the_program_and_its_bytes_live_as_long_as_their_method(types: bytes) -> None:
    # An unaligned copy that only the method holds.
    method = native.Program(memoryview(bytearray(b"." + types))[1:]).load_method()
    gc.collect()
    bytearray(len(types) * 4)
    outputs = results()
    method.execute(arguments(), outputs)
    np.testing.assert_array_equal(outputs[1], [1, 2, 3])


WRONG: dict[str, Callable[[list[Array], list[Array]], None]] = {
    "one input": lambda inputs, _: inputs.clear(),
    "input 0 is float32 of shape \\(2, 3\\).*'d'": lambda inputs, _: inputs.__setitem__(0, np.zeros((2, 3))),
    "input 1 .* shape \\(4,\\)": lambda inputs, _: inputs.__setitem__(1, np.zeros(4, np.int64)),
    "input 0 must be a contiguous": lambda inputs, _: inputs.__setitem__(0, np.zeros((2, 6), np.float32)[:, ::2]),
    "4 outputs, but was given 3": lambda _, outputs: outputs.__delitem__(3),
    "output 2 must be .* written": lambda _, outputs: outputs[2].setflags(write=False),
    "output shares memory": lambda inputs, outputs: outputs.__setitem__(0, inputs[0]),
    "output shares": lambda _, outputs: outputs.__setitem__(3, outputs[0]),
}
WRONG["3 inputs, but was given 0"] = WRONG.pop("one input")


@pytest.mark.parametrize("message", WRONG)
def test_arrays_that_do_not_fit_are_named(types: bytes, message: str) -> None:
    method = native.Program(types).load_method()
    inputs, outputs = arguments(), results()
    WRONG[message](inputs, outputs)
    with pytest.raises(native.ExecutorchError, match=message) as caught:
        method.execute(inputs, outputs)
    assert caught.value.code == "InvalidArgument"
    outputs = results()
    method.execute(arguments(), outputs)
    np.testing.assert_array_equal(outputs[1], [1, 2, 3])


def test_planned_memory_is_known_limited_and_given_back(big: bytes) -> None:
    program = native.Program(big)
    with pytest.raises(native.ExecutorchError, match="limit of 1000000 bytes") as caught:
        program.load_method(memory_limit_bytes=1_000_000)
    assert caught.value.code == "OutOfResources"
    with pytest.raises(native.ExecutorchError, match="no method 'backward'"):
        program.load_method("backward")
    before = resident_bytes()
    method = program.load_method(memory_limit_bytes=40_000_000)
    (arena_bytes,) = method.arena_bytes
    assert arena_bytes >= 8 * pte_cases.BIG
    total = np.zeros((), np.float32)
    method.execute([np.ones(1, np.float32)], [total])
    assert total == 2 * pte_cases.BIG
    assert resident_bytes() - before > 0.9 * arena_bytes
    del method
    assert resident_bytes() - before < 0.1 * arena_bytes


def test_a_method_that_is_larger_than_a_shared_arena_is_refused(big: bytes) -> None:
    with pytest.raises(native.ExecutorchError, match="shared arena of 1000 bytes") as caught:
        native.Program(big).load_method(arena=native.Arena(1000))
    assert caught.value.code == "OutOfResources"


def test_methods_of_one_arena_share_its_memory_and_compute_what_they_would_alone(big: bytes, types: bytes) -> None:
    arena = native.Arena(40_000_000)
    before = resident_bytes()
    methods = [native.Program(big).load_method(arena=arena) for _ in range(4)]
    total = np.zeros((), np.float32)
    other = native.Program(pte_cases.types(planned=True)).load_method(arena=arena)
    for method in methods * 2:
        outputs = results()
        total[...] = 0
        method.execute([np.ones(1, np.float32)], [total])
        assert total == 2 * pte_cases.BIG
        other.execute(arguments(), outputs)
        np.testing.assert_array_equal(outputs[0], arguments()[0] * 2)
    (arena_bytes,) = methods[0].arena_bytes
    assert 0.9 * arena_bytes < resident_bytes() - before < 1.5 * arena_bytes
    arena.release()
    assert resident_bytes() - before < 0.1 * arena_bytes
    methods[0].execute([np.ones(1, np.float32)], [total])
    assert total == 2 * pte_cases.BIG
    # The memory exists as long as a method uses it.
    del arena
    gc.collect()
    methods[1].execute([np.ones(1, np.float32)], [total])
    assert total == 2 * pte_cases.BIG


def test_a_thousand_runs_do_not_grow(types: bytes) -> None:
    def run_methods(count: int) -> None:
        for _ in range(count):
            method = native.Program(types).load_method()
            method.execute(arguments(), results())

    run_methods(100)
    before = resident_bytes()
    run_methods(1000)
    assert resident_bytes() - before < 500_000


def test_the_pool_of_threads_changes_while_no_method_is_loaded(types: bytes) -> None:
    before = native.thread_count()
    native.set_thread_count(2)
    method = native.Program(types).load_method()
    native.set_thread_count(2)
    with pytest.raises(native.ExecutorchError, match="1 are; drop them first") as caught:
        native.set_thread_count(3)
    assert caught.value.code == "InvalidState"
    del method
    native.set_thread_count(3)
    assert native.thread_count() == 3
    with pytest.raises(native.ExecutorchError, match="1 or more"):
        native.set_thread_count(0)
    native.set_thread_count(before)


def test_other_threads_run_meanwhile_and_share_a_method(big: bytes) -> None:
    method = native.Program(big).load_method()
    totals = [np.zeros((), np.float32) for _ in range(4)]

    def run(start: int) -> None:
        method.execute([np.full(1, start, np.float32)], [totals[start]])

    threads = [threading.Thread(target=run, args=(start,)) for start in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [float(total) for total in totals] == [(start + 1) * pte_cases.BIG for start in range(4)]


def test_a_kernel_that_refuses_its_numbers_gives_an_error() -> None:
    method = native.Program(pte_cases.division()).load_method()
    with pytest.raises(native.ExecutorchError, match="division by zero") as caught:
        method.execute([np.arange(3), np.zeros(3, np.int64)], [np.zeros(3, np.int64)])
    assert caught.value.code == "InvalidArgument"


DAMAGED = """
import random, sys
import subfleet_executorch as native
whole = sys.stdin.buffer.read()
refused = 0
for seed in range(int(sys.argv[1])):
    random.seed(seed)
    body = bytearray(whole)
    if seed % 3 == 0:
        del body[random.randrange(len(body)) :]
    else:
        for _ in range(seed % 5 + 1):
            body[random.randrange(len(body))] = random.randrange(256)
    try:
        method = native.Program(bytes(body)).load_method(memory_limit_bytes=10**8)
        method.inputs, method.outputs, method.backends
    except native.ExecutorchError as error:
        assert error.code and str(error)
        refused += 1
print(refused)
"""


@pytest.mark.parametrize("planned", [False, True])
def test_damaged_programs_are_errors_when_they_are_loaded(planned: bool) -> None:
    # In a separate process, which could crash.
    count = 1000
    body = pte_cases.types(planned=planned)
    command = [sys.executable, "-c", DAMAGED, str(count)]
    process = subprocess.run(command, input=body, capture_output=True, timeout=120, check=False)
    assert process.returncode == 0, process.stderr
    assert int(process.stdout) > count // 2


@pytest.mark.parametrize("body", [b"", b"no program" * 100, bytes(10_000), random.Random(0).randbytes(10_000)])
def test_bytes_that_are_no_program_are_refused(body: bytes) -> None:
    with pytest.raises(native.ExecutorchError) as caught:
        native.Program(body)
    assert caught.value.code == "InvalidProgram"

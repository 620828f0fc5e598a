"""Training along paths of a chain: compared with plain PyTorch, and without effect on other paths."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from trainers.array_runtime import ArrayRuntime
from trainers.chain_cases import (
    BATCH,
    CHOICES,
    CLIP,
    MOMENTUM,
    SETTINGS,
    Pieces,
    Supernet,
    chain,
    losses,
    of_subspace,
    program,
    samples,
    start,
    write_train_job,
)

from subfleet.arrays import decode_arrays
from subfleet.emulation.batch.trainers import SharedHost
from subfleet.protocol.errors import LoadError, MemoryLimitError, ProtocolError
from subfleet.protocol.jobs import Job, TrainResult
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.task import Train
from subfleet.protocol.training import OptimiserSettings
from subfleet.tasks import iter_batches, split_batch
from subfleet.trainers.kept import Slot
from subfleet.trainers.program_session import ProgramSession
from subfleet.trainers.training_job import train_job

Paths = list[tuple[str, ...]]
Floats = npt.NDArray[np.float32]
MACS = {"dense": 40, "added": 20, "identity": 0}
STORED = {"dense": 30, "added": 60, "identity": 0}
PEAKS = {"dense": 300, "added": 500, "identity": 100}
"""Costs of a chain's operators; stem and head need 10 multiplications and keep 10 bytes each, at a peak of 100."""


@pytest.fixture
def drawn_paths(monkeypatch: pytest.MonkeyPatch) -> Paths:
    """The operators of every path, in the order of the programs' calls."""
    paths: Paths = []
    original = ProgramSession.step

    def step(self: ProgramSession, path: Sequence[object], *rest: object, **named: object) -> object:
        paths.append(tuple(stage.operator.name for stage in path if stage.link in CHOICES))  # type: ignore[attr-defined]
        return original(self, path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ProgramSession, "step", step)
    return paths


def train(job: Job[Train], pieces: Pieces | None = None, slot: Slot | None = None) -> TrainResult:
    runtime = ArrayRuntime((pieces or Pieces()).load)
    return train_job(job, lambda: False, target="pieces", runtime=runtime, host=slot or Slot())


def trained_weights(job: Job[Train]) -> dict[str, Floats]:
    before, changed = (decode_arrays(path.read_bytes()) for path in (job.weights_path, job.output_path))
    return {name: np.asarray(before[name], np.float32) + np.asarray(changed[name], np.float32) for name in changed}


def train_plain(job: Job[Train], paths: Paths) -> tuple[dict[str, Floats], list[float]]:
    """Weights and losses of plain PyTorch along the same paths; unused operators of a batch have no gradient."""
    supernet, data, settings = Supernet(), samples(), job.work.settings
    supernet.load_state_dict({name: torch.from_numpy(array) for name, array in start().items()})
    sgd = torch.optim.SGD(supernet.parameters(), lr=settings.learning_rate, momentum=MOMENTUM)
    remaining, loss_sums = iter(paths), []
    for epoch in range(settings.epochs):
        rest = {"seed": settings.seed, "round_number": job.round, "client_id": job.client_id, "epoch": epoch}
        for indices, mask in iter_batches(len(data), settings.batch_size, **rest):  # type: ignore[arg-type]
            sgd.zero_grad(set_to_none=True)
            count = int((data.labels[indices[mask > 0]] >= 0).sum())
            for part, part_mask in split_batch(indices, mask, BATCH):
                real = torch.from_numpy(part_mask)
                logits = supernet.run(next(remaining), torch.from_numpy(data.inputs[part]), real)
                metrics = losses(logits, torch.from_numpy(data.labels[part]), real)
                (metrics["loss"] * metrics["count"] / count).backward()  # type: ignore[no-untyped-call] # PyTorch's own
                loss_sums.append((metrics["loss"] * metrics["count"]).item())
            if settings.optimiser.max_gradient_norm:
                torch.nn.utils.clip_grad_norm_(supernet.parameters(), settings.optimiser.max_gradient_norm)
            sgd.step()
    return {name: tensor.numpy() for name, tensor in supernet.state_dict().items()}, loss_sums


CASES: Mapping[str, dict[str, object]] = {
    "momentum": {},
    "clipped": {"optimiser": OptimiserSettings(momentum=MOMENTUM, max_gradient_norm=CLIP)},
    "in parts": {"batch_size": 2 * BATCH, "micro_batch_size": BATCH},
    "clipped in parts": {
        "batch_size": 2 * BATCH,
        "micro_batch_size": BATCH,
        "optimiser": OptimiserSettings(momentum=MOMENTUM, max_gradient_norm=CLIP),
    },
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_chain_trains_what_plain_pytorch_trains_along_its_paths(
    tmp_path: Path, drawn_paths: Paths, case: str
) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=4, **CASES[case]))  # type: ignore[arg-type]
    result = train(job)
    expected, loss_sums = train_plain(job, drawn_paths)
    actual = trained_weights(job)
    assert actual.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(actual[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
    assert len(set(drawn_paths)) > 3
    calls = len(loss_sums) // job.work.settings.epochs
    assert result.loss == pytest.approx(sum(loss_sums[-calls:]) / 10, rel=1e-5)
    assert result.step_count == 4 * -(-10 // job.work.settings.batch_size)


def test_operators_off_the_path_keep_momentum_and_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[str], dict[str, bytes]]] = []
    original = ProgramSession.step

    def step(self: ProgramSession, path: Sequence[object], *rest: object, **named: object) -> object:
        results = original(self, path, *rest, **named)  # type: ignore[arg-type]
        state = {
            f"{stage.link}.{stage.operator.name}.{name}": array.tobytes()
            for stage, held in self._held.items()
            for (role, name), array in held.items()
            if stage.link in CHOICES and role != "gradient"
        }
        seen.append(({f"{stage.link}.{stage.operator.name}." for stage in path}, state))  # type: ignore[attr-defined]
        return results

    monkeypatch.setattr(ProgramSession, "step", step)
    train(write_train_job(tmp_path, replace(SETTINGS, epochs=4)))
    momentum_changes = 0
    for (_, before), (path, after) in pairwise(seen):
        changed = {name for name in after if after[name] != before[name]}
        assert all(name.startswith(tuple(path)) for name in changed)
        # Drawn operators change, including any momentum that they already have.
        momentum_changes += sum("momentum" in name for name in changed)
    assert momentum_changes > 0


@pytest.mark.slow
@pytest.mark.parametrize("forward_macs", [None, 120])
def test_every_choice_counts_all_examples_once(tmp_path: Path, drawn_paths: Paths, forward_macs: int | None) -> None:
    choices = {"section0.block1": ("dense", "identity")}
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=3), choices=choices)
    result = train(replace(job, work=replace(job.work, paths=PathSettings(forward_macs=forward_macs))))
    counts = {choice: dict(per_operator) for choice, per_operator in result.operator_examples}
    available = {**CHOICES, **choices}
    assert {choice: tuple(per_operator) for choice, per_operator in counts.items()} == available
    assert [sum(per_operator.values()) for per_operator in counts.values()] == [3 * 10] * len(CHOICES)
    sizes = [4, 4, 2] * 3
    for index, choice in enumerate(CHOICES):
        examples = dict.fromkeys(available[choice], 0)
        for path, size in zip(drawn_paths, sizes, strict=True):
            examples[path[index]] += size
        assert counts[choice] == examples


@pytest.mark.slow
def test_a_subspace_trains_and_sends_only_its_own_tensors(tmp_path: Path) -> None:
    choices = {"section0.block0": ("identity",), "section0.block2": ("dense",)}
    job, pieces = write_train_job(tmp_path, choices=choices), Pieces()
    train(job, pieces)
    assert trained_weights(job).keys() == of_subspace(start(), choices).keys()
    job.weights_path.write_bytes((tmp_path / "weights").read_bytes())
    with pytest.raises(ProtocolError, match="must name the same tensors"):
        train(replace(job, choices=()))


@pytest.mark.slow
def test_a_path_without_room_is_never_drawn(tmp_path: Path, drawn_paths: Paths) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=8))
    plan = program().manifest.chain.plan_memory(chain().links)  # type: ignore[union-attr]
    # Stem, head and three dense operators keep 110 bytes, and the programs of "added" have the largest peak.
    for limit_bytes, allowed in (
        (plan.held_bytes + 300 + 110, {"dense", "identity"}),
        (plan.held_bytes + 300 + 80, {"dense", "identity"}),
        (plan.held_bytes + 500 + 110, {"dense", "identity", "added"}),
    ):
        drawn_paths.clear()
        pieces = Pieces()
        draw_within(job, limit_bytes, pieces)
        assert {name for path in drawn_paths for name in path} == allowed
        stored_bytes = [20 + sum(STORED[name] for name in path) for path in drawn_paths]
        peak_bytes = [max(PEAKS[name] for name in ("identity", *path)) for path in drawn_paths]
        assert all(
            plan.held_bytes + stored + peak <= limit_bytes
            for stored, peak in zip(stored_bytes, peak_bytes, strict=True)
        )
        assert ("added/forward" in pieces.loads) == ("added" in allowed)


@pytest.mark.slow
def test_without_room_for_the_leanest_path_nothing_is_loaded(tmp_path: Path) -> None:
    job, pieces = write_train_job(tmp_path), Pieces()
    least_bytes = chain().plan_memory(chain().links).least_peak_bytes
    with pytest.raises(MemoryLimitError) as caught:
        draw_within(job, least_bytes - 1, pieces)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (least_bytes, least_bytes - 1)
    assert pieces.loads == []
    draw_within(job, least_bytes, pieces)
    assert pieces.loads


@pytest.mark.slow
def test_a_path_beyond_the_multiplications_is_never_drawn(tmp_path: Path, drawn_paths: Paths) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=8))
    train(replace(job, work=replace(job.work, paths=PathSettings(forward_macs=80))))
    macs = [20 + sum(MACS[name] for name in path) for path in drawn_paths]
    assert max(macs) == 80
    with pytest.raises(ProtocolError, match="39 multiplications"):
        train(replace(job, work=replace(job.work, paths=PathSettings(forward_macs=39))))


@pytest.mark.slow
def test_an_operator_that_the_runtime_refuses_is_left_out(
    tmp_path: Path, drawn_paths: Paths, caplog: pytest.LogCaptureFixture
) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=4))
    result = train(job, Pieces(refused=frozenset({"added"})))
    assert {name for path in drawn_paths for name in path} == {"dense", "identity"}
    assert {dict(counts)["added"] for _, counts in result.operator_examples} == {0}
    assert "operator added of section0.block0 is never drawn: NOT_IMPLEMENTED" in caplog.text
    change = decode_arrays(job.output_path.read_bytes())
    assert not any(change[name].any() for name in change if ".added." in name)
    with pytest.raises(LoadError, match=r"no operator of link 'section0\.block2' can be loaded"):
        train(job, Pieces(refused=frozenset({"added", "dense"})))


def test_nothing_is_trained_if_the_accepted_operators_do_not_fit(tmp_path: Path) -> None:
    """The leanest path with "dense" fits; with "added" instead it keeps 30 bytes more."""
    job = write_train_job(tmp_path)
    plan = program().manifest.chain.plan_memory(chain().links)  # type: ignore[union-attr]
    limit_bytes = plan.held_bytes + PEAKS["added"] + 20 + STORED["dense"]
    with pytest.raises(MemoryLimitError) as caught:
        draw_within(job, limit_bytes, Pieces(refused=frozenset({"dense"})))
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (limit_bytes + 30, limit_bytes)
    draw_within(job, limit_bytes, Pieces())


@pytest.mark.slow
def test_the_same_bits_come_twice_and_after_a_kept_chain(tmp_path: Path) -> None:
    job = write_train_job(tmp_path)
    slot, pieces = Slot(), Pieces()
    train(job, pieces, slot)
    first, loads = job.output_path.read_bytes(), list(pieces.loads)
    train(job, pieces, slot)
    assert (job.output_path.read_bytes(), pieces.loads) == (first, loads)
    choices = {choice: tuple(name for name in names if name != "added") or names for choice, names in CHOICES.items()}
    other = write_train_job(tmp_path, choices=choices)
    train(other, pieces, slot)
    other_bytes = other.output_path.read_bytes()
    train(other)
    assert other.output_path.read_bytes() == other_bytes != first
    again = write_train_job(tmp_path)
    train(again, pieces, slot)
    assert again.output_path.read_bytes() == first
    # The first job loads all pieces, the third drops one of them, and the last one loads that again.
    assert pieces.loads == [*loads, *(name for name in loads if name.startswith("added/"))]


def test_a_learning_rate_of_zero_changes_no_weight(tmp_path: Path) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, learning_rate=0.0))
    train(job)
    change = decode_arrays(job.output_path.read_bytes())
    assert not any(array.any() for name, array in change.items() if not name.endswith(".mean"))
    assert change["stem.mean"].any()


def draw_within(job: Job[Train], limit_bytes: int, pieces: Pieces) -> None:
    """Train without measuring memory, so that only the plan enforces the limit."""
    job = replace(job, memory_limit_bytes=limit_bytes)
    train_job(job, lambda: False, target="pieces", runtime=ArrayRuntime(pieces.load), host=SharedHost())

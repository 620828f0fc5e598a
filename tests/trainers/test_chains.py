"""Trainings along paths of a chain against plain PyTorch, and what they leave alone."""

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

Drawn = list[tuple[str, ...]]
Floats = npt.NDArray[np.float32]
MACS = {"dense": 40, "added": 20, "identity": 0}
KEPT = {"dense": 30, "added": 60, "identity": 0}
PEAKS = {"dense": 300, "added": 500, "identity": 100}
"""Of a chain's operators; stem and head take 10 multiplications and keep 10 bytes each, at a peak of 100."""


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> Drawn:
    """The operators of every path, in the order of the programs' calls."""
    found: Drawn = []
    original = ProgramSession.step

    def step(self: ProgramSession, path: Sequence[object], *rest: object, **named: object) -> object:
        found.append(tuple(place.operator.name for place in path if place.link in CHOICES))  # type: ignore[attr-defined]
        return original(self, path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(ProgramSession, "step", step)
    return found


def train(job: Job[Train], pieces: Pieces | None = None, slot: Slot | None = None) -> TrainResult:
    runtime = ArrayRuntime((pieces or Pieces()).load)
    return train_job(job, lambda: False, target="pieces", runtime=runtime, host=slot or Slot())


def trained(job: Job[Train]) -> dict[str, Floats]:
    before, changed = (decode_arrays(path.read_bytes()) for path in (job.weights_path, job.output_path))
    return {name: np.asarray(before[name], np.float32) + np.asarray(changed[name], np.float32) for name in changed}


def plain(job: Job[Train], paths: Drawn) -> tuple[dict[str, Floats], list[float]]:
    """Weights and losses of plain PyTorch along the same paths; what a batch does not go through has no gradient."""
    supernet, data, settings = Supernet(), samples(), job.work.settings
    supernet.load_state_dict({name: torch.from_numpy(array) for name, array in start().items()})
    sgd = torch.optim.SGD(supernet.parameters(), lr=settings.learning_rate, momentum=MOMENTUM)
    left, told = iter(paths), []
    for epoch in range(settings.epochs):
        rest = {"seed": settings.seed, "round_number": job.round, "client_id": job.client_id, "epoch": epoch}
        for indices, mask in iter_batches(len(data), settings.batch_size, **rest):  # type: ignore[arg-type]
            sgd.zero_grad(set_to_none=True)
            count = int((data.labels[indices[mask > 0]] >= 0).sum())
            for part, part_mask in split_batch(indices, mask, BATCH):
                real = torch.from_numpy(part_mask)
                logits = supernet.run(next(left), torch.from_numpy(data.inputs[part]), real)
                own = losses(logits, torch.from_numpy(data.labels[part]), real)
                (own["loss"] * own["count"] / count).backward()  # type: ignore[no-untyped-call] # PyTorch's own
                told.append((own["loss"] * own["count"]).item())
            if settings.optimiser.max_gradient_norm:
                torch.nn.utils.clip_grad_norm_(supernet.parameters(), settings.optimiser.max_gradient_norm)
            sgd.step()
    return {name: one.numpy() for name, one in supernet.state_dict().items()}, told


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


@pytest.mark.parametrize("case", CASES)
def test_a_chain_trains_what_plain_pytorch_trains_along_its_paths(tmp_path: Path, drawn: Drawn, case: str) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=4, **CASES[case]))  # type: ignore[arg-type]
    result = train(job)
    expected, told = plain(job, drawn)
    found = trained(job)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=2e-5, atol=2e-6, err_msg=name)
    assert len(set(drawn)) > 3
    calls = len(told) // job.work.settings.epochs
    assert result.loss == pytest.approx(sum(told[-calls:]) / 10, rel=1e-5)
    assert result.step_count == 4 * -(-10 // job.work.settings.batch_size)


def test_what_is_not_drawn_keeps_its_momentum_and_its_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[set[str], dict[str, bytes]]] = []
    original = ProgramSession.step

    def step(self: ProgramSession, path: Sequence[object], *rest: object, **named: object) -> object:
        told = original(self, path, *rest, **named)  # type: ignore[arg-type]
        state = {
            f"{place.link}.{place.operator.name}.{name}": array.tobytes()
            for place, held in self._held.items()
            for (role, name), array in held.items()
            if place.link in CHOICES and role != "gradient"
        }
        seen.append(({f"{one.link}.{one.operator.name}." for one in path}, state))  # type: ignore[attr-defined]
        return told

    monkeypatch.setattr(ProgramSession, "step", step)
    train(write_train_job(tmp_path, replace(SETTINGS, epochs=4)))
    moved = 0
    for (_, before), (path, after) in pairwise(seen):
        changed = {name for name in after if after[name] != before[name]}
        assert all(name.startswith(tuple(path)) for name in changed)
        # What was drawn moved, and where it has momentum already that moves, too.
        moved += sum("momentum" in name for name in changed)
    assert moved > 0


@pytest.mark.parametrize("forward_macs", [None, 120])
def test_every_choice_counts_all_examples_once(tmp_path: Path, drawn: Drawn, forward_macs: int | None) -> None:
    choices = {"section0.block1": ("dense", "identity")}
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=3), choices=choices)
    result = train(replace(job, work=replace(job.work, paths=PathSettings(forward_macs=forward_macs))))
    counts = {choice: dict(own) for choice, own in result.operator_examples}
    kept = {**CHOICES, **choices}
    assert {choice: tuple(own) for choice, own in counts.items()} == kept
    assert [sum(own.values()) for own in counts.values()] == [3 * 10] * len(CHOICES)
    sizes = [4, 4, 2] * 3
    for place, choice in enumerate(CHOICES):
        went = dict.fromkeys(kept[choice], 0)
        for path, size in zip(drawn, sizes, strict=True):
            went[path[place]] += size
        assert counts[choice] == went


def test_a_subspace_trains_and_tells_of_its_own_tensors_alone(tmp_path: Path) -> None:
    choices = {"section0.block0": ("identity",), "section0.block2": ("dense",)}
    job, pieces = write_train_job(tmp_path, choices=choices), Pieces()
    train(job, pieces)
    assert trained(job).keys() == of_subspace(start(), choices).keys()
    job.weights_path.write_bytes((tmp_path / "weights").read_bytes())
    with pytest.raises(ProtocolError, match="must name the same tensors"):
        train(replace(job, choices=()))


@pytest.mark.slow
def test_a_path_without_room_is_never_drawn(tmp_path: Path, drawn: Drawn) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=8))
    room = program().manifest.chain.plan_memory(chain().links)  # type: ignore[union-attr]
    # Stem, head and three dense operators keep 110 bytes, and no program takes as much as those of "added".
    for limit_bytes, allowed in (
        (room.held_bytes + 300 + 110, {"dense", "identity"}),
        (room.held_bytes + 300 + 80, {"dense", "identity"}),
        (room.held_bytes + 500 + 110, {"dense", "identity", "added"}),
    ):
        drawn.clear()
        pieces = Pieces()
        draw_within(job, limit_bytes, pieces)
        assert {name for path in drawn for name in path} == allowed
        kept = [20 + sum(KEPT[name] for name in path) for path in drawn]
        peak = [max(PEAKS[name] for name in ("identity", *path)) for path in drawn]
        assert all(room.held_bytes + one + two <= limit_bytes for one, two in zip(kept, peak, strict=True))
        assert ("added/forward" in pieces.loads) == ("added" in allowed)


def test_without_room_for_the_leanest_path_nothing_is_loaded(tmp_path: Path) -> None:
    job, pieces = write_train_job(tmp_path), Pieces()
    least_bytes = chain().plan_memory(chain().links).least_peak_bytes
    with pytest.raises(MemoryLimitError) as caught:
        draw_within(job, least_bytes - 1, pieces)
    assert (caught.value.needed_bytes, caught.value.limit_bytes) == (least_bytes, least_bytes - 1)
    assert pieces.loads == []
    draw_within(job, least_bytes, pieces)
    assert pieces.loads


def test_a_path_beyond_the_multiplications_is_never_drawn(tmp_path: Path, drawn: Drawn) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=8))
    train(replace(job, work=replace(job.work, paths=PathSettings(forward_macs=80))))
    macs = [20 + sum(MACS[name] for name in path) for path in drawn]
    assert max(macs) == 80
    with pytest.raises(ProtocolError, match="39 multiplications"):
        train(replace(job, work=replace(job.work, paths=PathSettings(forward_macs=39))))


def test_an_operator_that_the_runtime_refuses_is_left_out(
    tmp_path: Path, drawn: Drawn, caplog: pytest.LogCaptureFixture
) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, epochs=4))
    result = train(job, Pieces(refused=frozenset({"added"})))
    assert {name for path in drawn for name in path} == {"dense", "identity"}
    assert {dict(own)["added"] for _, own in result.operator_examples} == {0}
    assert "operator added of section0.block0 is never drawn: NOT_IMPLEMENTED" in caplog.text
    found = decode_arrays(job.output_path.read_bytes())
    assert not any(found[name].any() for name in found if ".added." in name)
    with pytest.raises(LoadError, match=r"no operator of link 'section0\.block2' can be loaded"):
        train(job, Pieces(refused=frozenset({"added", "dense"})))


def test_without_room_for_what_the_runtime_does_not_refuse_nothing_is_trained(tmp_path: Path) -> None:
    """The leanest path has room with "dense"; in its place "added" keeps 30 bytes more."""
    job = write_train_job(tmp_path)
    room = program().manifest.chain.plan_memory(chain().links)  # type: ignore[union-attr]
    limit_bytes = room.held_bytes + PEAKS["added"] + 20 + KEPT["dense"]
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
    choices = {choice: tuple(one for one in own if one != "added") or own for choice, own in CHOICES.items()}
    other = write_train_job(tmp_path, choices=choices)
    train(other, pieces, slot)
    kept = other.output_path.read_bytes()
    train(other)
    assert other.output_path.read_bytes() == kept != first
    again = write_train_job(tmp_path)
    train(again, pieces, slot)
    assert again.output_path.read_bytes() == first
    # The first job loads all pieces, the third drops one of them, and the last one loads that again.
    assert pieces.loads == [*loads, *(name for name in loads if name.startswith("added/"))]


def test_a_learning_rate_of_zero_changes_no_weight(tmp_path: Path) -> None:
    job = write_train_job(tmp_path, replace(SETTINGS, learning_rate=0.0))
    train(job)
    found = decode_arrays(job.output_path.read_bytes())
    assert not any(array.any() for name, array in found.items() if not name.endswith(".mean"))
    assert found["stem.mean"].any()


def draw_within(job: Job[Train], limit_bytes: int, pieces: Pieces) -> None:
    """Train where memory is not measured, so that the plan alone keeps the limit."""
    job = replace(job, memory_limit_bytes=limit_bytes)
    train_job(job, lambda: False, target="pieces", runtime=ArrayRuntime(pieces.load), host=SharedHost())

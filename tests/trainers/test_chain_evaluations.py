"""Populations of paths evaluated along a chain, compared with plain PyTorch."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from trainers.array_runtime import ArrayRuntime
from trainers.chain_cases import BATCH, Pieces, Supernet, chain, losses, samples, start, write_evaluate_job

from subfleet.protocol.errors import LoadError, MemoryLimitError, ProtocolError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import Job
from subfleet.protocol.task import Evaluate
from subfleet.trainers.evaluation_job import evaluate_job
from subfleet.trainers.kept import Slot

POPULATION = (("dense", "added", "dense"), ("identity", "identity", "added"), ("dense", "added", "dense"))


def evaluate(job: Job[Evaluate], pieces: Pieces | None = None) -> EvaluationResult:
    runtime = ArrayRuntime((pieces or Pieces()).load)
    return evaluate_job(job, lambda: False, target="pieces", runtime=runtime, host=Slot())


def test_each_path_of_a_population_is_evaluated_as_plain_pytorch_does(tmp_path: Path) -> None:
    job = write_evaluate_job(tmp_path, POPULATION)
    result = evaluate(job)
    supernet, data = Supernet(), samples(seed=2)
    supernet.load_state_dict({name: torch.from_numpy(array) for name, array in start().items()})
    for score, path in zip(result.scores, POPULATION, strict=True):
        with torch.no_grad():
            every = torch.ones(len(data))
            logits = supernet.run(path, torch.from_numpy(data.inputs), every)
            metrics = losses(logits, torch.from_numpy(data.labels), every)
        assert score.loss == pytest.approx(float(metrics["loss"]), rel=1e-5)
        assert score.accuracy == float(metrics["correct"]) / len(data)
    assert result.scores[0] == result.scores[2] != result.scores[1]
    assert result.loss == pytest.approx(sum(entry.loss for entry in result.scores) / 3)
    assert result.accuracy == pytest.approx(sum(entry.accuracy for entry in result.scores) / 3)
    assert (result.sample_count, result.label_count, result.class_counts) == (10, 10, ())


def test_only_pieces_on_the_paths_of_the_population_are_loaded(tmp_path: Path) -> None:
    pieces = Pieces()
    evaluate(write_evaluate_job(tmp_path, [("identity", "dense", "dense")]), pieces)
    assert sorted(pieces.loads) == ["dense/forward", "head/evaluate", "stem/forward"]
    assert len(pieces.runs) == 4 * -(-10 // BATCH)


def test_a_population_that_cannot_be_run_is_refused(tmp_path: Path) -> None:
    job = write_evaluate_job(tmp_path, POPULATION)
    with pytest.raises(LoadError, match="a path of the population cannot be run: NOT_IMPLEMENTED"):
        evaluate(job, Pieces(refused=frozenset({"added"})))
    for path, message in ((("dense", "dense"), "2 operators"), (("dense", "dense", "identity"), "'identity' of")):
        with pytest.raises(ProtocolError, match=message):
            evaluate(replace(job, work=replace(job.work, settings=replace(job.work.settings, population=(path,)))))
    held_bytes = chain().plan_memory(chain().links).held_bytes
    with pytest.raises(MemoryLimitError):
        evaluate(replace(job, memory_limit_bytes=held_bytes + 500))

"""The outcome of the worker for programs that a runtime does not load."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

import pytest
from agent.agent_cases import score_task

from subfleet.agent.outcomes import ScoringEnded, WorkFailed
from subfleet.edge_client.thread_worker import TrainingWorker
from subfleet.protocol.errors import LoadError, TrainingError
from subfleet.protocol.evaluating import EvaluationResult
from subfleet.protocol.jobs import DataSummary, Job, Prediction, TrainResult
from subfleet.protocol.task import Calibrate, Evaluate, Score, Train
from subfleet.transport.blob_store import BlobStore

LACKING = LoadError("the runtime lacks Gelu")


class Scorer:
    """A trainer that returns or raises its results, one per candidate."""

    target: ClassVar[str] = "fake"
    suffix: ClassVar[str] = ".fake"
    providers: ClassVar[tuple[str, ...]] = ("cpu",)
    held_bytes = 0

    def __init__(self, *results: float | Exception) -> None:
        self._results: Iterator[float | Exception] = iter(results)

    def describe_runtime(self) -> str:
        return "a test's"

    def describe(self, data: str) -> DataSummary:
        raise NotImplementedError

    def train(self, job: Job[Train], stopped: Callable[[], bool]) -> TrainResult:
        raise NotImplementedError

    def calibrate(self, job: Job[Calibrate], stopped: Callable[[], bool]) -> TrainResult:
        raise NotImplementedError

    def score(self, job: Job[Score], stopped: Callable[[], bool]) -> float:
        result = next(self._results)
        if isinstance(result, Exception):
            raise result
        return result

    def evaluate(self, job: Job[Evaluate], stopped: Callable[[], bool]) -> EvaluationResult:
        raise NotImplementedError

    def predict(self, model_path: Path, data: str, threads: int = 1) -> Prediction:
        raise NotImplementedError


def run_scoring(folder: Path, *results: float | Exception) -> object:
    blobs = BlobStore(folder)
    for content in (b"program", b"weights s1 a", b"weights s1 b"):
        blobs.add(content)
    worker = TrainingWorker({"fake": Scorer(*results)}, blobs=blobs, work_folder=folder, data="d")
    worker.start(score_task(), 1000)
    worker.join(10.0)
    return worker.outcome()


@pytest.mark.parametrize(
    ("results", "reason"),
    [((LACKING, LACKING), "runtime"), ((LACKING, TrainingError("it broke")), "failed")],
)
def test_the_reason_is_the_runtime_only_if_it_loads_no_candidate(
    tmp_path: Path, results: tuple[Exception, ...], reason: str
) -> None:
    failed = run_scoring(tmp_path, *results)
    assert isinstance(failed, WorkFailed)
    assert failed.reason == reason
    assert failed.detail == "no candidate could be scored, the first because the runtime lacks Gelu"


def test_a_candidate_that_cannot_be_loaded_does_not_affect_the_others(tmp_path: Path) -> None:
    scored = run_scoring(tmp_path, LACKING, 2.0)
    assert isinstance(scored, ScoringEnded)
    assert [(candidate.score, candidate.reason) for candidate in scored.scores] == [
        (None, "the runtime lacks Gelu"),
        (2.0, ""),
    ]

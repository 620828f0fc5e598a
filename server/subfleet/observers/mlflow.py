"""MLflow: an experiment for each name of runs, a run for each run; its parameters and each round's metrics."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from subfleet.journal.evaluations import EvaluationRecord
from subfleet.journal.records import RoundRecord, RunObserver
from subfleet.observers.figures import evaluation_figures, figures_of, parameters_of
from subfleet.protocol.errors import MissingExtraError
from subfleet.protocol.silence import imported
from subfleet.settings.run import Run

__all__ = ["DATABASE", "mlflow"]

DATABASE = "mlflow.db"
_SEED = re.compile(r"-s\d+$")


class _Metrics:
    def __init__(self, client: Any, run_id: str) -> None:
        self._client, self._run_id = client, run_id

    def say(self, text: str) -> None:
        """Sentences are for people."""

    def round_finished(self, record: RoundRecord) -> None:
        for name, figure in figures_of(record).items():
            self._client.log_metric(self._run_id, name, figure, step=record.round)

    def evaluated(self, record: EvaluationRecord) -> None:
        for name, figure in evaluation_figures(record).items():
            self._client.log_metric(self._run_id, name, figure, step=record.round)


@contextmanager
def mlflow(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Write where MLFLOW_TRACKING_URI says, by default to a database in the folder that holds the run's folder.

    Raises:
        MissingExtraError: MLflow is not installed.
    """
    try:
        package = imported("mlflow")
    except ImportError as error:
        raise MissingExtraError("mlflow", "mlflow") from error
    place = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder.parent / DATABASE).resolve()}"
    client: Any = package.MlflowClient(tracking_uri=place)
    name = _SEED.sub("", run.name)
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known is not None else client.create_experiment(name)
    run_id = client.create_run(experiment, run_name=run.name).info.run_id
    for key, value in parameters_of(run).items():
        client.log_param(run_id, re.sub(r"[^\w./ -]", "_", key), value)
    status = "FAILED"
    try:
        yield _Metrics(client, run_id)
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status=status)

"""MLflow: an experiment for runs of one name, a run for each run; its parameters, and metrics of each round."""

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from subfleet.journal.records import RunObserver
from subfleet.observers.figures import FigureObserver, flatten_parameters, import_tracker
from subfleet.settings.run import Run

DATABASE = "mlflow.db"
_SEED = re.compile(r"-s\d+$")


@contextmanager
def mlflow(run: Run, folder: Path) -> Iterator[RunObserver]:
    """Log to MLFLOW_TRACKING_URI; without it, to a database in the folder that contains the run's folder.

    Raises:
        MissingExtraError: MLflow is not installed.
    """
    package = import_tracker("mlflow")
    uri = os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{(folder.parent / DATABASE).resolve()}"
    client = package.MlflowClient(tracking_uri=uri)
    name = _SEED.sub("", run.name)
    known = client.get_experiment_by_name(name)
    experiment = known.experiment_id if known is not None else client.create_experiment(name)
    run_id = client.create_run(experiment, run_name=run.name).info.run_id
    for key, value in flatten_parameters(run).items():
        client.log_param(run_id, re.sub(r"[^\w./ -]", "_", key), value)

    def log(figures: Mapping[str, float], round_number: int) -> None:
        for metric, figure in figures.items():
            client.log_metric(run_id, metric, figure, step=round_number)

    status = "FAILED"
    try:
        yield FigureObserver(log)
        status = "FINISHED"
    finally:
        client.set_terminated(run_id, status=status)

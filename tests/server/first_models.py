"""The model of a run that has not begun."""

from pathlib import Path

from subfleet.elastic.model_state import ModelState
from subfleet.journal.database import open_database
from subfleet.journal.journal import Journal, begin_run
from subfleet.rounds.state import RunState
from subfleet.serving.loading import load_model
from subfleet.serving.run_context import create_context
from subfleet.settings.run import Run
from subfleet.tasks import Dataset, read_dataset


def load_first_model(run: Run, folder: Path, samples: Dataset | None = None) -> ModelState:
    """Load the model of a run that has not begun, with the server's samples."""
    engine = open_database(folder)
    run_id = begin_run(engine, name=run.name, settings=run.fingerprint(), round_count=run.rounds)
    own = read_dataset("digits:test") if samples is None else samples
    return load_model(create_context(run, run_id), RunState(), Journal(engine, run_id), folder, own)

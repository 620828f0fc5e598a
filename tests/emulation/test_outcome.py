"""The results of a run are written even if devices' models are missing."""

import json
from pathlib import Path

import pytest

from subfleet.emulation.processes import find_fetched_model
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import DeployedModel, RoundRecord, RunResult
from subfleet.protocol.errors import RunError
from subfleet.serving.outcome import write_outcome


class SilentObserver:
    def say(self, text: str) -> None:
        pass

    def round_finished(self, record: RoundRecord) -> None:
        pass


@pytest.mark.slow
def test_a_device_without_its_model_does_not_lose_the_run(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint"
    checkpoint.write_bytes(b"weights")
    missing = DeployedModel(
        client_id="phone",
        target="onnx",
        path=tmp_path / "phone.onnx",
        architecture="w1",
        max_abs_diff=None,
        status="missing: gone",
    )
    finished = RoundRecord(round=1, accuracy=0.5, loss=1.0, seconds=1.0, log_time_s=None, clients=())
    result = RunResult(
        run_id="r",
        method="heterofl",
        method_status="exact",
        finished=True,
        accuracy=0.5,
        rounds=(finished,),
        deployed=(missing,),
        model_path=checkpoint,
    )
    (tmp_path / "run").mkdir()
    with pytest.raises(RunError, match=r"phone has not fetched its onnx model: missing: gone"):
        write_outcome(
            tmp_path / "run",
            result,
            GuardedObserver(SilentObserver()),
            figures=dict,
            file_of=lambda model: find_fetched_model(tmp_path / "run", "r", model),
        )
    assert json.loads((tmp_path / "run" / "summary.json").read_text(encoding="utf-8"))["accuracy"] == 0.5
    assert (tmp_path / "run" / "model.safetensors").read_bytes() == b"weights"

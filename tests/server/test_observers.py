"""An observer that fails does not end the run."""

import io
from pathlib import Path

import pytest
from rich.console import Console
from server.fake_device import Behaviour
from server.server_rig import Notes, World, config, fleet

from subfleet.cli.console import Tables
from subfleet.journal.guarding import GuardedObserver
from subfleet.journal.records import RoundRecord


@pytest.mark.slow
@pytest.mark.parametrize("error", [ZeroDivisionError("division"), SystemExit(1), BrokenPipeError()])
def test_an_observer_that_raises_ends_no_run(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Notes, "say", fail)
    monkeypatch.setattr(Notes, "round_finished", fail)
    world = World(tmp_path, config(rounds=2, deploy_targets=()), fleet())
    world.run()
    assert [record.round for record in world.server.result().rounds] == [1, 2]
    messages = [record.getMessage() for record in caplog.records if "cannot show the progress" in record.getMessage()]
    assert f"Notes cannot show the progress ({type(error).__name__}: {error}); the run continues" in messages


def test_an_interrupt_goes_through() -> None:
    class Interrupted(Notes):
        def round_finished(self, record: RoundRecord) -> None:
            raise KeyboardInterrupt

    record = RoundRecord(round=1, accuracy=0.0, loss=0.0, seconds=0.0, log_time_s=None, clients=())
    with pytest.raises(KeyboardInterrupt):
        GuardedObserver(Interrupted()).round_finished(record)


@pytest.mark.slow
def test_device_names_are_shown_to_the_operator_literally(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    name = "cam[/][link=http://evil.example]log in[/link]"
    screen = Console(file=io.StringIO(), width=300, force_terminal=True, color_system=None)
    table = Tables(screen)
    monkeypatch.setattr(Notes, "round_finished", lambda _, record: table.round_finished(record))
    monkeypatch.setattr(Notes, "say", lambda _, text: table.say(text))
    world = World(
        tmp_path, config(rounds=1, min_clients=4, deploy_targets=()), {**fleet(), "eve": Behaviour(device=name)}
    )
    world.run()
    assert isinstance(screen.file, io.StringIO)
    shown = screen.file.getvalue()
    assert f"client eve joined: {name}, onnx, 10 samples" in shown
    assert any(line.startswith("eve ") and name[:20] in line for line in shown.splitlines())
    assert "\x1b]8" not in shown

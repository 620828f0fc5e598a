"""A run is resumed with the settings that it was started with, or with more rounds."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from server.server_rig import World, config, fleet

from subfleet.journal.database import open_database
from subfleet.journal.journal import begin_run
from subfleet.protocol.errors import ConfigError
from subfleet.settings.fingerprint import check_resumable
from subfleet.settings.reading import read_run
from subfleet.settings.run_folder import SUMMARY, check_not_over, read_description, write_description

REMEDY = "restore the settings"
CHANGED = "rounds from 2 to 9, seed from 1 to 2"


def parts(**changes: Any) -> dict[str, Any]:
    plain: dict[str, Any] = json.loads(config(**changes).fingerprint())
    return plain


def test_the_same_settings_or_more_rounds_are_resumable() -> None:
    assert not check_resumable("the run", parts(), parts(), REMEDY)
    assert check_resumable("the run", parts(rounds=2), parts(rounds=3), REMEDY)


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        (
            {"rounds": 3},
            {"rounds": 2},
            "the run was started with rounds 3, which can be raised, but not set to 2; restore the settings",
        ),
        (
            {"seed": 1},
            {"seed": 2, "rounds": 9},
            f"the settings of the run have changed since it was started: {CHANGED}; restore the settings",
        ),
    ],
)
def test_other_changes_are_named_key_by_key(before: dict[str, Any], after: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_resumable("the run", parts(**before), parts(**after), REMEDY)
    assert str(caught.value) == message


def test_rounds_cannot_be_added_after_a_special_last_round() -> None:
    before, after = ({**parts(rounds=number), "norms": "calibrated"} for number in (2, 3))
    with pytest.raises(ConfigError, match="its last round measures them; restore the settings"):
        check_resumable("the run", before, after, REMEDY)


def test_the_journal_names_every_changed_key_with_both_values(tmp_path: Path) -> None:
    engine = open_database(tmp_path)
    before = {f"key_{index:02}": index for index in range(12)}
    begin_run(engine, name="a", settings=json.dumps(before), round_count=2)
    with pytest.raises(ConfigError) as caught:
        begin_run(engine, name="a", settings=json.dumps(dict.fromkeys(before, -1)), round_count=2)
    assert all(f"{key} from {value} to -1" in str(caught.value) for key, value in before.items())
    engine.dispose()


def test_a_folder_names_changed_settings_and_keeps_the_earlier_summary(tmp_path: Path) -> None:
    run = read_run("fedfa", ("rounds=5",))
    write_description(tmp_path, run)
    with pytest.raises(ConfigError, match="started: seed from 3 to 9; restore the settings, choose another --name"):
        write_description(tmp_path, replace(run, seed=9))
    (tmp_path / SUMMARY).write_text("{}", encoding="utf-8")
    with pytest.raises(ConfigError, match="is already finished; choose another --name, raise its rounds, or remove it"):
        check_not_over(tmp_path, run)
    check_not_over(tmp_path, replace(run, rounds=10))
    write_description(tmp_path, replace(run, rounds=10))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json", "summary-5.json"]
    assert read_description(tmp_path).rounds == 10


@pytest.mark.slow
@pytest.mark.parametrize("targets", [(), ("onnx",)])
def test_a_finished_run_with_raised_rounds_has_the_bits_of_a_longer_run(
    targets: tuple[str, ...], tmp_path: Path
) -> None:
    world = World(tmp_path / "raised", config(rounds=2, deploy_targets=targets), fleet())
    world.run()
    first = world.server.result().rounds
    world.settings = replace(world.settings, rounds=4)
    world.kill_server()
    world.run()
    whole = World(tmp_path / "whole", config(rounds=4, deploy_targets=targets), fleet())
    whole.run()
    assert world.model_bytes() == whole.model_bytes()
    result, expected = (each.server.result() for each in (world, whole))
    assert result.rounds[:2] == first
    assert [record.accuracy for record in result.rounds] == [record.accuracy for record in expected.rounds]
    assert [model.client_id for model in result.deployed] == [model.client_id for model in expected.deployed]
    assert len(result.deployed) == 3 * len(targets)

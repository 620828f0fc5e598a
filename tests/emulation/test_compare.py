"""Many virtual runs, each with a result file of its own."""

import json
from functools import partial
from pathlib import Path

import pytest
from emulation.batch_cases import broken, experiment, other_seed

from subfleet.emulation.batch.compare import Build, compare
from subfleet.emulation.gathered import fingerprint
from subfleet.export.cache import CacheFolder
from subfleet.protocol.errors import ProtocolError, RunError

pytestmark = [pytest.mark.slow, pytest.mark.export]

ONE_ROUND: Build = partial(experiment, rounds=1)


def test_what_is_there_is_not_run_again(cache: CacheFolder, tmp_path: Path) -> None:
    first = compare({"one": ONE_ROUND}, tmp_path / "results", cache, processes=1)
    path = tmp_path / "results" / "one.json"
    assert json.loads(path.read_text(encoding="utf-8")) == first["one"]
    assert first["one"]["fingerprint"] == fingerprint(ONE_ROUND())
    assert [len(one["clients"]) for one in first["one"]["rounds"]] == [3]

    marked = {**first["one"], "accuracy": "from the file"}
    path.write_text(json.dumps(marked), encoding="utf-8")
    assert compare({"one": ONE_ROUND}, tmp_path / "results", cache, processes=1)["one"] == marked

    # Another experiment under the same name, or half a file, is run anew.
    renamed = compare({"one": partial(experiment, rounds=1, seed=9)}, tmp_path / "results", cache, processes=1)["one"]
    assert renamed["accuracy"] != "from the file"
    assert renamed["fingerprint"] != first["one"]["fingerprint"]
    path.write_text(json.dumps(marked)[:50], encoding="utf-8")
    assert compare({"one": ONE_ROUND}, tmp_path / "results", cache, processes=1)["one"] == first["one"]


def test_one_that_fails_costs_no_other_its_result(cache: CacheFolder, tmp_path: Path) -> None:
    said: list[str] = []
    builds: dict[str, Build] = {"bad": broken, "good": ONE_ROUND}
    with pytest.raises(RunError, match=r"1 of 2 experiments .*, first bad: data.test: .* have shape"):
        compare(builds, tmp_path, cache, processes=1, say=said.append)
    assert [path.name for path in tmp_path.iterdir()] == ["good.json"]
    assert said[1] == "2 of 2: good is done"


def test_worker_processes_give_the_same_results(cache: CacheFolder, tmp_path: Path) -> None:
    builds: dict[str, Build] = {"five": experiment, "six": other_seed}
    beside = compare(builds, tmp_path / "beside", cache, processes=2)
    here = compare({"five": experiment}, tmp_path / "here", cache, processes=1)
    assert list(beside) == ["five", "six"]
    assert beside["five"] == here["five"]
    assert beside["five"]["loss"] != beside["six"]["loss"]


def test_names_must_name_files(cache: CacheFolder, tmp_path: Path) -> None:
    with pytest.raises(ProtocolError, match=r"\.\./out"):
        compare({"../out": ONE_ROUND}, tmp_path, cache, processes=1)
    with pytest.raises(ValueError, match="processes is 0"):
        compare({"one": ONE_ROUND}, tmp_path, cache, processes=0)

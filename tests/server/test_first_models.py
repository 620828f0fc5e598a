"""A run takes its model, and optionally its first weights, from a run that has ended."""

import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from server.first_models import load_first_model
from typer.testing import CliRunner

from subfleet.cli.commands import app
from subfleet.cli.running import run_all
from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.lineage import Lineage, Replicated
from subfleet.elastic.model_state import ModelState, pack_state
from subfleet.elastic.spaces import uniform_space
from subfleet.export.cache import CacheFolder
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.schema import to_plain
from subfleet.settings.fingerprint import select_outcome_settings
from subfleet.settings.reading import read_run, read_runs
from subfleet.settings.run import Run
from subfleet.settings.run_folder import MODEL, SUMMARY, read_description, write_description
from subfleet.settings.sections import FirstWeights
from subfleet.settings.stored_networks import read_networks, resolve_model
from subfleet.testing.submodels import find_held_elements

SMALL = ("model.widths=[64]", "model.depths=[1]")


def summarise(folder: Path, accuracy: float) -> None:
    """Write the part of a summary that is read here."""
    summary = {"accuracy": accuracy, "headline": "accuracy", "metrics": {"accuracy": accuracy}}
    (folder / SUMMARY).write_text(json.dumps(summary), encoding="utf-8")


@pytest.fixture
def grown(tmp_path: Path) -> Path:
    """A folder with "grown", the folder of a run that ended with three networks; the second is the largest."""
    run = read_run("quickstart", SMALL)
    state = ModelState(shared=init_state(network_of(run.model), 1))
    for number, widths in ((1, (256,)), (2, (128,))):
        new = Lineage(
            id=f"m{number}",
            config=replace(run.model, widths=widths),
            parent="",
            map=Replicated(),
            born_round=number,
            reason="wider",
        )
        state = state.with_network(new.id, ModelState(shared=init_state(network_of(new.config), number), lineage=new))
    # Larger still, but not the tensors of a network.
    moments = {"first": init_state(network_of(run.model), 3)}
    state = replace(state, moments=moments, kept={"memory/of": torch.zeros(400_000)})
    folder = tmp_path / "grown"
    folder.mkdir()
    write_description(folder, run)
    summarise(folder, 0.5)
    save_file(pack_state(state), folder / MODEL)
    return tmp_path


def borrow(**settings: Any) -> Run:
    """The quickstart with the model of another run."""
    texts = (f"model_of.{key}={json.dumps(value)}" for key, value in settings.items())
    return read_run("quickstart", ("model.learnable_steps=true", *texts))


def test_the_networks_of_a_run_are_ordered_by_size(grown: Path) -> None:
    networks = read_networks(grown / "grown")
    assert [network.lineage.id for network in networks] == ["", "m2", "m1"]
    assert [network.name for network in networks] == ["first", "m2", "m1"]
    for network in networks:
        tensors = init_state(network_of(network.lineage.config), 0).values()
        assert network.element_count == sum(tensor.numel() for tensor in tensors)
    assert (networks[1].lineage.born_round, networks[1].lineage.reason) == (2, "wider")
    assert networks[0].lineage.config == read_description(grown / "grown").model


@pytest.mark.parametrize(
    ("network", "width"), [("largest", 256), ("middle", 128), ("smallest", 64), ("m1", 256), ("first", 64)]
)
def test_a_taken_model_equals_one_that_is_written_out(grown: Path, network: str, width: int) -> None:
    run = resolve_model(borrow(run="grown", network=network), grown)
    written = read_run("quickstart", (f"model.widths=[{width}]", "model.depths=[1]"))
    assert run == written
    assert run.fingerprint() == written.fingerprint()


def test_a_value_with_a_slash_is_a_path_and_any_other_is_a_run_name(grown: Path) -> None:
    resolved = resolve_model(borrow(run=str(grown / "grown")), Path("elsewhere"))
    assert resolved == resolve_model(borrow(run="grown"), grown)
    assert resolve_model(resolved, Path("elsewhere")) is resolved, "its model is resolved"


def test_a_run_that_waits_for_its_model_is_not_begun() -> None:
    with pytest.raises(ConfigError, match="takes its model from run 'grown', but has not read it yet"):
        borrow(run="grown").fingerprint()


@pytest.mark.parametrize(
    ("table", "error", "words"),
    [
        ({"run": "shrunk"}, FileError, r"shrunk/run\.json cannot be read"),
        (
            {"run": "grown", "network": "m3"},
            ConfigError,
            "ended without a network 'm3'; choose one of .*'m1', 'smallest'",
        ),
    ],
)
def test_a_missing_source_is_refused(grown: Path, table: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        resolve_model(borrow(**table), grown)


def test_nothing_is_taken_from_a_run_that_goes_on_or_whose_model_is_damaged(grown: Path) -> None:
    (grown / "grown" / MODEL).write_bytes(b"\x00" * 16)
    with pytest.raises(FileError, match=r"model\.safetensors cannot be read"):
        resolve_model(borrow(run="grown"), grown)
    (grown / "grown" / SUMMARY).unlink()
    with pytest.raises(ConfigError, match="is not finished"):
        resolve_model(borrow(run="grown"), grown)


def test_the_error_of_an_unusable_model_names_its_source(grown: Path) -> None:
    run = read_run("quickstart", ("model_of.run=grown", "data.classes=" + json.dumps(list("abcdefghij"))))
    description = read_description(grown / "grown")
    (grown / "grown" / "run.json").unlink()
    write_description(grown / "grown", replace(description, model=replace(description.model, class_count=3)))
    with pytest.raises(ConfigError, match=r"cannot take network 'first' of .*grown: data\.classes names 10"):
        resolve_model(replace(run, model_of=replace(run.model_of, network="first")), grown)  # type: ignore[type-var]


def test_a_fingerprint_has_the_first_weights_but_not_the_path_of_their_file(grown: Path) -> None:
    drawn = resolve_model(borrow(run="grown", network="m1"), grown)
    run = resolve_model(borrow(run="grown", network="m1", weights=True), grown)
    content = (grown / "grown" / MODEL).read_bytes()
    assert run.first_weights is not None
    assert (run.first_weights.sha256, run.first_weights.network) == (hashlib.sha256(content).hexdigest(), "m1")
    assert run.fingerprint() != drawn.fingerprint()
    assert not {"first_weights", "model_of"} & json.loads(drawn.fingerprint()).keys(), "as in earlier runs"
    moved = replace(run, first_weights=replace(run.first_weights, file="elsewhere"))
    assert select_outcome_settings(moved) == select_outcome_settings(run)
    other = replace(run, first_weights=replace(run.first_weights, network="m2"))
    assert select_outcome_settings(other) != select_outcome_settings(run)


@pytest.mark.slow
def test_a_run_begins_with_the_weights_that_it_takes(grown: Path) -> None:
    run = resolve_model(borrow(run="grown", network="m2", weights=True), grown)
    shared = load_first_model(run, grown / "grown").shared
    expected = init_state(network_of(run.model), 2)
    assert list(shared) == list(expected), "in the order in which the network declares them"
    assert all(shared[name].equal(tensor) for name, tensor in expected.items())
    drawn = load_first_model(
        resolve_model(replace(borrow(run="grown", network="m2"), name="drawn"), grown), grown / "grown"
    )
    own = init_state(network_of(run.model), run.seed)
    assert all(drawn.shared[name].equal(tensor) for name, tensor in own.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"sha256": "0" * 64}, FileError, "have the SHA-256 .*, but must have 0000"),
        ({"file": "nowhere"}, FileError, "first weights nowhere cannot be read"),
        ({"network": "m1"}, ConfigError, "do not fit the run's model"),
        ({"network": "m9"}, ConfigError, "has no network 'm9'"),
    ],
)
def test_weights_of_another_file_or_network_are_refused(
    grown: Path, change: dict[str, str], error: type[Exception], words: str
) -> None:
    run = resolve_model(borrow(run="grown", network="m2", weights=True), grown)
    with pytest.raises(error, match=words):
        load_first_model(replace(run, first_weights=replace(run.first_weights, **change)), grown / "grown")  # type: ignore[type-var]


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (("model_of.run=a", "model_of.weights=true", "method.type=fedtrans"), "set method.first to 'configured'"),
        (("model_of.run=a", "first_weights.file=a", "first_weights.sha256=a"), "and model_of are both set"),
        (("model_of.network=m1",), "model_of.run is missing"),
        (("model_of.run=",), "model_of.run is empty"),
        (("model_of.run=a", "model_of.weight=true"), "did you mean 'weights'"),
    ],
)
def test_contradictory_settings_are_one_error(overrides: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_run("quickstart", overrides)
    assert read_run("quickstart", ("first_weights.file=a", "first_weights.sha256=b")).first_weights == FirstWeights(
        file="a", sha256="b"
    )


SWEEP = """
base = "quickstart"
name = "game"
[[sweep]]
seeds = [1, 2]
[sweep.values]
"training.epochs" = [1, 2]
[[sweep.entries]]
name = "tuned"
set = { method = { type = "fedavg" }, model_of = { run = "sliced", weights = true } }
[[sweep.entries]]
name = "sliced"
set = { model_of = { run = "grown" } }
[[sweep.entries]]
name = "grown"
[[sweep.entries]]
name = "other"
set = { model_of = { run = "runs/elsewhere" } }
[[sweep.entries]]
axis = "links"
name = "slow"
set = { communication_s = 1.0 }
[[sweep.entries]]
axis = "links"
name = "fast"
"""


def test_an_entry_takes_the_model_of_its_counterpart_and_comes_after_it(tmp_path: Path) -> None:
    path = tmp_path / "game.toml"
    path.write_text(SWEEP, encoding="utf-8")
    runs = read_runs(path)
    assert len(runs) == 4 * 2 * 2 * 2
    named = {run.name: run for run in runs}
    positions = {run.name: position for position, run in enumerate(runs)}
    for run in runs:
        _, entry, *rest = run.name.split("-")
        source = {"tuned": "sliced", "sliced": "grown"}.get(entry)
        if source is None:
            assert run.model_of is None or run.model_of.run == "runs/elsewhere"
            continue
        assert run.model_of is not None
        assert run.model_of.run == "-".join(["game", source, *rest])
        other = named[run.model_of.run]
        assert (other.seed, other.training, other.communication_s) == (run.seed, run.training, run.communication_s)
        assert positions[other.name] < positions[run.name]
    assert [run.name for run in runs if run.model_of is None] == [
        f"game-grown-{links}-{epochs}-s{seed}" for links in ("slow", "fast") for epochs in (1, 2) for seed in (1, 2)
    ]


def test_only_entries_name_the_run_of_a_model_and_values_do_not(tmp_path: Path) -> None:
    path = tmp_path / "game.toml"
    path.write_text('base = "quickstart"\n[[sweep]]\n[sweep.values]\n"model_of.run" = ["a", "b"]\n', encoding="utf-8")
    assert {run.name: run.model_of and run.model_of.run for run in read_runs(path)} == {
        "quickstart-a": "a",
        "quickstart-b": "b",
    }


@pytest.mark.parametrize(("entry", "other"), [("a", "a"), ("a", "b")])
def test_runs_that_wait_for_each_other_are_refused(tmp_path: Path, entry: str, other: str) -> None:
    path = tmp_path / "game.toml"
    texts = (
        f'[[sweep.entries]]\nname = "{name}"\nset = {{ model_of = {{ run = "{of}" }} }}'
        for name, of in {entry: other, other: entry}.items()
    )
    path.write_text("\n".join(['base = "quickstart"', "[[sweep]]", *texts]), encoding="utf-8")
    with pytest.raises(ConfigError, match="needs its own model to start"):
        read_runs(path)


@pytest.mark.slow
@pytest.mark.parametrize("command", [("run", "--runs"), ("serve", "--runs"), ("preflight",)])
def test_a_command_says_what_model_it_lacks_before_it_makes_anything(
    command: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name, *options = command
    arguments = [part for option in options for part in (option, "here")]
    result = CliRunner().invoke(app, [name, "quickstart", "--set", "model_of.run=nothing", *arguments])
    assert result.exit_code != 0
    assert "nothing/run.json cannot be read" in result.stderr
    assert not list(tmp_path.iterdir())


class RecordingDisplay:
    """A display that keeps its messages."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def say(self, text: str) -> None:
        """Keep a message."""
        self.messages.append(text)


def test_a_finished_sweep_takes_the_same_models_and_runs_nothing_again(grown: Path) -> None:
    path = grown / "game.toml"
    path.write_text(GAME, encoding="utf-8")
    runs = read_runs(path)
    assert [run.name for run in runs] == ["game-grown", "game-sliced", "game-tuned"]
    (grown / "grown").rename(grown / "game-grown")
    (grown / "game-grown" / "run.json").unlink()
    write_description(grown / "game-grown", runs[0])
    for run in runs[1:]:
        folder = grown / run.name
        folder.mkdir()
        write_description(folder, resolve_model(run, grown))
        (folder / SUMMARY).touch()
    cache, display = CacheFolder(path=grown / "cache"), RecordingDisplay()
    assert run_all(runs, grown, display, cache=cache) == []  # type: ignore[arg-type]  # only `say` is called
    assert [text for text in display.messages if text.endswith("is already finished")] == [
        f"{number} of 3: {run.name} is already finished" for number, run in enumerate(runs, start=1)
    ]
    assert "game-tuned takes network 'm2' of run game-grown" in display.messages
    # The other run is repeated, and ends with other weights of the same networks.
    content = (grown / "game-grown" / MODEL).read_bytes()
    start = 8 + int.from_bytes(content[:8], "little")
    (grown / "game-grown" / MODEL).write_bytes(content[:start] + bytes([content[start] ^ 1]) + content[start + 1 :])
    display.messages.clear()
    with pytest.raises(ConfigError, match=r"game-tuned have changed since .*: .*first_weights.sha256 from "):
        run_all(runs, grown, display, cache=cache)  # type: ignore[arg-type]
    assert "2 of 3: game-sliced is already finished" in display.messages


GAME = """
base = "quickstart"
name = "game"
model = { depths = [1], widths = [64] }
[[sweep]]
[[sweep.entries]]
name = "sliced"
set = { model_of = { run = "grown" } }
[[sweep.entries]]
name = "tuned"
set = { method = { type = "fedavg" }, model_of = { run = "grown", network = "m2", weights = true } }
[[sweep.entries]]
name = "grown"
"""


@pytest.mark.slow
def test_networks_are_listed_by_their_cost_with_the_accuracy_of_a_run_that_has_one(grown: Path) -> None:
    alone = grown / "alone"
    alone.mkdir()
    run = read_run("quickstart", ("model.widths=[192]", "model.depths=[1]"))
    write_description(alone, run)
    summarise(alone, 0.75)
    save_file(pack_state(ModelState(shared=init_state(network_of(run.model), 1))), alone / MODEL)
    result = CliRunner().invoke(app, ["runs", "networks", "grown", "alone", "--runs", str(grown), "--json"])
    rows = json.loads(result.stdout)
    assert [(row["run"], row["network"], row["accuracy"]) for row in rows] == [
        ("grown", "first", None),
        ("grown", "m2", None),
        ("alone", "first", 0.75),
        ("grown", "m1", None),
    ]
    configs = [*(stored.lineage.config for stored in read_networks(grown / "grown")), run.model]
    assert [row["model"] for row in rows] == [to_plain(configs[index]) for index in (0, 1, 3, 2)]
    for row, index in zip(rows, (0, 1, 3, 2), strict=True):
        network = network_of(configs[index])
        cost = estimate_cost(network, network.full_architecture(), batch_size=1)
        assert (row["forward_macs"], row["parameters"]) == (cost.forward_macs, cost.parameters)
    table = CliRunner().invoke(app, ["runs", "networks", "grown", "--runs", str(grown)])
    assert table.stdout.index("first") < table.stdout.index("m2") < table.stdout.index("m1")
    missing = CliRunner().invoke(app, ["runs", "networks", "grow", "--runs", str(grown)])
    assert (missing.exit_code != 0, "did you mean 'grown'" in missing.stderr) == (True, True)


@pytest.mark.slow
def test_a_run_of_a_submodel_is_listed_as_one_and_passes_on_its_untrained_elements(grown: Path) -> None:
    part = grown / "part"
    part.mkdir()
    run = read_run("quickstart", SMALL)
    network = network_of(run.model)
    size = uniform_space(network, (0.5, 1.0))[0]
    marks = {name: ~mark for name, mark in find_held_elements(network, size).items() if not mark.all()}
    state = replace(ModelState.first(init_state(network, 1)), untrained=marks, model=size)
    write_description(part, run)
    summarise(part, 0.75)
    save_file(pack_state(state), part / MODEL)
    (row,) = json.loads(CliRunner().invoke(app, ["runs", "networks", "part", "--runs", str(grown), "--json"]).stdout)
    cost = estimate_cost(network, size, batch_size=1)
    assert (row["submodel"], row["forward_macs"], row["parameters"]) == (size.name, cost.forward_macs, cost.parameters)
    loaded = load_first_model(resolve_model(borrow(run="part", weights=True), grown), part)
    assert loaded.untrained.keys() == marks.keys()
    assert all(mark.equal(loaded.untrained[name]) for name, mark in marks.items())

"""Run files: their values, overrides, bases and sweeps."""

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from subfleet.methods import METHODS
from subfleet.methods.fedavg import FedAvg
from subfleet.methods.heterofl import HeteroFL
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.settings.fingerprint import select_outcome_settings
from subfleet.settings.overrides import apply_override, merge_settings, parse_override
from subfleet.settings.reading import list_included_runs, read_run, read_runs
from subfleet.settings.run_folder import read_description, write_description
from subfleet.settings.sweeps import parse_seeds

PLAIN = st.recursive(
    st.integers() | st.text(max_size=3),
    lambda inner: st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
    max_leaves=8,
)
TABLES = st.dictionaries(st.sampled_from("abc"), PLAIN, max_size=3)


def write_run(folder: Path, text: str, name: str = "run.toml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_there_is_a_run_for_every_method() -> None:
    for name in METHODS:
        run = read_run(name)
        assert (run.name, run.method.TYPE) == (name, name)
        devices = tuple(replace(device, network=None) for device in run.fleet.devices)  # FedADP's devices declare one
        assert replace(run.fleet, devices=devices) == read_run("quickstart").fleet
    games = {"league", "league-both", "league-depth", "league-width"}
    grown = {f"fedtrans-{name}" for name in ("ablation", "game", "heterogeneity", "models", "sensitivity", "vit")}
    united = {"fedadp-game", "fedadp-vgg", "fedadp-vgg-small"}
    kinds = {"classification", "multi-label", "regression", "regression-several", "segmentation", "sequence"}
    assert set(list_included_runs()) == {*METHODS, *games, *grown, *united, *kinds, "quickstart", "fleet"}


@pytest.mark.parametrize(
    ("text", "keys", "value"),
    [
        ("rounds=3", ("rounds",), 3),
        ("training.learning_rate=0.5", ("training", "learning_rate"), 0.5),
        ("method.type=fedavg", ("method", "type"), "fedavg"),
        ('name="a b"', ("name",), "a b"),
        ("rates=[0.5, 1.0]", ("rates",), [0.5, 1.0]),
        ("data.test=a=b", ("data", "test"), "a=b"),
    ],
)
def test_command_line_values_are_toml_or_text(text: str, keys: tuple[str, ...], value: object) -> None:
    assert parse_override(text) == (keys, value)


def test_overrides_take_the_place_of_the_files_values() -> None:
    overrides = ("rounds=2", "training.epochs=1", "fleet.devices.4.runtime=torch", "method.type=fedavg")
    run = read_run("quickstart", overrides)
    assert (run.rounds, run.training.epochs, run.training.batch_size) == (2, 1, 32)
    assert [device.runtime for device in run.fleet.devices] == ["onnx", "onnx", "executorch", "onnx", "torch"]
    assert run.method == FedAvg(), "it has nothing of the method that it replaces"
    same = read_run("quickstart", ("method.type=heterofl", "method.depth=false"))
    assert same.method == HeteroFL(weighting="samples", class_mask=False, depth=False)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rounds", "--set is 'rounds', but must be like"),
        ("=3", "--set is '=3'"),
        ("runds=3", "runds is an unknown key; did you mean 'rounds'"),
        ("name.first=a", "below 'quickstart', which is not a table"),
        ("fleet.devices.9.id=a", "names the item '9', but there are 5"),
        ("rounds=0", "rounds is 0, but must be 1 or more"),
    ],
)
def test_a_wrong_override_is_one_sentence(override: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        read_run("quickstart", (override,))
    assert "\n" not in str(caught.value)


@pytest.mark.slow
@given(plain=TABLES, keys=st.lists(st.sampled_from("abc"), min_size=1, max_size=3), value=PLAIN)
def test_an_override_sets_its_key_and_no_other(plain: dict[str, object], keys: list[str], value: object) -> None:
    try:
        changed = apply_override(plain, keys, value)
    except ConfigError:
        return
    inner = changed
    for key in keys:
        inner = inner[key]
    assert inner == value
    first = keys[0]
    assert {key: value for key, value in changed.items() if key != first} == {
        key: value for key, value in plain.items() if key != first
    }


@pytest.mark.slow
@given(base=TABLES, own=TABLES)
def test_a_derived_file_keeps_its_own_values_and_the_rest_of_its_base(
    base: dict[str, object], own: dict[str, object]
) -> None:
    merged = merge_settings(base, own)
    assert merge_settings(merged, own) == merged
    assert merge_settings({}, own) == own
    assert merge_settings(base, {}) == base
    assert set(merged) == {*base, *own}


def test_a_file_may_be_based_on_a_shipped_run_or_on_one_beside_it(tmp_path: Path) -> None:
    write_run(tmp_path, 'base = "quickstart"\nname = "first"\nrounds = 2\n[training]\nepochs = 1\n', "first.toml")
    run = read_run(write_run(tmp_path, 'base = "first.toml"\nname = "second"\n[method]\ntype = "fedavg"\n'))
    assert (run.name, run.rounds, run.training.epochs, run.training.batch_size) == ("second", 2, 1, 32)
    assert run.method == FedAvg(), "a table of another kind has nothing of the one that it replaces"
    merging = read_run(write_run(tmp_path, 'base = "quickstart"\n[method]\ndepth = false\n'))
    assert merging.method == HeteroFL(weighting="samples", class_mask=False, depth=False)


@pytest.mark.parametrize(
    ("text", "error", "words"),
    [
        ('base = "run.toml"', FileError, "base run.toml"),
        ("base = 3", ConfigError, "base is 3"),
        ('base = "quickstar"', FileError, "base quickstar"),
    ],
)
def test_a_wrong_base_is_one_sentence(tmp_path: Path, text: str, error: type[Exception], words: str) -> None:
    path = write_run(tmp_path, text, "other.toml")
    with pytest.raises(error, match=words):
        read_run(path)


def test_files_that_are_based_on_each_other_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, f'base = "{tmp_path / "b.toml"}"', "a.toml")
    write_run(tmp_path, f'base = "{tmp_path / "a.toml"}"', "b.toml")
    with pytest.raises(ConfigError, match="but must name another file"):
        read_run(tmp_path / "a.toml")


SWEEP = """
base = "quickstart"
name = "duel"

[[sweep]]
seeds = [1, 2, 3]
[sweep.values]
method = [{ type = "heterofl" }, { type = "fedavg", model = "smallest" }]
"training.learning_rate" = [0.1, 0.2]
"""


def test_a_sweep_has_every_combination_with_every_seed(tmp_path: Path) -> None:
    runs = read_runs(write_run(tmp_path, SWEEP))
    combinations = [(run.method.TYPE, run.training.learning_rate, run.seed) for run in runs]
    assert combinations == list(itertools.product(("heterofl", "fedavg"), (0.1, 0.2), (1, 2, 3)))
    assert runs[0].name == "duel-heterofl-0.1-s1"
    assert len({run.name for run in runs}) == len(runs)
    few = read_runs(write_run(tmp_path, SWEEP), ("rounds=1",), (7,))
    assert [(run.seed, run.rounds) for run in few] == [(7, 1)] * 4


def test_seeds_make_several_runs_of_any_file() -> None:
    assert [(run.name, run.seed) for run in read_runs("fedfa", (), parse_seeds("4..6"))] == [
        ("fedfa-s4", 4),
        ("fedfa-s5", 5),
        ("fedfa-s6", 6),
    ]
    assert parse_seeds("1,2,7") == (1, 2, 7)


def test_real_devices_need_a_single_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a sweep over 12 runs, but a single run is needed"):
        read_run(write_run(tmp_path, SWEEP))


@pytest.mark.parametrize("text", ["", "a", "3..1", "1..", "1;2", "-1"])
def test_wrong_seeds_are_one_sentence(text: str) -> None:
    with pytest.raises(ConfigError, match="--seeds is"):
        parse_seeds(text)


ENTRIES = """
base = "quickstart"
[[sweep]]
seeds = [1, 2]
[sweep.values]
rounds = [3, 4]
[[sweep.entries]]
name = "nefl-steps"
set = { method = { type = "nefl" }, model = { learnable_steps = true }, "fleet.devices.0.tier" = "small" }
[[sweep.entries]]
name = "plain"
[[sweep.entries]]
axis = "optimiser"
name = "sgd"
set = { training.optimiser.momentum = 0.0 }
"""


def test_entries_of_a_sweep_set_several_keys_at_once_and_axes_are_combined(tmp_path: Path) -> None:
    runs = read_runs(write_run(tmp_path, ENTRIES))
    names = [
        f"quickstart-{name}-sgd-{rounds}-s{seed}"
        for name in ("nefl-steps", "plain")
        for rounds in (3, 4)
        for seed in (1, 2)
    ]
    assert [run.name for run in runs] == names
    steps, plain = runs[0], runs[4]
    assert (steps.method.TYPE, steps.model.learnable_steps, steps.fleet.devices[0].tier) == ("nefl", True, "small")
    assert (plain.method.TYPE, plain.model.learnable_steps, plain.fleet.devices[0].tier) == ("heterofl", False, "")
    assert {(run.training.optimiser.momentum, run.training.optimiser.weight_decay) for run in runs} == {(0.0, 1e-3)}
    assert [run.rounds for run in runs] == [3, 3, 4, 4] * 2
    assert (steps.model.class_count, steps.seed) == (10, 1), "keys that an entry does not name are unchanged"


@pytest.mark.parametrize(
    ("sweep", "words"),
    [
        ("sweep = 3", "sweep must be tables"),
        ("[[sweep]]\nseed = [1]", "seed is an unknown key"),
        ("[[sweep]]\n[sweep.values]\nrounds = 3", "values.rounds is 3, but must be a list"),
        ('[[sweep]]\nseeds = ["a"]', r"seeds\[0\] is 'a', but must be a whole number"),
        ("[[sweep]]\n[[sweep]]", "have equal runs, such as 'quickstart'"),
        ("[[sweep]]\n[sweep.values]\nrounds = [0, 1]", "rounds is 0"),
        ("[[sweep]]\nentries = 3", "entries is 3, but must be a list"),
        ("[[sweep]]\n[[sweep.entries]]\nset = {}", r"entries\[0\].name is missing"),
        ('[[sweep]]\n[[sweep.entries]]\nname = "a"\nsets = {}', r"entries\[0\].sets is an unknown key"),
        ('[[sweep]]\n[[sweep.entries]]\nname = "a"\nset = 3', r"entries\[0\].set is 3, but must be a table"),
        (
            '[[sweep]]\n[[sweep.entries]]\nname = "a"\n[[sweep.entries]]\nname = "a"',
            "have equal runs, such as 'quickstart-a'",
        ),
    ],
)
def test_a_wrong_sweep_is_one_sentence(tmp_path: Path, sweep: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read_runs(write_run(tmp_path, f'base = "quickstart"\n{sweep}\n'))


def test_a_run_is_kept_in_its_folder_and_guards_it(tmp_path: Path) -> None:
    run = read_run("fedfa")
    write_description(tmp_path, run)
    write_description(tmp_path, read_run("fedfa", ("min_clients=2", "host.type=batch")))
    assert select_outcome_settings(read_description(tmp_path)) == select_outcome_settings(run), (
        "settings that do not affect the outcome may differ"
    )
    with pytest.raises(ConfigError, match="have changed since it was started: seed from 3 to 9"):
        write_description(tmp_path, read_run("fedfa", ("seed=9",)))
    (tmp_path / "run.json").write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is not valid JSON"):
        read_description(tmp_path)
    with pytest.raises(FileError, match="name the folder of a run"):
        read_description(tmp_path / "none")


def test_the_fingerprint_has_every_field_that_is_not_excluded() -> None:
    parts = json.loads(read_run("quickstart").fingerprint())
    assert not {"min_clients", "deadlines", "keep_rounds", "host"} & set(parts)
    assert "name" not in parts["fleet"]
    assert {"data", "method", "model", "seed", "outliers"} <= set(parts)
    assert parts["method"]["type"] == "heterofl"


def test_entries_are_run_in_the_order_of_the_file_apart_from_waiting_for_models(tmp_path: Path) -> None:
    path = tmp_path / "game.toml"
    sources = {"taker": "last", "plain": "", "first": "", "last": "", "other_taker": "first"}
    texts = (
        f'[[sweep.entries]]\nname = "{name}"\n' + (f'set = {{ model_of = {{ run = "{of}" }} }}' if of else "")
        for name, of in sources.items()
    )
    path.write_text("\n".join(['base = "quickstart"', "[[sweep]]", *texts]), encoding="utf-8")
    names = [run.name.split("-")[1] for run in read_runs(path)]
    assert names == ["plain", "first", "last", "taker", "other_taker"]

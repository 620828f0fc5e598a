"""The shipped device profiles are valid, and a wrong profile is refused with the name of the field."""

from pathlib import Path

import pytest

from subfleet.device_profiles.profiles import PROFILES, compute_memory_budget, load_profile, parse_profile
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.protocol.readings import Reading
from subfleet.protocol.submodel import Architecture, Prefix

MINIMAL = 'name = "board"\ntitle = "A board"\nmemory_fraction = 0.5\nruntimes = ["onnx"]\n'


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_shipped_profile_loads_under_its_own_name_and_cites_its_figures(name: str) -> None:
    profile = load_profile(name)
    assert profile.name == name
    assert profile.sources or profile.memory_total_bytes is None
    assert set(profile.runtimes) <= {"onnx", "executorch"}
    assert profile.memory_fraction >= 0.25, "a profile describes a board; the free memory of a demo is in its logs"


def test_the_data_folder_holds_exactly_the_listed_profiles() -> None:
    folder = Path(__file__).parents[2] / "device_profiles" / "subfleet" / "device_profiles" / "data"
    assert sorted(path.name for path in folder.glob("*.toml")) == sorted(PROFILES.values())


def test_a_profile_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "board.toml"
    path.write_text(MINIMAL)
    profile = load_profile(str(path))
    assert (profile.name, profile.threads, profile.memory_total_bytes) == ("board", 1, None)
    assert (profile.operators, profile.macs_per_s) == ((), None)
    path.write_text(MINIMAL + 'operators = ["Conv", "Gemm"]\nmacs_per_s = 2e9\n')
    profile = load_profile(str(path))
    assert (profile.operators, profile.macs_per_s) == (("Conv", "Gemm"), 2e9)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (MINIMAL.replace("0.5", "1.5"), "memory_fraction is 1.5"),
        (MINIMAL.replace("0.5", "0.0"), "memory_fraction is 0.0"),
        (MINIMAL.replace('["onnx"]', "[]"), "runtimes is empty, but must have 1 or more"),
        (MINIMAL.replace('"board"', '""'), "name is empty"),
        (MINIMAL + "threads = 0\n", "threads is 0"),
        (MINIMAL + "macs_per_s = 0.0\n", "macs_per_s is 0.0"),
        (MINIMAL + 'operators = ["Conv", ""]\n', "operators[1] is '', but must be 1 or more printable characters"),
        (MINIMAL + 'memory_limit = "300MB"\n', "memory_limit is '300MB', but must be a size such as 300M"),
        (MINIMAL + 'disk_limit = "much"\n', "disk_limit is 'much', but must be a size such as 300M"),
        (MINIMAL + "memory = 7\n", "memory is an unknown key"),
        (MINIMAL.replace('name = "board"\n', ""), "name is missing"),
        (MINIMAL + "threads = true\n", "threads is True, but must be a whole number"),
        ("name = ", "not valid TOML"),
    ],
)
def test_a_wrong_profile_is_one_sentence_that_names_the_field(text: str, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_profile(text, "board.toml")
    assert words in str(caught.value)
    assert "board.toml" in str(caught.value)


def test_all_wrong_keys_and_types_are_reported_at_once() -> None:
    wrong = MINIMAL.replace('title = "A board"\n', "") + 'thread = 2\ncores = "four"\nmemory_limit = 300\n'
    with pytest.raises(ConfigError) as caught:
        parse_profile(wrong, "board.toml")
    assert str(caught.value).split("\n  - ") == [
        "the device profile board.toml has 4 problems:",
        "thread is an unknown key; did you mean 'threads'?",
        "cores is 'four', but must be a whole number",
        "memory_limit is 300, but must be text",
        "title is missing",
    ]


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="raspberry_pi_4"):
        load_profile("raspberry_pi_5")


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"absent\.toml"):
        load_profile(str(tmp_path / "absent.toml"))


def test_the_budget_is_a_fraction_of_free_memory_and_0_if_that_is_unknown() -> None:
    assert compute_memory_budget(Reading(memory_free_bytes=1000), 0.25) == 250
    assert compute_memory_budget(Reading(), 0.25) == 0
    assert compute_memory_budget(Reading(memory_free_bytes=1000), 0.25, data_bytes=600) == 100
    assert compute_memory_budget(Reading(memory_free_bytes=1000), 0.25, data_bytes=1001) == 0


def test_the_budget_is_the_minimum_of_fraction_and_limit() -> None:
    assert compute_memory_budget(Reading(memory_free_bytes=1000), 0.25, limit_bytes=200) == 200
    assert compute_memory_budget(Reading(memory_free_bytes=1000), 0.25, limit_bytes=300) == 250
    assert compute_memory_budget(Reading(), 0.25, limit_bytes=300) == 0
    assert parse_profile(MINIMAL, "board.toml").max_training_bytes is None
    assert parse_profile(MINIMAL, "board.toml").disk_limit_bytes == 2_000_000_000
    assert parse_profile(MINIMAL + 'disk_limit = "500M"\n', "board.toml").disk_limit_bytes == 500_000_000
    assert parse_profile(MINIMAL + 'memory_limit = "1.5Gi"\n', "board.toml").max_training_bytes == 3 * 2**29


def test_a_profile_may_declare_an_architecture() -> None:
    text = """
name = "board"
title = "A board"
memory_fraction = 0.5
runtimes = ["onnx"]

[architecture]
blocks = ["b1"]
axes = [["stream", {type = "prefix", size = 4}]]
"""
    assert parse_profile(text, "board.toml").architecture == Architecture(
        axes=(("stream", Prefix(size=4)),), blocks=("b1",)
    )
    with pytest.raises(ConfigError, match=r"architecture.axes\[0\]\[1\].size is 0"):
        parse_profile(text.replace("size = 4", "size = 0"), "board.toml")
    assert load_profile("laptop").architecture is None

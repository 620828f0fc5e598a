"""A population gives the same devices for the same seed, with the profiles and logs that it describes."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from subfleet.device_profiles import load_log, load_profile
from subfleet.device_profiles.drawing import draw_devices
from subfleet.device_profiles.populations import POPULATIONS, Kind, Population, load_population, parse_population
from subfleet.protocol.errors import ConfigError, FileError

TWO = Population(
    name="two",
    title="two",
    kinds=(Kind(name="big", weight=3, logs=("laptop",)), Kind(name="small", weight=1, logs=("raspberry_pi_4",))),
)
TABLES = """
name = "tables"
title = "memory and links out of tables"
dealing = "even"
step_s = 5.0
[[kinds]]
name = "pi"
median_budget_bytes = 1_000_000
memory = { file = "memory.csv", columns = ["free", "cached"], unit_bytes = 1000, used_percent = "used",
  row_column = "who", row_with = "pi", row_without = "old", every = 2 }
link = { file = "links.csv", traces = 2 }
""".replace(",\n ", ",")
MEMORY = "who,free,cached,used\n" + "".join(
    f"{device},{free},1000,50\n" for free in range(3000, 9000, 1000) for device in ("pi", "pi-old", "phone")
)
LINKS = "trace,t_s,dur_s,dl_mbps\n" + "".join(f"{name},0,15,{rate}\n" for name, rate in (("b", 2), ("a", 1), ("c", 3)))


def write_tables(folder: Path) -> Population:
    (folder / "memory.csv").write_text(MEMORY, encoding="utf-8")
    (folder / "links.csv").write_text(LINKS, encoding="utf-8")
    return parse_population(TABLES, "tables")


@pytest.mark.slow
def test_the_same_seed_gives_the_same_devices_and_more_begin_with_them() -> None:
    mixed = load_population("mixed")
    twenty = draw_devices(mixed, 20, seed="1/phone", data=None)
    assert draw_devices(mixed, 20, seed="1/phone", data=None) == twenty
    assert draw_devices(mixed, 8, seed="1/phone", data=None) == twenty[:8]
    assert draw_devices(mixed, 20, seed="2/phone", data=None) != twenty
    assert {device.profile.name for device in twenty} <= {kind.name for kind in mixed.kinds}


@pytest.mark.slow
def test_kinds_are_drawn_by_their_weights_and_have_their_own_profiles_and_logs() -> None:
    devices = draw_devices(TWO, 400, seed="1", data=None)
    assert 270 <= sum(device.profile.name == "big" for device in devices) <= 330, "three quarters"
    readings = {name: [row.reading for row in load_log(name).rows] for name in ("laptop", "raspberry_pi_4")}
    for device in devices[:40]:
        log = readings["laptop" if device.profile.name == "big" else "raspberry_pi_4"]
        replayed = [row.reading for row in device.log.rows]
        assert any(replayed == [*log[start:], *log[:start]] for start in range(len(log)))


def test_even_dealing_keeps_shares_and_begins_equally_far_apart_whatever_the_seed() -> None:
    even = replace(TWO, dealing="even")
    devices = draw_devices(even, 8, seed="1", data=None)
    assert devices == draw_devices(even, 8, seed="2", data=None)
    assert [device.profile.name for device in devices] == ["big"] * 6 + ["small"] * 2
    rows = load_log("raspberry_pi_4").rows
    assert devices[7].log.rows[0].reading == rows[len(rows) // 2].reading


def test_links_of_other_logs_replace_those_of_a_log() -> None:
    kind = Kind(name="pi", profile="raspberry_pi_4", logs=("raspberry_pi_4",), links=("laptop",))
    (device,) = draw_devices(replace(TWO, kinds=(kind,), dealing="even"), 1, seed="1", data=None)
    pi, laptop = load_log("raspberry_pi_4").rows, load_log("laptop").rows
    assert [row.reading.memory_free_bytes for row in device.log.rows] == [row.reading.memory_free_bytes for row in pi]
    assert device.log.rows[0].reading.downlink_bps == laptop[0].reading.downlink_bps
    assert replace(device.profile, name="raspberry_pi_4") == load_profile("raspberry_pi_4")


def test_tables_are_read_as_the_population_describes(tmp_path: Path) -> None:
    devices = draw_devices(write_tables(tmp_path), 3, seed="1", data=tmp_path)
    # Half of free + cached, every second row of "pi" without "pi-old": the median is 3 MB, the budget 1 MB.
    assert [device.profile.memory_fraction for device in devices] == [pytest.approx(1 / 3)] * 3
    memory = [[row.reading.memory_free_bytes for row in device.log.rows] for device in devices]
    assert memory == [
        [2_000_000, 3_000_000, 4_000_000],
        [3_000_000, 4_000_000, 2_000_000],
        [4_000_000, 2_000_000, 3_000_000],
    ]
    links = [{row.reading.downlink_bps for row in device.log.rows} for device in devices]
    assert links == [{1e6}, {2e6}, {1e6}], "the first two traces by name, one after the other"
    assert devices[0].log.rows[0].reading.uplink_bps == 2e5


def test_missing_data_are_reported_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'league' needs memory/phone_top_1s.csv, but SUBFLEET_DATA is not set"):
        draw_devices(load_population("league"), 1, seed="1", data=None)
    population = write_tables(tmp_path)
    with pytest.raises(FileError, match=r"needs .*memory.csv, which is missing"):
        draw_devices(population, 1, seed="1", data=tmp_path / "elsewhere")
    (tmp_path / "memory.csv").write_text("who,free\npi,1\n", encoding="utf-8")
    with pytest.raises(FileError, match="has no column 'cached'"):
        draw_devices(population, 1, seed="1", data=tmp_path)
    with pytest.raises(ConfigError, match="did you mean 'mixed'"):
        load_population("mixd")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"weight": "weight = 0"}, r"kinds\[0\].*weight is 0"),
        ({"wight": "wight = 2"}, r"kinds\[0\].wight is an unknown key; did you mean 'weight'"),
        ({"logs": ""}, "must have either logs or both memory and link"),
        ({"link": 'link = { file = "x" }'}, "must have either logs or both memory and link"),
    ],
)
def test_a_wrong_population_is_refused_with_its_key(change: Mapping[str, str], words: str) -> None:
    lines = {"logs": 'logs = ["laptop"]', **change}
    text = "\n".join(('name = "x"', 'title = "x"', "[[kinds]]", 'name = "a"', *lines.values()))
    with pytest.raises(ConfigError, match=words):
        parse_population(text, "x.toml")


def test_every_shipped_population_can_be_read() -> None:
    assert {load_population(name).name for name in POPULATIONS} == set(POPULATIONS)

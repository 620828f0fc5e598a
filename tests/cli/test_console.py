"""Tables and lines of a running round: cells are plain text, and the important columns always fit."""

import io
import itertools
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len
from rich.console import Console

from subfleet.cli.console import PlainLines, Tables, format_progress, open_display
from subfleet.journal.records import ClientRow, Progress, RoundRecord
from subfleet.reporting.texts import CLIENT_COLUMNS

SNAPSHOTS = Path(__file__).parent / "tables"
EVIL = "cam[/][link=http://evil.example]log in[/link]:skull:\x1b]8;;http://evil.example\x07\nround 9"
ESCAPED = "cam[/][link=http://evil.example]log in[/link]:skull: ]8;;http://evil.example  round 9"

JETSON = ClientRow(
    client_id="jetson",
    device="jetson_orin_nano",
    runtime="onnx",
    architecture="w1 d4",
    architecture_id="whole",
    parameters=1_200_000,
    memory_free_bytes=4_260_200_000,
    budget_bytes=2_130_100_000,
    downlink_budget_bytes=18_000_000,
    uplink_budget_bytes=4_800_000,
    update_bytes=4_800_000,
    planned_peak_bytes=39_100_000,
    measured_peak_bytes=37_500_000,
    bytes_down=4_800_400,
    bytes_up=4_800_900,
    seconds=11.25,
    loss=0.131,
    sample_count=300,
    status="aggregated",
    share=0.625,
)
PHONE = replace(
    JETSON,
    client_id="phone",
    device="android_phone",
    runtime="executorch",
    limit="memory+link",
    architecture="w3/4 d3",
    architecture_id="smaller",
    memory_free_bytes=442_000_000,
    budget_bytes=110_500_000,
    uplink_budget_bytes=2_100_000,
    planned_peak_bytes=12_000_000,
    measured_peak_bytes=11_800_000,
    share=0.375,
)
CAM = replace(
    PHONE,
    client_id="pi-zero-2w",
    device="raspberry_pi_zero_2_w",
    architecture="",
    architecture_id="",
    limit="memory",
    planned_peak_bytes=0,
    status="skipped: no submodel fits: the smallest needs 5123456 bytes of memory and the budget is 1234",
)
ROUND = RoundRecord(round=4, accuracy=0.96384, loss=0.1, seconds=13.7, log_time_s=180.0, clients=(JETSON, PHONE, CAM))


def render_round(record: RoundRecord, width: int) -> str:
    screen = Console(file=io.StringIO(), width=width, force_terminal=True, color_system=None)
    Tables(screen).round_finished(record)
    assert isinstance(screen.file, io.StringIO)
    return screen.file.getvalue()


def columns_of(table: str) -> set[str]:
    heads = [line for line in table.splitlines() if "device" in line or "planned" in line]
    return {column.title for column in CLIENT_COLUMNS if any(column.title.split()[0] in line for line in heads)}


@pytest.mark.parametrize("width", [80, 100, 120, 160])
def test_a_round_looks_as_it_did(width: int) -> None:
    table = "\n".join(line.rstrip() for line in render_round(ROUND, width).splitlines()) + "\n"
    assert table == (SNAPSHOTS / f"{width}.txt").read_text(encoding="utf-8")


def test_the_reason_for_a_lowered_share_fits_on_the_narrowest_screen() -> None:
    capped = replace(JETSON, lowered="its share is capped at 0.5 of the round")
    words = render_round(replace(ROUND, clients=(capped, PHONE)), 80).split()
    assert " aggregated; its share is capped at 0.5 of the round phone " in " ".join(words)


@pytest.mark.parametrize("width", range(80, 200, 3))
def test_no_line_is_wider_than_the_screen_and_important_columns_are_shown(width: int) -> None:
    table = render_round(ROUND, width)
    assert max(cell_len(line) for line in table.splitlines()) <= width
    for cell in ("jetson", "pi-zero-2w", "w3/4 d3", "w1 d4", "39.1", "aggregated"):
        assert cell in table


def test_a_wider_screen_shows_all_columns_of_a_narrower_one() -> None:
    columns = [columns_of(render_round(ROUND, width)) for width in (80, 100, 120, 160, 200)]
    assert all(narrow <= wide for narrow, wide in itertools.pairwise(columns))
    assert columns[0] < columns[1] < columns[2] < columns[3]
    assert columns[-1] == {column.title for column in CLIENT_COLUMNS}


def test_a_name_is_no_markup_in_a_table() -> None:
    table = render_round(
        replace(ROUND, clients=(replace(JETSON, device=EVIL, architecture="[red]w1", status="[bold]"),)), 250
    )
    assert "\x1b]8" not in table
    assert "".join(ESCAPED.split()) in "".join(table.split())
    assert "[red]w1" in table
    assert "[bold]" in table


@pytest.mark.parametrize("display", [Tables, PlainLines])
def test_a_name_is_no_markup_in_a_sentence(display: type[Tables] | type[PlainLines]) -> None:
    screen = Console(file=io.StringIO(), width=300, force_terminal=True, color_system="truecolor")
    display(screen).say(f"client cam joined: {EVIL}")
    assert isinstance(screen.file, io.StringIO)
    assert screen.file.getvalue() == f"client cam joined: {ESCAPED}\n"


def test_a_name_is_no_markup_in_a_line() -> None:
    screen = Console(file=io.StringIO(), width=80)
    PlainLines(screen).round_finished(replace(ROUND, clients=(replace(JETSON, device=EVIL),)))
    assert isinstance(screen.file, io.StringIO)
    title, row = screen.file.getvalue().splitlines()
    assert title == "round 4: accuracy 0.9638, 1 different submodel, 13.7 s, logs read at 180 s"
    assert f"profile={ESCAPED}  runtime=onnx" in row


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(
    ("file", "width", "kind"),
    [(Terminal, 80, Tables), (Terminal, 79, PlainLines), (io.StringIO, 200, PlainLines)],
)
def test_tables_need_a_terminal_of_80_characters(
    file: type[io.StringIO], width: int, kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "stdout", file())
    with open_display(json=False) as display:
        assert isinstance(display, kind)


HALF = Progress(round=2, round_count=5, answered=3, devices=6, left_s=None)


@pytest.mark.parametrize(
    ("left_s", "text"),
    [
        (None, "round 2 of 5: 3 of 6 devices have answered"),
        (0.0, "round 2 of 5: 3 of 6 devices have answered, about 1 s left"),
        (42.4, "round 2 of 5: 3 of 6 devices have answered, about 42 s left"),
        (100.0, "round 2 of 5: 3 of 6 devices have answered, about 2 min left"),
        (7500.0, "round 2 of 5: 3 of 6 devices have answered, about 2 h 5 min left"),
    ],
)
def test_progress_tells_rounds_devices_and_the_time_left(left_s: float | None, text: str) -> None:
    assert format_progress(replace(HALF, left_s=left_s)) == text


def test_progress_names_absent_devices_and_reasons() -> None:
    away = ("cyd: it said goodbye (it was stopped), last seen 12 s ago", "bob: no heartbeat for 41 s")
    text = "round 2 of 5: 3 of 6 devices have answered; away: " + ", ".join(away)
    assert format_progress(replace(HALF, away=away)) == text


def test_on_a_terminal_the_next_output_replaces_the_progress_line() -> None:
    output = io.StringIO()
    display = Tables(Console(file=output, force_terminal=True, width=100, color_system=None))
    display.progressed(HALF)
    display.progressed(replace(HALF, answered=4))
    display.say("it goes on")
    display.say("and on")
    display.progressed(HALF)
    display.clear()
    display.clear()
    erased = "\r\x1b[2K"
    first, second = (format_progress(replace(HALF, answered=count)) for count in (3, 4))
    assert output.getvalue() == f"{first}{erased}{second}{erased}it goes on\nand on\n{first}{erased}"


def test_in_a_log_a_round_has_one_line_at_its_start() -> None:
    output = io.StringIO()
    display = PlainLines(Console(file=output, width=100))
    for number, answered in ((2, 0), (2, 1), (2, 2), (3, 0), (3, 1)):
        display.progressed(replace(HALF, round=number, answered=answered))
    assert output.getvalue().splitlines() == [
        "round 2 of 5: 0 of 6 devices have answered",
        "round 3 of 5: 0 of 6 devices have answered",
    ]

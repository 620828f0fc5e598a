"""The pages about methods agree with their code."""

import dataclasses
import importlib.util
import re
from operator import attrgetter
from pathlib import Path
from types import ModuleType

import pytest

from subfleet.methods import METHODS
from subfleet.methods.describing import Setting, list_departures, list_parameters
from subfleet.protocol.errors import ConfigError
from subfleet.testing.rounds import DrawnClient, draw_state, make_assignee, make_context, play
from subfleet.testing.submodels import have_same_bits

ROOT = Path(__file__).resolve().parents[3]


def _load_script() -> ModuleType:
    """Load the script that writes a method's section."""
    module_spec = importlib.util.spec_from_file_location("method_section", ROOT / "scripts" / "method_section.py")
    assert module_spec is not None
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    module_spec.loader.exec_module(module)
    return module


SCRIPT = _load_script()
PAGE = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
METHOD_SECTIONS = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))


def test_the_page_has_a_section_and_a_row_of_the_overview_for_every_method() -> None:
    rows = dict(re.findall(r"^\| \[`(\w+)`\]\(#\1\) \| [^|]+ \|(.*)\|$", PAGE, re.MULTILINE))
    assert sorted(METHOD_SECTIONS) == sorted(rows) == list(METHODS)
    assert {name: cell.strip() for name, cell in rows.items()} == {
        name: ", ".join(kind.INFO.varies) for name, kind in METHODS.items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_a_section_begins_with_title_and_paper(name: str) -> None:
    info = METHODS[name].INFO
    first = METHOD_SECTIONS[name].strip().partition("\n\n")[0]
    assert " ".join(first.split()) == f"**{info.title}** ({info.paper})."


@pytest.mark.parametrize("name", METHODS)
def test_a_section_has_every_parameter_with_its_default(name: str) -> None:
    kind = METHODS[name]
    rows = dict(re.findall(r"^\| `([\w.]+)` \| ([^|]+) \| [^|]+ \|$", METHOD_SECTIONS[name], re.MULTILINE))
    elsewhere = {path for path, default in rows.items() if default == "`{...}`"}
    for path, default in rows.items():
        value = attrgetter(path)(kind())
        assert dataclasses.is_dataclass(value) if path in elsewhere else default == SCRIPT.format_cell(value), path
    assert rows.keys() - elsewhere == {
        path for path in list_parameters(kind) if path.partition(".")[0] not in elsewhere
    }


def test_the_script_writes_what_a_section_needs() -> None:
    row, section = SCRIPT.build_overview_row(METHODS["fluid"]), SCRIPT.build_section(METHODS["fluid"])
    assert row == "| [`fluid`](#fluid) | ... | width |"
    for line in section.splitlines():  # meanings and descriptions are written by hand
        assert line.rpartition(" | ")[0].removesuffix("...") in PAGE, line


@pytest.mark.parametrize("name", METHODS)
def test_a_section_has_the_departures_of_the_defaults(name: str) -> None:
    section, kind = METHOD_SECTIONS[name], METHODS[name]
    listed = section.partition("**By default it differs from the paper:**\n\n")[2].partition("\n\n")[0]
    departures = [" ".join(item.split()) for item in re.split(r"^- ", listed, flags=re.MULTILINE)[1:]]
    assert departures == list(list_departures(kind(), Setting()))
    assert ("it is **exact**" in section) == (not departures)


def test_the_method_of_the_recipe_works(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/add-a-method.md").read_text(encoding="utf-8")
    source = page.partition("```python\n")[2].partition("```")[0]
    module: dict[str, object] = {"__name__": "lottery"}
    exec(compile(source, "lottery.py", "exec"), module)  # noqa: S102 - our own document
    kind = module["Lottery"]
    assert isinstance(kind, type)
    context = make_context(kind())
    drawn = {
        candidate.architecture.architecture_id
        for number in range(80)
        if (candidate := context.roles.assigner.assign(make_assignee(context, "a", round_number=number)).candidate)
        is not None
    }
    assert drawn == {size.architecture_id for size in context.space}
    state = draw_state(context.network)
    aggregated = play(context, state, [DrawnClient(name="a", size=0), DrawnClient(name="b", size=1)], tmp_path).state
    assert not have_same_bits(aggregated.shared, state.shared)
    with pytest.raises(ConfigError, match="least is -1"):
        kind(least=-1)

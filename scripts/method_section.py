"""Writes the parts of a method's row and section of docs/reference/methods.md that follow from its class.

Example: python scripts/method_section.py fedprox
"""

import dataclasses
import inspect
import re
import sys
from operator import attrgetter
from typing import Any

from subfleet.methods import METHODS, Method
from subfleet.methods.describing import Setting, list_departures, list_parameters

EXACT = "With the default parameters it is **exact**: it does what the paper says."


def format_toml(value: Any) -> str:
    """Format a value as in a run file."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    if dataclasses.is_dataclass(value):
        kind = [f'type = "{value.TYPE}"'] if hasattr(value, "TYPE") else []
        changed = [field for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        assignments = [f"{field.name} = {format_toml(getattr(value, field.name))}" for field in changed]
        return f"{{ {', '.join([*kind, *assignments])} }}"
    return f'"{value}"' if isinstance(value, str) else str(value)


def format_cell(value: object) -> str:
    """Format a default for a table: TOML in backticks, or none."""
    return "none" if value is None else f"`{format_toml(value)}`"


def build_overview_row(kind: type[Method]) -> str:
    """Return the row of the overview, without the description of the method."""
    return f"| [`{kind.TYPE}`](#{kind.TYPE}) | ... | {', '.join(kind.INFO.varies)} |"


def build_section(kind: type[Method]) -> str:
    """Return the section without description and usage; meanings come from the class's docstring."""
    info, method = kind.INFO, kind()
    meanings = dict(re.findall(r"^    (\w+): (.+(?:\n {8,}.+)*)", inspect.getdoc(kind) or "", re.MULTILINE))
    rows = [
        f"| `{path}` | {format_cell(attrgetter(path)(method))} | {' '.join(meanings.get(path, '...').split())} |"
        for path in list_parameters(kind)
    ]
    departures = "\n".join(f"- {departure}" for departure in list_departures(method, Setting()))
    fidelity = f"**By default it differs from the paper:**\n\n{departures}" if departures else EXACT
    table = ["\n".join(["| parameter | default | meaning |", "|---|---|---|", *rows])] if rows else []
    parts = [f"### {kind.TYPE}", f"**{info.title}** ({info.paper}).", "...", "**Use it** ...", *table, fidelity]
    return "\n\n".join(parts)


if __name__ == "__main__":
    named = METHODS.load(sys.argv[1])
    sys.stdout.write(f"{build_overview_row(named)}\n\n{build_section(named)}\n")

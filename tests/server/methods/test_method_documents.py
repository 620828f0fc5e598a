"""What the documents say of methods is what they are."""

import dataclasses
import re
from pathlib import Path

import pytest

from subfleet.methods import METHODS
from subfleet.protocol.errors import ConfigError
from subfleet.testing.rounds import Client, ask, first_state, play, terms_with
from subfleet.testing.subnets import same_bits

ROOT = Path(__file__).resolve().parents[3]


def test_every_method_is_listed_with_its_parameters_and_their_defaults() -> None:
    page = (ROOT / "docs/reference/methods.md").read_text(encoding="utf-8")
    table = page.partition("## ")[0]
    rows = {row[0]: row for row in re.findall(r"^\| `(\w+)` \| (.*) \| (.*) \| (.*) \|$", table, re.MULTILINE)}
    assert sorted(rows) == list(METHODS)
    for name, kind in METHODS.items():
        _, _, varies, parameters = rows[name]
        assert varies == (", ".join(kind.INFO.varies) or "nothing")
        told = dict(re.findall(r"`(\w+)(?: = ([^`]*))?`", parameters))
        fields = {field.name: field for field in dataclasses.fields(kind)}
        assert told.keys() == fields.keys()
        for key, default in told.items():
            found = getattr(kind(), key)
            assert default in ("{...}", "") or default == _toml(found)


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(map(str, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value)


def test_the_method_of_the_recipe_works(tmp_path: Path) -> None:
    page = (ROOT / "docs/how-to/add-a-method.md").read_text(encoding="utf-8")
    source = page.partition("```python\n")[2].partition("```")[0]
    module: dict[str, object] = {"__name__": "lottery"}
    exec(compile(source, "lottery.py", "exec"), module)  # noqa: S102 - our own document
    kind = module["Lottery"]
    assert isinstance(kind, type)
    terms = terms_with(kind())
    drawn = {
        found.spec.spec_id
        for number in range(80)
        if (found := terms.roles.assigner.assign(ask(terms, "a", round_number=number)).candidate) is not None
    }
    assert drawn == {size.spec_id for size in terms.space}
    state = first_state(terms.network)
    folded = play(terms, state, [Client(name="a", size=0), Client(name="b", size=1)], tmp_path).state
    assert not same_bits(folded.shared, state.shared)
    with pytest.raises(ConfigError, match="least is -1"):
        kind(least=-1)

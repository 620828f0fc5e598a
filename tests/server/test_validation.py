"""What a person wrote is validated with pydantic: it takes what the wire's door takes, and tells all that is wrong."""

import copy
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from subfleet.elastic.families.records.residual import Mlp
from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.registry import Registry
from subfleet.protocol.schema import from_plain, to_plain
from subfleet.settings.reading import read_run, read_runs
from subfleet.settings.run import Run
from subfleet.settings.shipped import shipped_names
from subfleet.settings.validation import problems_with, validated


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    TYPE: ClassVar[str] = "square"
    side: int

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ConfigError(f"side is {self.side}, but must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Circle:
    TYPE: ClassVar[str] = "circle"
    radius: float = 1.0


def shapes() -> Registry[type[Square]]:
    return Registry(
        "test.shapes", "shape", find=lambda group: [EntryPoint("square", "shapes_of_settings:Square", "test.shapes")]
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawing:
    shape: Annotated[Any, shapes()] | None = None
    frame: Square | Circle | None = None
    colour: Literal["red", "green"] = "red"
    points: tuple[tuple[int, float], ...] = ()
    names: dict[str, int] | None = None
    title: str = ""
    filled: bool = False
    least: int = 0
    most: int = 9

    def __post_init__(self) -> None:
        if self.least < 0:
            raise ValueError(f"least is {self.least}, but must be 0 or more")
        if self.most < self.least:
            raise ValueError(f"most is {self.most}, but must be {self.least} or more")


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ModuleType("shapes_of_settings")
    vars(found).update(Square=Square)
    monkeypatch.setitem(sys.modules, "shapes_of_settings", found)


WHOLE: dict[str, Any] = {
    "shape": {"type": "square", "side": 3},
    "frame": {"type": "circle", "radius": 2},
    "colour": "green",
    "points": [[1, 2], [3, 4.5]],
    "names": {"a": 1},
    "title": "x",
    "filled": True,
}


def test_a_record_is_built_of_what_was_written() -> None:
    assert validated(Drawing, WHOLE, "a file") == Drawing(
        shape=Square(side=3),
        frame=Circle(radius=2.0),
        colour="green",
        points=((1, 2.0), (3, 4.5)),
        names={"a": 1},
        title="x",
        filled=True,
    )
    assert validated(Drawing, {"shape": None}, "a file") == Drawing()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"shape": {"type": "sqare"}},
            "shape has the type 'sqare', but must be one of ['square']; did you mean 'square'?",
        ),
        ({"shape": {"side": 3}}, "shape has no type, but must be one of ['square']"),
        ({"shape": {"type": "square", "side": -1}}, "shape: side is -1, but must be 0 or more"),
        ({"shape": 3}, "shape is 3, but must be a table"),
        (
            {"frame": {"type": "circel"}},
            "frame has the type 'circel', but must be one of ['square', 'circle']; did you ",
        ),
        ({"frame": {"type": "circle", "radius": "2"}}, "frame.radius is '2', but must be a finite number"),
        ({"frame": {"type": "circle", "radius": float("nan")}}, "frame.radius is nan, but must be a finite number"),
        ({"colour": "gren"}, "colour is 'gren', but must be one of ['red', 'green']; did you mean 'green'?"),
        ({"points": [[1, 2.0], [3]]}, "points[1][1] is missing, but must be there"),
        ({"points": [[1, 2.0, 3]]}, "points[0] is [1, 2.0, 3], but must be a list of 2"),
        ({"points": [[1, 2.0], ["3", 4.0]]}, "points[1][0] is '3', but must be int"),
        ({"points": 3}, "points is 3, but must be a list"),
        ({"names": {"a": 1.5}}, "names.a is 1.5, but must be int"),
        ({"names": [1]}, "names is [1], but must be a table"),
        ({"title": 3}, "title is 3, but must be text"),
        ({"title": "a\0b"}, "title is 'a\\x00b', but must be text"),
        ({"title": "x" * 4097}, "but must be text of at most 4096 characters"),
        ({"filled": 1}, "filled is 1, but must be bool"),
        ({"least": True}, "least is True, but must be int"),
        (
            {"frame": {"type": "circle", "radius": 2**63}},
            "frame.radius is 9223372036854775808, but must be a finite number",
        ),
        ({"least": 2**63}, "least is 9223372036854775808, but must be int"),
        ({"leest": 3}, "leest is an unknown key; did you mean 'least'?"),
        ({"zzzzz": 3}, "zzzzz is an unknown key; known are ['colour', "),
    ],
)
def test_one_problem_is_one_sentence_with_its_keys(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validated(Drawing, {**WHOLE, **change}, "a file")
    assert str(caught.value).startswith("a file: ")
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_everything_that_is_wrong_is_told_at_once_of_values_and_of_records() -> None:
    wrong = {
        **WHOLE,
        "shape": {"type": "square", "sid": 3},
        "points": [[1, "2"], ["3", 4.0]],
        "least": -1,
        "most": -2,
        "title": 3,
    }
    assert sorted(problems_with(Drawing, wrong, "drawing")) == [
        "drawing.points[0][1] is '2', but must be a finite number",
        "drawing.points[1][0] is '3', but must be int",
        "drawing.shape.sid is an unknown key; did you mean 'side'?",
        "drawing.shape.side is missing, but must be there",
        "drawing.title is 3, but must be text of at most 4096 characters, without NUL",
        "drawing: least is -1, but must be 0 or more",
        "drawing: most is -2, but must be 0 or more",
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", shipped_names())
def test_every_run_that_we_ship_is_read_as_its_json_is(name: str) -> None:
    first, *_, last = [*read_runs(name), *read_runs(name)]  # a sweep has many
    for run in (first, last):
        assert validated(Run, to_plain(run), name) == from_plain(Run, to_plain(run)) == run


JUNK: list[Any] = [
    None,
    True,
    0,
    -1,
    3,
    2**63,
    0.5,
    -2.0,
    float("inf"),
    "",
    "x",
    "a/b",
    [],
    [1],
    ["x"],
    {},
    {"type": "x"},
]
QUICKSTART = to_plain(read_run("quickstart"))


def places(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The keys that lead to every value."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from places(value, (*path, key))


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(list(places(QUICKSTART))), st.sampled_from(["set", "drop", "add"]), st.sampled_from(JUNK)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_whatever_is_wrong_is_refused_here_exactly_where_the_wires_door_refuses_it(changes: list[Any]) -> None:
    plain = copy.deepcopy(QUICKSTART)
    for path, how, junk in changes:
        inside = plain
        try:
            for key in path[:-1]:
                inside = inside[key]
            if how == "drop":
                del inside[path[-1]]
            else:
                inside["another" if how == "add" and isinstance(inside, dict) else path[-1]] = junk
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has taken it away
    try:
        expected = from_plain(Run, plain)
    except (ProtocolError, ConfigError):
        assert problems_with(Run, plain)
        with pytest.raises(ConfigError):
            validated(Run, plain, "a file")
    else:
        assert validated(Run, plain, "a file") == expected
        assert problems_with(Run, plain) == []


@pytest.mark.slow
def test_a_record_that_is_made_in_python_knows_nothing_of_pydantic() -> None:
    script = (
        "import sys; sys.modules['pydantic'] = sys.modules['pydantic_core'] = None\n"
        "import subfleet.settings.run, subfleet.settings.fleet, subfleet.settings.samples\n"
        "from subfleet.device_profiles import load_profile\n"
        "import subfleet.edge_client.cli\n"
        "print(load_profile('laptop').name)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("laptop\n", "")


def test_a_family_that_cannot_be_says_so_beside_other_problems() -> None:
    wrong = to_plain(Mlp(input_shape=(8,), class_count=2, widths=(8,), depths=(1,))) | {
        "class_count": 0,
        "depths": [0],
        "x": 1,
    }
    assert sorted(problems_with(Mlp, wrong, "model")) == [
        "model.x is an unknown key; known are " + str(sorted(field.name for field in fields(Mlp))),
        "model: class_count is 0, but must be 1 or more",
        "model: depths are (0,), but every section needs 1 block or more",
    ]

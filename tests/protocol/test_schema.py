"""Plain data are read by annotations; every wrong value and every violated rule is reported."""

import copy
import math
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields, replace
from importlib.metadata import EntryPoint
from types import ModuleType
from typing import Annotated, Any, ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from matrices import examples

from subfleet.elastic.families.records.residual import Mlp
from subfleet.protocol.bounds import NAMED_ONCE, Condition, Each, Length, Range, Texts, checked
from subfleet.protocol.errors import ConfigError, InvalidError, Problem, ProtocolError
from subfleet.protocol.registry import Registry
from subfleet.protocol.schema import from_plain, read_plain, to_plain, validate
from subfleet.settings.reading import list_included_runs, read_run, read_runs
from subfleet.settings.run import Run


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    """A record of a plug-in, which checks itself."""

    TYPE: ClassVar[str] = "square"
    side: int

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ConfigError(f"side is {self.side}, but must be 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
@checked()
class Circle:
    TYPE: ClassVar[str] = "circle"
    radius: float = 1.0


def shapes() -> Registry[type[Square]]:
    return Registry(
        "test.shapes", "shape", find=lambda group: [EntryPoint("square", "shapes_of_settings:Square", "test.shapes")]
    )


def check_order(least: int, most: int) -> Iterator[str]:
    if most < least:
        yield f"most is {most}, but must be {least} or more"


def check_frame(frame: Square | Circle | None, filled: bool) -> Iterator[str]:
    if isinstance(frame, Circle) and not filled:
        yield "filled is False, but circles are filled"


def check_whole(record: "Drawing") -> Iterator[str]:
    if record.title == "nothing":
        yield "title is 'nothing', but must say what there is"


@dataclass(frozen=True, slots=True, kw_only=True)
@checked(check_order, check_frame, check_whole)
class Drawing:
    shape: Annotated[Any, shapes()] | None = None
    frame: Square | Circle | None = None
    colour: Literal["red", "green"] = "red"
    points: tuple[tuple[int, float], ...] = ()
    names: dict[str, int] | None = None
    title: str = ""
    filled: bool = False
    least: Annotated[int, Range(least=0)] = 0
    most: int = 9
    shares: tuple[Annotated[float, Range(above=0, most=1)], ...] = ()
    sizes: Mapping[Annotated[str, Length(least=1)], Annotated[float, Range(least=0)]] | None = None
    opacity: Annotated[float, Range(least=0, below=1)] | None = None
    tags: Annotated[tuple[str, ...], Length(most=3), Texts(most=5, printable=True), Each()] = ()
    levels: tuple[Annotated[int, Range(least=1, most=9)], ...] = ()
    layers: Annotated[tuple[tuple[str, int], ...], NAMED_ONCE] = ()
    code: Annotated[str, Condition(accepts=str.isdecimal, words="digits")] = "0"


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    module_of_shapes = ModuleType("shapes_of_settings")
    vars(module_of_shapes).update(Square=Square)
    monkeypatch.setitem(sys.modules, "shapes_of_settings", module_of_shapes)


WHOLE: dict[str, Any] = {
    "shape": {"type": "square", "side": 3},
    "frame": {"type": "circle", "radius": 2},
    "colour": "green",
    "points": [[1, 2], [3, 4.5]],
    "names": {"a": 1},
    "title": "x",
    "filled": True,
}


def test_a_record_is_built_from_plain_data() -> None:
    assert validate(Drawing, WHOLE, "a file") == Drawing(
        shape=Square(side=3),
        frame=Circle(radius=2.0),
        colour="green",
        points=((1, 2.0), (3, 4.5)),
        names={"a": 1},
        title="x",
        filled=True,
    )
    assert validate(Drawing, {"shape": None}, "a file") == from_plain(Drawing, {}) == Drawing()


@pytest.mark.parametrize(
    ("change", "words"),
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
        ({"points": [[1, 2.0], [3]]}, "points[1] is [3], but must be a list of 2"),
        ({"points": [[1, 2.0, 3]]}, "points[0] is [1, 2.0, 3], but must be a list of 2"),
        ({"points": [[1, 2.0], ["3", 4.0]]}, "points[1][0] is '3', but must be a whole number"),
        ({"points": 3}, "points is 3, but must be a list"),
        ({"names": {"a": 1.5}}, "names.a is 1.5, but must be a whole number"),
        ({"names": [1]}, "names is [1], but must be a table"),
        ({"title": 3}, "title is 3, but must be text"),
        ({"title": "a\0b"}, "title is 'a\\x00b', but must be text without NUL"),
        ({"title": "x" * 4097}, "title has 4097 characters, but must have at most 4096"),
        ({"filled": 1}, "filled is 1, but must be true or false"),
        ({"least": True}, "least is True, but must be a whole number"),
        (
            {"frame": {"type": "circle", "radius": 2**63}},
            "frame.radius is 9223372036854775808, but must be a finite number",
        ),
        ({"least": 2**63}, "least is 9223372036854775808, but must be a whole number"),
        ({"leest": 3}, "leest is an unknown key; did you mean 'least'?"),
        ({"zzzzz": 3}, "zzzzz is an unknown key; known are ['code', 'colour', "),
        ({"frame": {"type": "circle", "tape": 1}}, "frame.tape is an unknown key; known are ['radius']"),
        ({"colour": 1}, "colour is 1, but must be one of ['red', 'green']"),
        ({"names": {"a\0": 1}}, "names has the key 'a\\x00', which is"),
        ({"least": -1}, "least is -1, but must be 0 or more"),
        ({"most": -1}, "a file: most is -1, but must be 0 or more"),
        ({"title": "nothing"}, "a file: title is 'nothing', but must say what there is"),
        ({"shares": [0.5, 0]}, "shares[1] is 0.0, but must be above 0 and at most 1"),
        ({"shares": [0.5, 1.5]}, "shares[1] is 1.5, but must be above 0 and at most 1"),
        ({"sizes": {"a": -1}}, "sizes.a is -1.0, but must be 0 or more"),
        ({"sizes": {"": 1}}, "sizes has the key '', which is empty, but must have 1 or more"),
        ({"opacity": 1}, "opacity is 1.0, but must be at least 0 and below 1"),
        ({"tags": ["a", "b", "c", "d"]}, "tags has 4 items, but must have at most 3"),
        ({"tags": ["abcdef"]}, "tags has a text of 6 characters, but must have at most 5"),
        ({"tags": ["a\n"]}, "but must be made of printable characters"),
        ({"tags": ["a", "a"]}, "tags names 'a' more than once, but names must be unique"),
        ({"levels": [1, 10, 2]}, "levels[1] is 10, but must be from 1 to 9"),
        ({"levels": [5, 0]}, "levels[1] is 0, but must be from 1 to 9"),
        ({"layers": [["a", 1], ["a", 2]]}, "layers names 'a' more than once"),
        ({"code": "x"}, "code is 'x', but must be digits"),
    ],
)
def test_one_problem_is_one_sentence_with_its_keys(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        validate(Drawing, {**WHOLE, **change}, "a file")
    assert str(caught.value).startswith("a file: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


def problems_with(kind: type, plain: Any) -> tuple[Problem, ...]:
    try:
        read_plain(kind, plain)
    except InvalidError as error:
        return error.problems
    return ()


def test_all_problems_of_values_and_records_are_reported_at_once() -> None:
    wrong = {
        **WHOLE,
        "shape": {"type": "square", "sid": 3},
        "points": [[1, "2"], ["3", 4.0]],
        "least": -1,
        "title": 3,
        "filled": False,
        "shares": [2.0],
    }
    assert sorted(problem.sentence("drawing") for problem in problems_with(Drawing, wrong)) == [
        "drawing.least is -1, but must be 0 or more",
        "drawing.points[0][1] is '2', but must be a finite number",
        "drawing.points[1][0] is '3', but must be a whole number",
        "drawing.shape.sid is an unknown key; did you mean 'side'?",
        "drawing.shape.side is missing",
        "drawing.shares[0] is 2.0, but must be above 0 and at most 1",
        "drawing.title is 3, but must be text",
        "drawing: filled is False, but circles are filled",
    ]


def test_a_rule_is_checked_if_its_fields_are_valid() -> None:
    assert [problem.sentence() for problem in problems_with(Drawing, {"least": 5, "most": 3, "title": 1})] == [
        "title is 1, but must be text",
        "most is 3, but must be 5 or more",
    ]
    assert [problem.sentence() for problem in problems_with(Drawing, {"least": -5, "most": -7})] == [
        "least is -5, but must be 0 or more"
    ]
    assert [problem.sentence() for problem in problems_with(Drawing, {"title": "nothing", "least": -5})] == [
        "least is -5, but must be 0 or more"
    ]


def test_a_rule_uses_the_defaults_of_missing_fields() -> None:
    assert [problem.sentence() for problem in problems_with(Drawing, {"least": 20, "title": 1})] == [
        "title is 1, but must be text",
        "most is 9, but must be 20 or more",
    ]


def test_a_dataclass_is_checked_from_below() -> None:
    with pytest.raises(TypeError, match="write @checked below @dataclass"):
        checked()(Circle)


def test_a_record_that_is_made_in_python_is_checked_alike() -> None:
    with pytest.raises(InvalidError) as caught:
        Drawing(least=5, most=3, opacity=math.nan, colour="blue", frame=Circle())  # type: ignore[arg-type]  # wrong on purpose
    assert sorted(problem.sentence() for problem in caught.value.problems) == [
        "colour is 'blue', but must be one of ['red', 'green']",
        "filled is False, but circles are filled",
        "most is 3, but must be 5 or more",
        "opacity is nan, but must be a finite number, at least 0 and below 1",
    ]
    with pytest.raises(ConfigError, match="radius is inf, but must be a finite number"):
        Circle(radius=math.inf)
    with pytest.raises(ValueError, match="must say what there is"):
        replace(Drawing(), title="nothing")


def test_earlier_problems_are_reported_with_the_others() -> None:
    refused = InvalidError([Problem(text="is no shape"), Problem(text="is late", keys=("at", 0))])
    assert [problem.sentence() for problem in problems_with(Drawing, {"frame": refused, "most": "1"})] == [
        "frame is no shape",
        "frame.at[0] is late",
        "most is '1', but must be a whole number",
    ]


def test_at_most_a_hundred_problems_are_reported() -> None:
    assert len(problems_with(Drawing, {"points": [0] * 100_000})) == 100
    assert len(problems_with(Drawing, {"shares": [2.0] * 100_000})) == 100
    with pytest.raises(ProtocolError, match=r"^Drawing\.points\[0\] is 0, but must be a list of 2$"):
        from_plain(Drawing, {"points": [0] * 100_000})


@pytest.mark.slow
@pytest.mark.parametrize("name", list_included_runs())
def test_every_shipped_run_is_read_like_its_json(name: str) -> None:
    first, *_, last = [*read_runs(name), *read_runs(name)]  # a sweep has many
    for run in (first, last):
        assert validate(Run, to_plain(run), name) == from_plain(Run, to_plain(run)) == run


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


def paths(plain: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every value, as a tuple of keys."""
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from paths(value, (*path, key))


@pytest.mark.slow
@examples(60)
@given(
    changes=st.lists(
        st.tuples(
            st.sampled_from(list(paths(QUICKSTART))), st.sampled_from(["set", "drop", "add"]), st.sampled_from(JUNK)
        ),
        min_size=1,
        max_size=3,
    )
)
def test_invalid_settings_are_reported_and_valid_ones_survive_a_round_trip(changes: list[Any]) -> None:
    plain = copy.deepcopy(QUICKSTART)
    for path, action, junk in changes:
        node = plain
        try:
            for key in path[:-1]:
                node = node[key]
            if action == "drop":
                del node[path[-1]]
            else:
                node["another" if action == "add" and isinstance(node, dict) else path[-1]] = junk
        except (KeyError, IndexError, TypeError):
            continue  # an earlier change has removed it
    if problems := problems_with(Run, plain):
        assert all(problem.sentence() for problem in problems)
        with pytest.raises(ConfigError):
            validate(Run, plain, "a file")
        with pytest.raises(ProtocolError):
            from_plain(Run, plain)
    else:
        run = validate(Run, plain, "a file")
        assert from_plain(Run, to_plain(run)) == run


def test_an_impossible_family_is_reported_with_other_problems() -> None:
    wrong = to_plain(Mlp(input_shape=(8,), class_count=2, widths=(8,), depths=(1,))) | {
        "class_count": 0,
        "depths": [0],
        "x": 1,
    }
    assert sorted(problem.sentence("model") for problem in problems_with(Mlp, wrong)) == [
        "model.class_count is 0, but must be 1 or more",
        "model.depths[0] is 0, but must be 1 or more",
        "model.x is an unknown key; known are " + str(sorted(field.name for field in fields(Mlp))),
    ]

"""Entry points are found by name and loaded on demand; broken ones affect no others."""

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, ClassVar, Protocol

import pytest

from subfleet.protocol.errors import ConfigError, ProtocolError
from subfleet.protocol.registry import Registry, problem_with_record
from subfleet.protocol.schema import find_registry, from_plain, to_plain

GROUP = "test.shapes"


class Shape(Protocol):
    TYPE: ClassVar[str]

    def area(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Square:
    TYPE: ClassVar[str] = "square"
    side: int

    def area(self) -> int:
        return self.side**2


@dataclass(frozen=True, slots=True, kw_only=True)
class Box:
    TAG: ClassVar[str] = "kind"
    TYPE: ClassVar[str] = "box"
    width: int = 1


@dataclass
class Loose:
    TYPE: ClassVar[str] = "loose"


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> None:
    module_of_shapes = ModuleType("shapes_of_a_test")
    vars(module_of_shapes).update(Square=Square, Box=Box, Loose=Loose, number=3)
    monkeypatch.setitem(sys.modules, "shapes_of_a_test", module_of_shapes)


def registry(*pairs: tuple[str, str], **settings: Any) -> Registry[type[Shape]]:
    def find(group: str) -> Iterable[EntryPoint]:
        assert group == GROUP
        return [EntryPoint(name=name, value=f"shapes_of_a_test:{value}", group=GROUP) for name, value in pairs]

    def check(record: object, name: str) -> str:
        return problem_with_record(record, name, ("area",))

    return Registry(GROUP, "shape", **{"find": find, "check": check, **settings})


SOUND = ("square", "Square")


def test_names_are_sorted_and_nothing_is_imported_for_them() -> None:
    shapes = registry(("zebra", "Missing"), SOUND)
    assert shapes.names == ("square", "zebra")
    assert dict(shapes) == {"square": Square}
    assert "zebra" not in shapes
    assert shapes.load("square") is Square


def test_values_are_read_from_entry_points() -> None:
    numbers: Registry[Any] = registry(
        ("number", "number"), ("square", "Square"), read=lambda number: number + 1, check=_check_even
    )
    assert dict(numbers) == {"number": 4}
    assert "TypeError" in numbers.broken["square"]


def _check_even(number: int, name: str) -> str:
    return "it is odd" if number % 2 else ""


@pytest.mark.parametrize(
    ("name", "value", "reason"),
    [
        ("missing", "Missing", "AttributeError"),
        ("number", "number", "it must be a dataclass"),
        ("loose", "Loose", "it must be a frozen dataclass"),
        ("circle", "Square", "its TYPE is 'square', but must be 'circle'"),
        ("box", "Box", "it lacks 'area'"),
    ],
)
def test_a_broken_entry_point_is_reported_only_when_it_is_named(name: str, value: str, reason: str) -> None:
    shapes = registry((name, value), SOUND)
    assert list(shapes) == ["square"]
    assert list(shapes.broken) == [name]
    with pytest.raises(ConfigError) as caught:
        shapes.load(name)
    message = str(caught.value)
    assert message == shapes.broken[name]
    assert f"shape {name!r}, which is shapes_of_a_test:{value} of no package, cannot be loaded: {reason}" in message
    assert message.endswith("fix or uninstall that package")


def test_a_name_that_is_registered_twice_is_not_available() -> None:
    shapes = registry(("square", "Box"), SOUND, ("other", "Square"))
    assert "square" not in shapes
    with pytest.raises(
        ConfigError, match=r"'square' is registered as .*:Box .* and .*:Square .*; uninstall all but one"
    ):
        shapes.load("square")
    assert dict(registry(SOUND, SOUND)) == {"square": Square}  # one package, found in two folders


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(ConfigError, match=r"no shape 'sqare'; choose one of \['square'\]; did you mean 'square'\?"):
        registry(SOUND).load("sqare")


def test_an_open_union_is_read_by_its_tag(tmp_path: Path) -> None:
    open_union: Any = Annotated[Shape, registry(SOUND, ("broken", "Missing"))]
    assert from_plain(open_union, {"type": "square", "side": 3}) == Square(side=3)
    assert from_plain(open_union, to_plain(Square(side=3))) == Square(side=3)
    for plain, words in (
        ({"side": 3}, r"it has no type, but must be one of \['broken', 'square'\]"),
        ({"type": "sqare"}, r"it has the type 'sqare', but must be one of"),
        ({"type": ["square"]}, "must be one of"),
        ({"type": "square", "edge": 3}, "edge is an unknown key"),
        ({"type": "broken"}, "'broken', which is shapes_of_a_test:Missing"),
        ([], "must be a table"),
    ):
        with pytest.raises(ProtocolError, match=words):
            from_plain(open_union, plain, "it")


def test_the_tag_is_that_of_the_registry() -> None:
    boxes: Any = Annotated[object, registry(("box", "Box"), tag="kind", check=lambda *_: "")]
    assert to_plain(Box(width=2)) == {"kind": "box", "width": 2}
    assert from_plain(boxes, {"kind": "box", "width": 2}) == Box(width=2)
    assert find_registry(boxes) is not None

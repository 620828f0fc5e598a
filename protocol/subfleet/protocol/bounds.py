"""Bounds of a record's values, in its annotations; the record checks itself when it is made.

    @dataclass(frozen=True, slots=True, kw_only=True)
    @checked(check_nesterov)
    class Optimiser:
        name: Literal["sgd", "adam"] = "sgd"
        momentum: Annotated[float, Range(least=0, below=1)] = 0.9
        nesterov: bool = False

Checked are bounds, choices (`Literal`), and that floats are finite, also inside tuples and mappings; types are left to
type checkers, and to `subfleet.protocol.schema` where a record is read. What concerns several fields is a rule: a
function that yields a sentence for everything that is wrong. Its parameters are named like the fields that it is about,
and it is called where these are right by themselves, whatever is wrong with others. A rule about the whole record has
one parameter, `record`, and is called where everything else is right.
"""

import dataclasses
import inspect
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import islice
from operator import itemgetter
from typing import Any, Protocol, TypeVar

from subfleet.protocol.errors import InvalidError, Problem, SubfleetError
from subfleet.protocol.suggestion import suggest

__all__ = [
    "MOST_PROBLEMS",
    "NAMED_ONCE",
    "Bound",
    "Condition",
    "Each",
    "Length",
    "Range",
    "Rule",
    "Rules",
    "Texts",
    "checked",
    "choice_problem",
    "is_union",
    "problems_with_values",
]

T = TypeVar("T")

Rule = Callable[..., Iterable[str]]
Rules = tuple[Rule, ...]
"""Rules of a record: what concerns several of its fields."""
_WHOLE = ("record",)
"""Parameters of a rule about the whole record."""
MOST_PROBLEMS = 100
"""Nothing more is looked for after so many."""


class Bound(Protocol):
    """A requirement for a value, as part of an annotation, `Annotated[type, bound]`."""

    def problem(self, value: Any) -> str:
        """Describe a problem, to follow the name of the value, such as "is 0, but must be 1 or more"; or ""."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A finite number within bounds.

    Attributes:
        least: the smallest number that is right.
        most: the largest one.
        above: all that are right are larger.
        below: all that are right are smaller.
        words: what the number must be, where the bounds alone do not say it.
    """

    least: float = -math.inf
    most: float = math.inf
    above: float = -math.inf
    below: float = math.inf
    words: str = ""

    def problem(self, value: float) -> str:
        """See `Bound`."""
        if self.least <= value <= self.most and self.above < value < self.below:
            return ""
        words = self.words or " and ".join(self._describe())
        finite = "" if -math.inf < value < math.inf else "a finite number, "
        return f"is {value!r:.80}, but must be {finite}{words}"

    def _describe(self) -> Iterator[str]:
        if math.isfinite(self.least) and math.isfinite(self.most):
            yield f"from {_number(self.least)} to {_number(self.most)}"
            return
        if math.isfinite(self.least):
            yield f"at least {_number(self.least)}" if math.isfinite(self.below) else f"{_number(self.least)} or more"
        if math.isfinite(self.above):
            yield f"above {_number(self.above)}"
        if math.isfinite(self.most):
            yield f"at most {_number(self.most)}"
        if math.isfinite(self.below):
            yield f"below {_number(self.below)}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Length:
    """The length of a text, tuple or mapping."""

    least: int = 0
    most: int | None = None

    def problem(self, value: Any) -> str:
        """See `Bound`."""
        count = len(value)
        if self.least <= count and (self.most is None or count <= self.most):
            return ""
        what = "characters" if isinstance(value, str) else "items"
        if self.most is not None and count > self.most:
            return f"has {count} {what}, but may have {self.most} at most"
        return f"{f'has {count} {what}' if count else 'is empty'}, but must have {self.least} or more"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A requirement for the texts in a tuple or a mapping.

    Attributes:
        most: characters of each.
        printable: they are shown in terminals, where control characters act.
    """

    most: int
    printable: bool = False

    def problem(self, value: Any) -> str:
        """See `Bound`."""
        texts = (*value, *value.values()) if isinstance(value, Mapping) else value
        longest = max(map(len, texts), default=0)
        if longest > self.most:
            return f"has a text of {longest} characters, but may have {self.most} at most"
        if self.printable and not all(map(str.isprintable, texts)):
            return f"is {value!r:.200}, but must be made of printable characters"
        return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Any other requirement: `accepts` tests a value, `words` describe what it must be."""

    accepts: Callable[[Any], bool]
    words: str

    def problem(self, value: Any) -> str:
        """See `Bound`."""
        return "" if self.accepts(value) else f"is {value!r:.200}, but must be {self.words}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Each:
    """Items that must differ, by `key` if it is given."""

    key: Callable[[Any], Any] | None = None

    def problem(self, value: Any) -> str:
        """See `Bound`."""
        names = list(value if self.key is None else map(self.key, value))
        if len(set(names)) == len(names):
            return ""
        repeated = next(name for name, count in Counter(names).items() if count > 1)
        return f"names {repeated!r:.80} more than once, but must name each once"


NAMED_ONCE = Each(key=itemgetter(0))
"""Of pairs: no two begin with the same name."""


def checked(*rules: Rule) -> Callable[[type[T]], type[T]]:
    """A decorator, below that of the dataclass: records check themselves when they are made.

    They then raise `InvalidError` where values are out of their bounds, or break a rule; it names all of them.

    Args:
        rules: of the record, beside the bounds in its annotations.
    """

    def decorate(kind: type[T]) -> type[T]:
        if dataclasses.is_dataclass(kind):
            raise TypeError(f"{kind.__name__} is a dataclass already; write @checked below @dataclass")
        kind.__post_init__ = _check  # type: ignore[attr-defined]  # which dataclass looks for
        kind.__rules__ = rules  # type: ignore[attr-defined]  # which `_collect_checks` looks for
        return kind

    return decorate


def _check(record: object) -> None:
    kind: Any = type(record)
    checks = _collect_checks(kind)
    problems = _find_problems(checks, {field: getattr(record, field) for field in checks.fields})
    for rule in () if problems else checks.last_rules:
        problems += _apply_rule(rule, [record])
    if problems:
        raise InvalidError(problems)


def problems_with_values(kind: type, values: Mapping[str, Any]) -> list[Problem]:
    """Find the problems of some fields of a record, each of the right type; the others are unknown."""
    return _find_problems(_collect_checks(kind), values)


def choice_problem(members: Sequence[Any], value: Any) -> str:
    """Explain why a value is not one of some choices, with a suggestion; "" if it is one."""
    if any(value == member and type(value) is type(member) for member in members):
        return ""
    names = [member for member in members if isinstance(member, str)]
    meant = suggest(value, names) if isinstance(value, str) else ""
    return f"is {value!r:.80}, but must be one of {list(members)}{meant}"


def is_union(kind: Any) -> bool:
    """Whether an annotation is a closed union."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


_Found = str | list[Problem]
"""What is wrong with a value: a clause, or what is wrong inside it; empty where nothing is."""
_Test = Callable[[Any], _Found]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """Collect the checks of a kind of record: fields by name, rules by their fields, and the whole."""

    fields: tuple[str, ...]
    tests: tuple[tuple[str, _Test], ...]
    rules: tuple[tuple[Rule, tuple[str, ...]], ...]
    last_rules: tuple[Rule, ...]


@cache
def _collect_checks(kind: Any) -> _Checks:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = tuple(field.name for field in dataclasses.fields(kind))
    tests = ((name, _make_test(hints[name])) for name in fields)
    rules: Rules = getattr(kind, "__rules__", ())
    named = [(rule, tuple(inspect.signature(rule).parameters)) for rule in rules]
    return _Checks(
        fields=fields,
        tests=tuple((name, test) for name, test in tests if test is not None),
        rules=tuple((rule, names) for rule, names in named if names != _WHOLE),
        last_rules=tuple(rule for rule, names in named if names == _WHOLE),
    )


def _find_problems(checks: _Checks, values: Mapping[str, Any]) -> list[Problem]:
    """Find the problems of fields, and of rules whose fields are all right."""
    problems: list[Problem] = []
    wrong = []
    for name, test in checks.tests:
        value = values.get(name)
        if value is not None and (found := test(value)):
            problems += _prefix(name, found)
            wrong.append(name)
    for rule, names in checks.rules:
        if (values.keys() - wrong).issuperset(names):
            problems += _apply_rule(rule, [values[name] for name in names])
    return problems


def _apply_rule(rule: Rule, values: Sequence[Any]) -> list[Problem]:
    try:
        return [Problem(text=text, is_sentence=True) for text in rule(*values)]
    except (ValueError, OverflowError, SubfleetError) as error:  # of what a rule calls
        return [Problem(text=str(error), is_sentence=True)]


def _prefix(key: str | int, found: _Found) -> list[Problem]:
    problems = [Problem(text=found)] if isinstance(found, str) else found
    return [problem.under(key) for problem in problems]


def _make_test(kind: Any) -> _Test | None:
    """Make the test of an annotation; None if every value of the right type is right."""
    compose = _TESTS.get(typing.get_origin(kind))
    if compose is not None:
        return compose(kind)
    return _finite if kind is float else None


def _make_bounded_test(kind: Any) -> _Test | None:
    bounds = [bound for bound in kind.__metadata__ if hasattr(bound, "problem")]
    tests: list[_Test | None] = [_make_range_test(one) if isinstance(one, Range) else one.problem for one in bounds]
    if not any(isinstance(bound, Range) for bound in bounds):  # which says by itself what is not finite
        tests.append(_make_test(kind.__origin__))
    asked = tuple(test for test in tests if test is not None)
    return partial(_test_all, asked) if len(asked) > 1 else next(iter(asked), None)


def _make_range_test(bound: Range) -> _Test:
    """The same as `Range.problem`, faster: records are made by thousands."""
    least, most, above, below = bound.least, bound.most, bound.above, bound.below

    def test(value: float) -> str:
        return "" if least <= value <= most and above < value < below else bound.problem(value)

    return test


def _make_union_test(kind: Any) -> _Test | None:
    members = [member for member in typing.get_args(kind) if member is not type(None)]
    test = _make_test(members[0]) if len(members) == 1 else None
    return None if test is None else partial(_test_optional, test)


def _make_tuple_test(kind: Any) -> _Test | None:
    members = typing.get_args(kind)
    tests = tuple(map(_make_test, members[:1] if ... in members else members))
    if ... not in members:
        return partial(_test_places, tests) if any(tests) else None
    if tests[0] is None:
        return None
    if typing.get_origin(members[0]) is typing.Annotated and members[0].__origin__ is int:
        return partial(_test_numbers, tests[0])
    return partial(_test_items, tests[0])


def _make_mapping_test(kind: Any) -> _Test | None:
    key, item = map(_make_test, typing.get_args(kind))
    return partial(_test_mapping, key, item) if key or item else None


_TESTS: Mapping[Any, Callable[[Any], _Test | None]] = types.MappingProxyType(
    {
        typing.Annotated: _make_bounded_test,
        typing.Union: _make_union_test,
        types.UnionType: _make_union_test,
        typing.Literal: lambda kind: partial(choice_problem, typing.get_args(kind)),
        tuple: _make_tuple_test,
        dict: _make_mapping_test,
        Mapping: _make_mapping_test,
    }
)
"""By what an annotation is made with."""


def _test_all(tests: tuple[_Test, ...], value: Any) -> _Found:
    for test in tests:
        if found := test(value):
            return found
    return ""


def _test_optional(test: _Test, value: Any) -> _Found:
    return "" if value is None else test(value)


def _test_numbers(test: _Test, value: Any) -> _Found:
    """Test whole numbers by the smallest and the largest one."""
    return _test_items(test, value) if value and (test(min(value)) or test(max(value))) else ""


def _test_items(test: _Test, value: Any) -> list[Problem]:
    return _name_problem((place, test(item)) for place, item in enumerate(value))


def _test_places(tests: tuple[_Test | None, ...], value: Any) -> list[Problem]:
    pairs = enumerate(zip(tests, value, strict=True))
    return _name_problem((place, test(item)) for place, (test, item) in pairs if test is not None)


def _test_mapping(key_test: _Test | None, item_test: _Test | None, value: Any) -> list[Problem]:
    texts = (f"has the key {key!r:.80}, which {text}" for key in value if key_test and (text := key_test(key)))
    problems = [Problem(text=text) for text in islice(texts, MOST_PROBLEMS)]
    return problems + (
        [] if item_test is None else _name_problem((key, item_test(item)) for key, item in value.items())
    )


def _name_problem(found: Iterable[tuple[str | int, _Found]]) -> list[Problem]:
    """Find the problems inside a value, by their keys."""
    return list(islice((one for key, problems in found if problems for one in _prefix(key, problems)), MOST_PROBLEMS))


def _finite(value: float) -> str:
    return "" if -math.inf < value < math.inf else f"is {value!r:.80}, but must be a finite number"


def _number(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)

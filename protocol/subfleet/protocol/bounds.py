"""Bounds of a record's values as annotations, which the record checks when it is made.

    @dataclass(frozen=True, slots=True, kw_only=True)
    @checked(check_nesterov)
    class Optimiser:
        name: Literal["sgd", "adam"] = "sgd"
        momentum: Annotated[float, Range(least=0, below=1)] = 0.9
        nesterov: bool = False

A record checks bounds, choices (`Literal`) and that floats are finite, also inside tuples and mappings. Types are left
to type checkers, and to `subfleet.protocol.schema` when a record is read. A rule checks several fields: a function that
yields a sentence for each problem. Its parameters have the names of the fields, and it is called if these are valid. A
rule about the whole record has one parameter, `record`, and is called if everything else is valid.
"""

import dataclasses
import inspect
import math
import types
import typing
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import chain, islice
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
    "find_problems",
    "is_union",
]

T = TypeVar("T")

Rule = Callable[..., Iterable[str]]
Rules = tuple[Rule, ...]
"""Rules of a record about several of its fields."""
_WHOLE = ("record",)
"""The parameters of a rule about the whole record."""
MOST_PROBLEMS = 100
"""The search for problems stops at this number."""


class Bound(Protocol):
    """A requirement for a value, as metadata of an annotation: `Annotated[type, bound]`."""

    def problem(self, value: Any) -> str:
        """Describe the problem as a clause after the value's name, such as "is 0, but must be 1 or more", or ""."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """A finite number within bounds.

    Attributes:
        least: inclusive lower bound.
        most: inclusive upper bound.
        above: exclusive lower bound.
        below: exclusive upper bound.
        words: description of the bounds for messages; generated if empty.
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
            yield f"from {_format(self.least)} to {_format(self.most)}"
            return
        if math.isfinite(self.least):
            yield (f"at least {_format(self.least)}" if math.isfinite(self.below) else f"{_format(self.least)} or more")
        if math.isfinite(self.above):
            yield f"above {_format(self.above)}"
        if math.isfinite(self.most):
            yield f"at most {_format(self.most)}"
        if math.isfinite(self.below):
            yield f"below {_format(self.below)}"


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
            return f"has {count} {what}, but must have at most {self.most}"
        return f"{f'has {count} {what}' if count else 'is empty'}, but must have {self.least} or more"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """A requirement for the texts in a tuple or a mapping.

    Attributes:
        most: maximum length of each, in characters.
        printable: whether they must be printable, because terminals show them.
    """

    most: int
    printable: bool = False

    def problem(self, value: Any) -> str:
        """See `Bound`."""
        texts = (*value, *value.values()) if isinstance(value, Mapping) else value
        longest = max(map(len, texts), default=0)
        if longest > self.most:
            return f"has a text of {longest} characters, but must have at most {self.most}"
        if self.printable and not all(map(str.isprintable, texts)):
            return f"is {value!r:.200}, but must be made of printable characters"
        return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """Any other requirement: `accepts` tests a value, and `words` describe valid ones."""

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
        return f"names {repeated!r:.80} more than once, but names must be unique"


NAMED_ONCE = Each(key=itemgetter(0))
"""Pairs must differ in their first items."""


def checked(*rules: Rule) -> Callable[[type[T]], type[T]]:
    """Make records check themselves when they are created; the decorator stands below that of the dataclass.

    A record with values out of bounds, or that break a rule, raises `InvalidError` with all problems.

    Args:
        rules: rules in addition to the bounds in annotations.
    """

    def decorate(kind: type[T]) -> type[T]:
        if dataclasses.is_dataclass(kind):
            raise TypeError(f"{kind.__name__} is a dataclass already; write @checked below @dataclass")
        kind.__post_init__ = _check  # type: ignore[attr-defined]  # read by dataclass
        kind.__rules__ = rules  # type: ignore[attr-defined]  # read by `_collect_checks`
        return kind

    return decorate


def _check(record: object) -> None:
    kind: Any = type(record)
    values = {field: getattr(record, field) for field in _collect_checks(kind).fields}
    values["record"] = record
    if problems := find_problems(kind, values):
        raise InvalidError(problems)


def find_problems(kind: Any, values: Mapping[str, Any]) -> list[Problem]:
    """Find the problems of some of a record's fields, which have the right types.

    A rule is applied if it is about valid fields only, and one about the whole `record` if nothing else is wrong.
    """
    checks = _collect_checks(kind)
    problems: list[Problem] = []
    wrong = []
    for name, test in checks.tests:
        value = values.get(name)
        if value is not None and (verdict := test(value)):
            problems += _prefix(name, verdict)
            wrong.append(name)
    right = values.keys() - wrong if wrong else values.keys()
    for rule, names in checks.rules:
        if right >= set(names) and not (problems and names == _WHOLE):
            problems += _apply_rule(rule, [values[name] for name in names])
    return problems


def choice_problem(members: Sequence[Any], value: Any) -> str:
    """Explain why a value is not one of the choices, with a suggestion; "" if it is one."""
    if any(value == member and type(value) is type(member) for member in members):
        return ""
    names = [member for member in members if isinstance(member, str)]
    suggestion = suggest(value, names) if isinstance(value, str) else ""
    return f"is {value!r:.80}, but must be one of {list(members)}{suggestion}"


def is_union(kind: Any) -> bool:
    """Whether an annotation is a closed union."""
    return typing.get_origin(kind) in (typing.Union, types.UnionType)


_Verdict = str | list[Problem]
"""The problem of a value as a clause, or the problems inside it; empty if it is valid."""
_Test = Callable[[Any], _Verdict]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Checks:
    """The checks of a kind of record: of fields, then of several fields, and last of the whole record.

    Attributes:
        fields: names of the fields that are checked by themselves or by a rule.
    """

    fields: tuple[str, ...]
    tests: tuple[tuple[str, _Test], ...]
    rules: tuple[tuple[Rule, tuple[str, ...]], ...]


@cache
def _collect_checks(kind: Any) -> _Checks:
    hints = typing.get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    tests = tuple((name, test) for name in names if (test := _make_test(hints[name])) is not None)
    rules: Rules = getattr(kind, "__rules__", ())
    named = [(rule, tuple(inspect.signature(rule).parameters)) for rule in rules]
    checked_names = {*(name for name, _ in tests), *chain.from_iterable(parameters for _, parameters in named)}
    return _Checks(
        fields=tuple(name for name in names if name in checked_names),
        tests=tests,
        rules=tuple(sorted(named, key=lambda pair: pair[1] == _WHOLE)),
    )


def _apply_rule(rule: Rule, values: Sequence[Any]) -> list[Problem]:
    try:
        return [Problem(text=text, is_sentence=True) for text in rule(*values)]
    except (ValueError, OverflowError, SubfleetError) as error:  # raised by functions that the rule calls
        return [Problem(text=str(error), is_sentence=True)]


def _prefix(key: str | int, verdict: _Verdict) -> list[Problem]:
    problems = [Problem(text=verdict)] if isinstance(verdict, str) else verdict
    return [problem.prefix(key) for problem in problems]


def _make_test(kind: Any) -> _Test | None:
    """Make the test of an annotation; None if all values of its type are valid."""
    compose = _TESTS.get(typing.get_origin(kind))
    if compose is not None:
        return compose(kind)
    return _finite if kind is float else None


def _make_bounded_test(kind: Any) -> _Test | None:
    bounds = [bound for bound in kind.__metadata__ if hasattr(bound, "problem")]
    tests = [_make_range_test(bound) if isinstance(bound, Range) else bound.problem for bound in bounds]
    if not any(isinstance(bound, Range) for bound in bounds):  # a range refuses infinite values itself
        tests += filter(None, [_make_test(kind.__origin__)])
    return partial(_test_all, tuple(tests)) if len(tests) > 1 else next(iter(tests), None)


def _make_range_test(bound: Range) -> _Test:
    """Make a faster `Range.problem`: records are made by the thousand."""
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
        return partial(_test_tuple, tests) if any(tests) else None
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
"""Makers of tests, by the origin of the annotation."""


def _test_all(tests: tuple[_Test, ...], value: Any) -> _Verdict:
    return next((verdict for test in tests if (verdict := test(value))), "")


def _test_optional(test: _Test, value: Any) -> _Verdict:
    return "" if value is None else test(value)


def _test_numbers(test: _Test, value: Any) -> _Verdict:
    """Test integers by the smallest and the largest."""
    return _test_items(test, value) if value and (test(min(value)) or test(max(value))) else ""


def _test_items(test: _Test, value: Any) -> list[Problem]:
    return _collect_problems((index, test(item)) for index, item in enumerate(value))


def _test_tuple(tests: tuple[_Test | None, ...], value: Any) -> list[Problem]:
    pairs = enumerate(zip(tests, value, strict=True))
    return _collect_problems((index, test(item)) for index, (test, item) in pairs if test is not None)


def _test_mapping(key_test: _Test | None, item_test: _Test | None, value: Any) -> list[Problem]:
    texts = (f"has the key {key!r:.80}, which {text}" for key in value if key_test and (text := key_test(key)))
    problems = [Problem(text=text) for text in islice(texts, MOST_PROBLEMS)]
    return problems + (
        [] if item_test is None else _collect_problems((key, item_test(item)) for key, item in value.items())
    )


def _collect_problems(verdicts: Iterable[tuple[str | int, _Verdict]]) -> list[Problem]:
    """Prefix the problems inside a value with their keys."""
    problems = (problem for key, verdict in verdicts if verdict for problem in _prefix(key, verdict))
    return list(islice(problems, MOST_PROBLEMS))


def _finite(value: float) -> str:
    return "" if -math.inf < value < math.inf else f"is {value!r:.80}, but must be a finite number"


def _format(bound: Any) -> str:
    return f"{bound:g}" if isinstance(bound, float) else str(bound)

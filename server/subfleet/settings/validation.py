"""Settings that a person wrote, validated with pydantic: all that is wrong is told at once, with what may be meant.

The records are plain dataclasses, and know nothing of pydantic. Schemas follow from their annotations: unions are told
apart by their tags, open ones by their registries, and a record's own objections are heard beside what is wrong with
its values.
"""

import dataclasses
import typing
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import MappingProxyType
from typing import Any, Literal, TypeVar

from pydantic import ValidationError
from pydantic_core import CoreSchema, InitErrorDetails, PydanticCustomError, SchemaValidator, core_schema

from subfleet.protocol.diagnosis import MISSING_KEY, refusal_of, unknown_key
from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.protocol.schema import MAX_INTEGER, MAX_TEXT_CHARACTERS, is_union, registry_of, tag_of
from subfleet.protocol.suggestion import did_you_mean
from subfleet.settings.objections import default_of, objections

__all__ = ["problems_with", "validated"]

T = TypeVar("T")

_SCALARS: Mapping[Any, tuple[CoreSchema, str]] = MappingProxyType(
    {
        bool: (core_schema.bool_schema(strict=True), "bool"),
        int: (core_schema.int_schema(strict=True), "int"),
        float: (core_schema.float_schema(strict=True, allow_inf_nan=False), "a finite number"),
        str: (
            core_schema.str_schema(strict=True, max_length=MAX_TEXT_CHARACTERS, pattern=r"^[^\x00]*\z"),
            f"text of at most {MAX_TEXT_CHARACTERS} characters, without NUL",
        ),
    }
)
_WRONG = "wrong"
"""Type of an error whose message goes on after the keys that lead to it."""
_OBJECTION = "objection"
"""Type of an error that a record itself tells, in a sentence of its own."""
_Next = Callable[[Any], Any]


def validated(kind: type[T], plain: Any, what: str) -> T:
    """Build a record from parsed TOML or JSON that a person wrote; `what` names it in errors, such as a file.

    Raises:
        ConfigError: names every unknown and missing key, and every value of a wrong type or out of its range.
    """
    try:
        return typing.cast("T", _validator(typing.cast("Any", kind)).validate_python(plain))
    except ValidationError as error:
        raise refusal_of(what, _sentences(error, "")) from None


def problems_with(kind: type, plain: Any, where: str = "") -> list[str]:
    """Everything that keeps a record from being built; `where` are the keys that lead to it."""
    try:
        _validator(kind).validate_python(plain)
    except ValidationError as error:
        return _sentences(error, where)
    return []


def _sentences(error: ValidationError, where: str) -> list[str]:
    return [_sentence(one["type"], one["msg"], _path(where, one["loc"])) for one in error.errors(include_url=False)]


def _sentence(kind: str, message: str, path: str) -> str:
    if kind == _OBJECTION:
        return f"{path}: {message}" if path else message
    return f"{path or 'it'} {message}"


def _path(where: str, keys: Sequence[int | str]) -> str:
    parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in keys if key != "[key]")
    return f"{where}{''.join(parts)}".removeprefix(".")


@cache
def _validator(kind: Any) -> SchemaValidator:
    return SchemaValidator(_schema(kind))


def _schema(kind: Any) -> CoreSchema:
    members, origin = typing.get_args(kind), typing.get_origin(kind)
    if (registry := registry_of(kind)) is not None:
        schema = _plain(_of_name, registry.tag, registry.names, registry.named)
    elif is_union(kind):
        schema = _union_schema(members)
    elif origin is Literal:
        schema = _plain(_one_of, members)
    elif origin is tuple:
        items = [_schema(member) for member in members if member is not ...]
        listed: CoreSchema = core_schema.tuple_schema(items, variadic_item_index=0 if ... in members else None)
        schema = _worded(listed, "a list" if ... in members else f"a list of {len(items)}")
    elif origin in (dict, Mapping):
        schema = _worded(core_schema.dict_schema(*map(_schema, members)), "a table")
    elif dataclasses.is_dataclass(kind):
        fields = _fields_schema(typing.cast("type", kind))
        schema = core_schema.no_info_wrap_validator_function(partial(_built, typing.cast("type", kind)), fields)
    else:
        schema = _worded(*_SCALARS[kind])
    return schema


def _plain(check: Callable[..., Any], *arguments: Any) -> CoreSchema:
    return core_schema.no_info_plain_validator_function(partial(check, *arguments))


def _union_schema(members: tuple[Any, ...]) -> CoreSchema:
    kinds = {getattr(member, "TYPE", ""): member for member in members if member is not type(None)}
    schema = _schema(*kinds.values()) if len(kinds) == 1 else _plain(_of_name, "type", tuple(kinds), kinds.__getitem__)
    return core_schema.nullable_schema(schema) if type(None) in members else schema


def _fields_schema(kind: type) -> CoreSchema:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {
        field.name: core_schema.typed_dict_field(
            _schema(hints[field.name]), required=default_of(field) is dataclasses.MISSING
        )
        for field in dataclasses.fields(kind)
    }
    if (name := getattr(kind, "TYPE", None)) is not None:
        tag = _plain(_one_of, (name,))
        fields[tag_of(kind)] = core_schema.typed_dict_field(tag, required=False)
    return core_schema.typed_dict_schema(fields, extra_behavior="forbid")


def _worded(schema: CoreSchema, words: str) -> CoreSchema:
    """The same, which says in our words what a value of another type must be."""

    def check(plain: Any, go_on: _Next) -> Any:
        if isinstance(plain, int) and abs(plain) > MAX_INTEGER:  # which a float would take
            raise _error(f"is {plain!r:.80}, but must be {words}")
        try:
            return go_on(plain)
        except ValidationError as error:
            if any(one["loc"] for one in error.errors(include_url=False)):
                raise  # of what is inside
            raise _error(f"is {plain!r:.80}, but must be {words}") from None

    return core_schema.no_info_wrap_validator_function(check, schema)


def _error(message: str, kind: str = _WRONG) -> PydanticCustomError:
    return PydanticCustomError(kind, message)  # it fills in nothing where no values are given


def _one_of(members: Sequence[Any], plain: Any) -> Any:
    if isinstance(plain, (str, int)) and plain in members:
        return plain
    known = [member for member in members if isinstance(member, str)]
    meant = did_you_mean(plain, known) if isinstance(plain, str) else ""
    raise _error(f"is {plain!r:.80}, but must be one of {list(members)}{meant}")


def _of_name(tag: str, names: Sequence[str], named: Callable[[str], Any], plain: Any) -> Any:
    """A member of a union, by the name that stands under its tag."""
    if not isinstance(plain, dict):
        raise _error(f"is {plain!r:.80}, but must be a table")
    name = plain.get(tag)
    if not isinstance(name, str) or name not in names:
        said = f"has the {tag} {name!r:.80}" if tag in plain else f"has no {tag}"
        meant = did_you_mean(name, names) if isinstance(name, str) else ""
        raise _error(f"{said}, but must be one of {list(names)}{meant}")
    try:
        kind = named(name)
    except ConfigError as error:
        raise _error(str(error), _OBJECTION) from error
    return _validator(kind).validate_python(plain)


def _built(kind: type, plain: Any, go_on: _Next) -> Any:
    """A record of its validated fields; where something is wrong, also what the record says of the others."""
    if not isinstance(plain, dict):
        raise _error(f"is {plain!r:.80}, but must be a table")
    problems: list[InitErrorDetails] = []
    values: dict[str, Any] = {}
    said: list[str] = []
    try:
        fields = {field.name for field in dataclasses.fields(kind)}
        values = {name: value for name, value in go_on(plain).items() if name in fields}
        return kind(**values)
    except ValidationError as error:
        problems = [_told(kind, one) for one in error.errors(include_url=False)]
        values = _valid(kind, plain, {one["loc"][0] for one in problems})
    except (ValueError, OverflowError, SubfleetError) as error:
        said = [str(error)]
    heard = [*objections(kind, values)] or said
    problems += [InitErrorDetails(type=_error(text, _OBJECTION), loc=(), input=plain) for text in heard]
    raise ValidationError.from_exception_data(kind.__name__, problems)


def _told(kind: type, error: Any) -> InitErrorDetails:
    """An error of a field, in our words where it is pydantic's own: then it is of this record, and of none inside."""
    name, message, key = error["type"], error["msg"], error["loc"][0]
    if name == "extra_forbidden":
        message = unknown_key(str(key), (field.name for field in dataclasses.fields(kind)))
    elif name == "missing":
        message = MISSING_KEY
    told = _OBJECTION if name == _OBJECTION else _WRONG
    return InitErrorDetails(type=_error(message, told), loc=error["loc"], input=error["input"])


def _valid(kind: type, plain: Mapping[str, Any], wrong: set[int | str]) -> dict[str, Any]:
    hints = typing.get_type_hints(kind, include_extras=True)
    right = {key: value for key, value in plain.items() if key in hints and key not in wrong}
    return {key: _validator(hints[key]).validate_python(value) for key, value in right.items()}

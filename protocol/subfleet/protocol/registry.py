"""Registries: the objects of a group of entry points by name, from Subfleet and from plug-ins.

Objects are imported when they are first used. An object that cannot be loaded is an error only where it is named.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Any, TypeVar

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.silence import silence
from subfleet.protocol.suggestion import suggest

__all__ = ["Registry", "package_of", "problem_with_record"]

T = TypeVar("T")


def problem_with_record(kind: object, name: str, members: Iterable[str]) -> str:
    """Explain why an object is no valid record of a registry; empty if it is.

    Args:
        kind: the registered object.
        name: the required value of its `TYPE`.
        members: required fields or attributes.
    """
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        return "it must be a dataclass"
    if not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # missing in typeshed
        return "it must be a frozen dataclass"
    if getattr(kind, "TYPE", None) != name:
        return f"its TYPE is {getattr(kind, 'TYPE', None)!r:.80}, but must be {name!r}"
    fields = {field.name for field in dataclasses.fields(kind)}
    lacking = sorted(member for member in members if member not in fields and not hasattr(kind, member))
    return f"it lacks {', '.join(map(repr, lacking))}" if lacking else ""


class Registry(Mapping[str, T]):
    """The loadable objects of a group, by name in alphabetical order.

    A type annotated with a registry, `Annotated[Seam, REGISTRY]`, is an open union: `subfleet.protocol.schema` builds
    the registered record that the tag names.

    Args:
        group: of entry points, such as "subfleet.methods".
        what: noun for one object in errors, such as "method".
        tag: the key under which plain data has a record's name.
        read: converts the object of an entry point to the registered one.
        check: explains why a registered object of some name cannot be used; empty if it can.
        find: lists the entry points of the group.
    """

    def __init__(
        self,
        group: str,
        what: str,
        *,
        tag: str = "type",
        read: Callable[[Any], T] = lambda loaded: loaded,
        check: Callable[[Any, str], str] = lambda registered, name: "",
        find: Callable[[str], Iterable[EntryPoint]] = lambda group: entry_points(group=group),
    ) -> None:
        self.group = group
        self.what = what
        self.tag = tag
        self._read = read
        self._check = check
        self._find = find
        self._entries: Mapping[str, tuple[EntryPoint, ...]] | None = None
        self._loaded: dict[str, T | ConfigError] = {}

    @property
    def names(self) -> tuple[str, ...]:
        """All registered names, even those that cannot be loaded; nothing is imported."""
        return tuple(sorted(self._find_entries()))

    @property
    def broken(self) -> Mapping[str, str]:
        """The load errors, by name."""
        outcomes = [(name, self._load(name)) for name in self.names]
        return MappingProxyType({name: str(error) for name, error in outcomes if isinstance(error, ConfigError)})

    def load(self, name: str) -> T:
        """Load the object of a name from a configuration.

        Raises:
            ConfigError: there is none, or it cannot be loaded; the import's exception is then the cause.
        """
        if name not in self._find_entries():
            known = list(self.names)
            raise ConfigError(f"there is no {self.what} {name!r:.80}; choose one of {known}{suggest(name, known)}")
        outcome = self._load(name)
        if isinstance(outcome, ConfigError):
            raise ConfigError(str(outcome)) from outcome.__cause__
        return outcome

    def __getitem__(self, name: str) -> T:
        outcome = self._load(name) if name in self._find_entries() else None
        if outcome is None or isinstance(outcome, ConfigError):
            raise KeyError(name)
        return outcome

    def __eq__(self, other: object) -> bool:
        return self is other  # annotations are compared, which must not load anything

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if not isinstance(self._load(name), ConfigError))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find_entries(self) -> Mapping[str, tuple[EntryPoint, ...]]:
        if self._entries is None:
            entries: dict[str, tuple[EntryPoint, ...]] = {}
            for entry in self._find(self.group):
                others = entries.get(entry.name, ())
                if entry.value not in {other.value for other in others}:
                    entries[entry.name] = (*others, entry)
            self._entries = MappingProxyType(entries)
        return self._entries

    def _load(self, name: str) -> T | ConfigError:
        if name not in self._loaded:
            self._loaded[name] = self._load_anew(name)
        return self._loaded[name]

    def _load_anew(self, name: str) -> T | ConfigError:
        entry, *others = self._find_entries()[name]
        if others:
            owners = " and ".join(f"{owner.value} of {package_of(owner)}" for owner in (entry, *others))
            return ConfigError(f"{self.what} {name!r:.80} is registered as {owners}; uninstall all but one")
        subject = f"{self.what} {name!r:.80}, which is {entry.value} of {package_of(entry)}, cannot be loaded"
        silence(os.environ)  # a plug-in may import a library that reports to its vendor
        try:
            registered = self._read(entry.load())
            problem = self._check(registered, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - a plug-in may raise anything
            broken = ConfigError(f"{subject}: {type(error).__name__}: {error}; fix or uninstall that package")
            broken.__cause__ = error
            return broken
        return ConfigError(f"{subject}: {problem}; fix or uninstall that package") if problem else registered


def package_of(entry: EntryPoint) -> str:
    """Describe the package of an entry point."""
    return f"package {entry.dist.name}" if entry.dist is not None else "no package"

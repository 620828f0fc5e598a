"""Registries: objects under a group of entry points by name, of Subfleet and of plug-ins alike.

Nothing is imported before it is asked for, and what cannot be loaded is in nobody's way: it is told by one sentence
where it is named.
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


def problem_with_record(found: object, name: str, members: Iterable[str]) -> str:
    """Explain why an object is no valid record of a registry; empty if it is.

    Args:
        found: what is registered.
        name: which its `TYPE` must be.
        members: that it must have, as fields or otherwise.
    """
    if not isinstance(found, type) or not dataclasses.is_dataclass(found):
        return "it must be a dataclass"
    if not found.__dataclass_params__.frozen:  # type: ignore[attr-defined]  # which typeshed does not know
        return "it must be a frozen dataclass"
    if getattr(found, "TYPE", None) != name:
        return f"its TYPE is {getattr(found, 'TYPE', None)!r:.80}, but must be {name!r}"
    fields = {field.name for field in dataclasses.fields(found)}
    lacking = sorted(member for member in members if member not in fields and not hasattr(found, member))
    return f"it lacks {', '.join(map(repr, lacking))}" if lacking else ""


class Registry(Mapping[str, T]):
    """The loadable objects of a group, by name in alphabetical order.

    A type annotated with a registry, `Annotated[Seam, REGISTRY]`, is an open union: `subfleet.protocol.schema` builds
    the registered record that its tag names.

    Args:
        group: of entry points, such as "subfleet.methods".
        what: one of them, in the words of errors, such as "method".
        tag: the key under which plain data has a record's name.
        read: what an entry point names to what is registered; the same by default.
        check: what is registered and its name to the reason why it cannot be used; empty where it can.
        find: what is registered.
    """

    def __init__(
        self,
        group: str,
        what: str,
        *,
        tag: str = "type",
        read: Callable[[Any], T] = lambda found: found,
        check: Callable[[Any, str], str] = lambda found, name: "",
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
        return tuple(sorted(self._find_entry()))

    @property
    def broken(self) -> Mapping[str, str]:
        """The load errors, by name."""
        found = {name: self._load(name) for name in self.names}
        return MappingProxyType({name: str(one) for name, one in found.items() if isinstance(one, ConfigError)})

    def named(self, name: str) -> T:
        """Load the object under a name from a configuration.

        Raises:
            ConfigError: there is none, or it cannot be loaded; its cause is then what the import raised.
        """
        if name not in self._find_entry():
            known = list(self.names)
            raise ConfigError(f"there is no {self.what} {name!r:.80}; choose one of {known}{suggest(name, known)}")
        found = self._load(name)
        if isinstance(found, ConfigError):
            raise ConfigError(str(found)) from found.__cause__
        return found

    def __getitem__(self, name: str) -> T:
        found = self._load(name) if name in self._find_entry() else None
        if found is None or isinstance(found, ConfigError):
            raise KeyError(name)
        return found

    def __eq__(self, other: object) -> bool:
        return self is other  # as part of an annotation it is compared with others, which loads nothing

    def __hash__(self) -> int:
        return id(self)

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.names if not isinstance(self._load(name), ConfigError))

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def _find_entry(self) -> Mapping[str, tuple[EntryPoint, ...]]:
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
            self._loaded[name] = self._load_again(name)
        return self._loaded[name]

    def _load_again(self, name: str) -> T | ConfigError:
        entry, *others = self._find_entry()[name]
        if others:
            owners = " and ".join(f"{one.value} of {package_of(one)}" for one in (entry, *others))
            return ConfigError(f"{self.what} {name!r:.80} is registered as {owners}; uninstall all but one")
        subject = f"{self.what} {name!r:.80}, which is {entry.value} of {package_of(entry)}, cannot be loaded"
        silence(os.environ)  # what others bring may import a library that reports
        try:
            found = self._read(entry.load())
            problem = self._check(found, name)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever others' code raises concerns this name alone
            broken = ConfigError(f"{subject}: {type(error).__name__}: {error}; fix or uninstall that package")
            broken.__cause__ = error
            return broken
        return ConfigError(f"{subject}: {problem}; fix or uninstall that package") if problem else found


def package_of(entry: EntryPoint) -> str:
    """Describe the package of an entry point."""
    return f"package {entry.dist.name}" if entry.dist is not None else "no package"

"""Attributes exceptions to Subfleet or to the package of a plug-in."""

from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType, TracebackType

from subfleet.protocol.registry import package_of

_OURS = "subfleet"
_KINDS: Mapping[str, str] = MappingProxyType(
    {
        "subfleet.datasets": "data set",
        "subfleet.families": "family of networks",
        "subfleet.methods": "method",
        "subfleet.observers": "observer",
        "subfleet.presets": "preset",
        "subfleet.trainers": "trainer",
    }
)


def explain_plugin_error(error: BaseException) -> str:
    """Explain which plug-in raised an exception; empty if none did.

    The innermost plug-in in the traceback is blamed, even if it called our code or another library. A plug-in's context
    manager that the exception only passed through is not.
    """
    modules = list(_list_modules(error.__traceback__))
    if all(_is_ours(module) for module in modules):
        return ""
    entries = [
        entry
        for group in entry_points().groups
        if group.startswith(f"{_OURS}.")
        for entry in entry_points(group=group)
        if not _is_ours(entry.module)
    ]
    for module in reversed(modules):
        if (owner := _find_owner(module, entries)) is not None:
            what = f"the {_KINDS.get(owner.group, 'plug-in')} {owner.name!r:.80} of {package_of(owner)}"
            return f"{what} raised {type(error).__name__}: {error}; fix or uninstall that package"
    return ""


def _list_modules(trace: TracebackType | None) -> Iterator[str]:
    """List the modules that an exception passed through, the outermost first."""
    thrown = False
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if not thrown:
            yield module
        # At the end of a context, contextlib throws the exception into the function that made the context.
        thrown = (module, frame.f_code.co_name) == ("contextlib", "__exit__")
        trace = trace.tb_next


def _is_ours(module: str) -> bool:
    return module.partition(".")[0] == _OURS


def _find_owner(module: str, entries: list[EntryPoint]) -> EntryPoint | None:
    """Find the plug-in of a module, else one of the same package."""
    top = module.partition(".")[0]
    exact = (entry for entry in entries if entry.module == module)
    near = (entry for entry in entries if entry.module.partition(".")[0] == top)
    return next(exact, None) or next(near, None)

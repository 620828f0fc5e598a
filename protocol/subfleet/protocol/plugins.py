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

    It is a plug-in's where a plug-in's code stands in the traceback: what our code, or another library's, was called
    with by a plug-in is the plug-in's matter. A context of a plug-in that the exception only went through does not
    count.
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
        if (found := _find_owner(module, entries)) is not None:
            what = f"the {_KINDS.get(found.group, 'plug-in')} {found.name!r:.80} of {package_of(found)}"
            return f"{what} raised {type(error).__name__}: {error}; mend or uninstall that package"
    return ""


def _list_modules(trace: TracebackType | None) -> Iterator[str]:
    """List the modules that an exception passed, the outermost first."""
    thrown = False
    while trace is not None:
        frame = trace.tb_frame
        module = str(frame.f_globals.get("__name__", ""))
        if not thrown:
            yield module
        # The end of a context throws what has happened inside of it into the context's function.
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

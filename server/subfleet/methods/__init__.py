"""Federated methods, a file each with its client half and its server half; entry points are the only list of them."""

from typing import Annotated

from subfleet.methods.describing import MethodInfo, Setting, list_departures
from subfleet.methods.roles import Method
from subfleet.protocol.registry import Registry, problem_with_record

__all__ = ["METHODS", "AnyMethod", "Method"]


def _find_problem(method: object, name: str) -> str:
    if problem := problem_with_record(method, name, ("INFO", "roles")):
        return problem
    if not isinstance(getattr(method, "INFO", None), MethodInfo):
        return "its INFO must be a MethodInfo"
    kind: type[Method] = method  # type: ignore[assignment]  # it has every attribute of a method
    list_departures(kind(), Setting())  # as a list of methods does: its parameters need defaults
    return ""


METHODS = Registry[type[Method]]("subfleet.methods", "method", check=_find_problem)
"""Every installed method, by the name that a configuration's `[method] type = "..."` gives."""

AnyMethod = Annotated[Method, METHODS]
"""A field of this type is read from plain data as the method that it names."""

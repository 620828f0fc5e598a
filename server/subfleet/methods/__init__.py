"""Federated methods: each one file with its client half and its server half; entry points are the only list of them."""

from typing import Annotated

from subfleet.methods.describing import MethodInfo, Setting, departures_of
from subfleet.methods.roles import Method
from subfleet.protocol.registry import Registry, problem_with_record

__all__ = ["METHODS", "AnyMethod", "Method"]


def _problem(found: object, name: str) -> str:
    if problem := problem_with_record(found, name, ("INFO", "departures", "roles")):
        return problem
    if not isinstance(getattr(found, "INFO", None), MethodInfo):
        return "its INFO must be a MethodInfo"
    kind: type[Method] = found  # type: ignore[assignment]  # it has all that a method has
    departures_of(kind(), Setting())  # as in lists of methods: its parameters have defaults
    return ""


METHODS = Registry[type[Method]]("subfleet.methods", "method", check=_problem)
"""Every method that is installed, by the name that a configuration's `[method] type = "..."` gives."""

AnyMethod = Annotated[Method, METHODS]
"""A field of this type is read from plain data as the method that it names."""

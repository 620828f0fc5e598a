"""Planted errors that the checks must find."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from torch import fx

from subfleet.export import programs
from subfleet.export.steps import Step
from subfleet.protocol.programs import Program

__all__ = ["PLANTS", "drop_activations", "invert_gradient"]

PLANTS = ("gradient", "plan")


@contextmanager
def invert_gradient(*, planted: bool) -> Iterator[None]:
    """Make exported programs ascend the gradient while the context is open."""
    trace = programs.trace

    def trace_inverted(step: Step, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
        graph = trace(step, table)
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (rate,) = (node for node, value in zip(placeholders, step.inputs, strict=True) if value.role == "learning_rate")
        with graph.graph.inserting_after(placeholders[-1]):
            negated = graph.graph.call_function(torch.ops.aten.neg.default, (rate,))
        negated.meta["val"] = rate.meta["val"]
        rate.replace_all_uses_with(negated, delete_user_cb=lambda user: user is not negated)
        graph.recompile()
        return graph

    if not planted:
        yield
        return
    with patch.object(programs, "trace", trace_inverted):
        yield


def drop_activations(program: Program) -> Program:
    """A program with a plan that leaves out activations and workspace."""
    memory = replace(program.manifest.memory, activation_bytes=0, workspace_bytes=0)
    return replace(program, manifest=replace(program.manifest, memory=memory))

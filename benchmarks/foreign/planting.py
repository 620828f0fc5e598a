"""Errors that are put in on purpose, to see that what looks for errors finds them."""

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
    """While it is entered, programs go up the gradient instead of down."""
    trace = programs.trace

    def traced(step: Step, table: Mapping[Any, Callable[..., Any]]) -> fx.GraphModule:
        graph = trace(step, table)
        places = [node for node in graph.graph.nodes if node.op == "placeholder"]
        (rate,) = (node for node, value in zip(places, step.inputs, strict=True) if value.role == "learning_rate")
        with graph.graph.inserting_after(places[-1]):
            wrong = graph.graph.call_function(torch.ops.aten.neg.default, (rate,))
        wrong.meta["val"] = rate.meta["val"]
        rate.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)
        graph.recompile()
        return graph

    if not planted:
        yield
        return
    with patch.object(programs, "trace", traced):
        yield


def drop_activations(program: Program) -> Program:
    """A program whose plan leaves out its own tensors."""
    memory = replace(program.manifest.memory, activation_bytes=0, workspace_bytes=0)
    return replace(program, manifest=replace(program.manifest, memory=memory))

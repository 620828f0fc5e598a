"""Training steps of PyTorch for several clients at once, from the requests of their programs."""

from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, fx
from torch.func import vmap

from subfleet.elastic.building import network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.supernets import Supernet
from subfleet.export.request_steps import training_step_of
from subfleet.export.requests import AnyRequest, TrainRequest
from subfleet.export.tracing import trace
from subfleet.programs.supply import Exports
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.programs import ProgramManifest
from subfleet.trainers.layouts import StepLayout, read_step_layout

MOST_MACS = 8_000_000
"""Multiply-accumulates of a forward pass up to which clients train faster together on a processor: there the calls of
operators take most of the time. Measured on one core, steps of 20 clients together against one by one: 0.24 to 0.6 of
the time from 0.8 to 3 million, 0.7 at 10 million, 1.4 at 21 million. Accelerators take all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLog:
    """Passes requests on to an exporter, and remembers those of training programs; see `Exports`.

    Attributes:
        exports: the exporter.
        trainings: the requests, by program id.
    """

    exports: Exports
    trainings: dict[str, TrainRequest] = field(default_factory=dict)

    def submit(
        self, request: AnyRequest, *, weights_path: Path | None = None, samples_from: str = ""
    ) -> "Future[Path]":
        """See `Exports.submit`."""
        if isinstance(request, TrainRequest) and not isinstance(request.model, Supernet):
            self.trainings[request.program_id] = request
        return self.exports.submit(request, weights_path=weights_path, samples_from=samples_from)


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupStep:
    """The training step of a submodel for any number of clients.

    Attributes:
        layout: of its values, without the dimension of clients.
        together: whether it is faster for several clients than for one after the other.
        run: takes and returns values by name, with clients as their first dimension.
    """

    layout: StepLayout
    together: bool
    run: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


def make_group_step(request: TrainRequest, device: torch.device) -> GroupStep:
    """Make the step of a request. It is traced once, so that a client costs no Python beside its operators.

    Raises:
        ConfigError: the network or the submodel is not valid.
        ExportError: the submodel cannot be trained.
    """
    step = training_step_of(request)
    graph = _fit(trace(step, {}), device)
    names, results = [value.name for value in step.inputs], [value.name for value in step.outputs]
    mapped = vmap(graph)

    def run(values: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        arguments = [values[name] for name in names]
        if len(arguments[0]) > 1:
            outputs = mapped(*arguments)
        else:
            outputs = [output.unsqueeze(0) for output in graph(*(value[0] for value in arguments))]
        return dict(zip(results, outputs, strict=True))

    manifest = ProgramManifest(
        program_id=request.program_id,
        target="torch",
        purpose="train",
        batch_size=request.batch_size,
        inputs=step.inputs,
        outputs=step.outputs,
        memory=MemoryPlan(),
        max_abs_diff=0.0,
    )
    network = network_of(request.model)
    macs = estimate_cost(network, request.architecture, batch_size=request.batch_size).forward_macs
    together = device.type != "cpu" or macs * request.batch_size <= MOST_MACS
    return GroupStep(layout=read_step_layout(manifest), together=together, run=run)


def _fit(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """Move a graph to a device, and let it copy tensors that cannot be viewed in another shape."""
    for node in graph.graph.nodes:
        if node.target is torch.ops.aten.view.default:  # values of many clients may lie in another order
            node.target = torch.ops.aten.reshape.default
        if "device" in node.kwargs:
            node.kwargs = {**node.kwargs, "device": device}
    graph.recompile()
    return graph.to(device)

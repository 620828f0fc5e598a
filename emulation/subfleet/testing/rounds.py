"""Rounds of a method without devices: the server aggregates drawn changes."""

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from subfleet.aggregation.aggregation import AggregatedModel, aggregate_model
from subfleet.aggregation.views import View
from subfleet.arrays import encode_arrays
from subfleet.arrays.codecs import draw_rounding_numbers, encode_changes
from subfleet.elastic.building import build_module, init_state
from subfleet.elastic.families.records.choices import ChoiceCnn
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.model_state import ModelState
from subfleet.elastic.network import BUFFER_ROLES, Family, Network
from subfleet.methods import AnyMethod
from subfleet.methods.aggregator import Participant, keep_aggregate
from subfleet.methods.assigner import AssignmentContext, Draw
from subfleet.methods.roles import Roles
from subfleet.protocol.blobs import BlobRef
from subfleet.protocol.messages import Task, Update
from subfleet.protocol.programs import ProgramRef
from subfleet.protocol.readings import Budget
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import TaskSubmodel, Train
from subfleet.protocol.training import TrainingSettings
from subfleet.protocol.update_codecs import AnyUpdateCodec, Uncompressed
from subfleet.rounds.context import RunContext
from subfleet.rounds.signals import AggregationRequest
from subfleet.rounds.state import AcceptedUpdate, ClientState, Offer, Submodel
from subfleet.serving.run_context import create_context
from subfleet.settings.run import Run
from subfleet.settings.samples import DataSettings
from subfleet.testing.submodels import find_held_elements
from subfleet.transport.blob_store import BlobStore

__all__ = ["DrawnClient", "draw_state", "make_assignee", "make_context", "play"]

MODEL = Mlp(input_shape=(5,), class_count=4, widths=(8, 12), depths=(2, 3), group_size=2)
SUPERNET = ChoiceCnn(
    input_shape=(1, 4, 4),
    class_count=4,
    widths=(4,),
    depths=(2,),
    last_widths=(4,),
    operators=(("conv1", "dsconv3", "identity"),),
    group_size=2,
)
"""For methods that draw paths of a supernet."""
RATES = (0.25, 0.5, 1.0)
CLASSES = 4
SEED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnClient:
    """A client of a drawn round.

    Attributes:
        size: index of its submodel in the method's search space.
        scale: of its change; 0 has the effect of learning rate 0.
        classes: number of samples of each class.
        codec: of its update.
    """

    name: str
    size: int
    samples: int = 10
    scale: float = 0.1
    classes: tuple[int, ...] = (1,) * CLASSES
    codec: AnyUpdateCodec = field(default_factory=Uncompressed)


def make_config(method: AnyMethod, model: Family = MODEL, **changes: Any) -> Run:
    """Settings of a run on a small network, without a limit on a client's fraction of the weight.

    For a method that draws paths, the default model is a small supernet.
    """
    supernet = model == MODEL and method.roles().training.draws_paths
    model, data = (SUPERNET if supernet else model), DataSettings(test="unused", validation_samples=int(supernet))
    settings: dict[str, Any] = {"name": "methods", "data": data, "rates": RATES, "seed": SEED}
    return Run(**{**settings, "model": model, "method": method, "max_client_fraction": 1.0, **changes})


def make_context(method: AnyMethod, model: Family = MODEL, **changes: Any) -> RunContext:
    """The run context of a method on a small network."""
    return create_context(make_config(method, model, **changes), "run")


def make_assignee(
    context: RunContext,
    name: str,
    *,
    memory_bytes: int = 2**40,
    round_number: int = 1,
    previous: Architecture | None = None,
) -> AssignmentContext:
    """A client to be assigned a submodel, before any search has found something."""
    search = context.roles.assigner.search
    return AssignmentContext(
        networks={"": context.network},
        candidates=context.first.candidates,
        estimate=context.first.estimate,
        draw=Draw(seed=SEED, round=round_number, client_id=name, memory=context.roles.memory.initial),
        target="onnx",
        budget=Budget(memory_bytes=memory_bytes),
        previous=previous,
        search=None if search is None else search.start(context.network, context.first.estimate, "onnx"),
    )


def draw_state(network: Network) -> ModelState:
    """Draw all tensors of an untrained model, so that no error hides behind a zero; variances are at least 1."""
    generator = torch.Generator().manual_seed(1)
    state = init_state(network, 0)
    drawn = {name: torch.randn(tensor.shape, generator=generator) for name, tensor in state.items()}
    roles = {name: decl.role for name, decl in network.tensors.items()}
    return ModelState.first(
        {name: 1 + tensor.abs() if roles[name] == "variance" else tensor for name, tensor in drawn.items()}
    )


def place_client(context: RunContext, client: DrawnClient, round_number: int) -> Architecture:
    """The architecture of a client's submodel in a round."""
    draw = Draw(seed=SEED, round=round_number, client_id=client.name, memory=context.roles.memory.initial)
    return context.roles.assigner.place(context.network, context.space[client.size], draw)


def draw_change(context: RunContext, client: DrawnClient, round_number: int) -> dict[str, Tensor]:
    """Draw the change of a client in a round."""
    architecture = place_client(context, client, round_number)
    generator = torch.Generator().manual_seed(zlib.crc32(f"{client.name}/{round_number}".encode()))
    return {
        name: torch.randn(shape, generator=generator) * client.scale
        for name, shape in context.network.shapes(architecture).items()
    }


def play(
    context: RunContext, state: ModelState, clients: Sequence[DrawnClient], folder: Path, round_number: int = 1
) -> AggregatedModel:
    """Aggregate one round of drawn changes."""
    blobs = BlobStore(folder)
    states = tuple(store_update(context, client, blobs, round_number) for client in clients)
    request = AggregationRequest(round=round_number, clients=states, memory=context.roles.memory.initial)
    return aggregate_model(context, blobs, state, request)


def store_update(context: RunContext, client: DrawnClient, blobs: BlobStore, round_number: int = 1) -> ClientState:
    """Store the update of a client; returns the client's state."""
    change = {name: tensor.numpy() for name, tensor in draw_change(context, client, round_number).items()}
    exact = {name for name, decl in context.network.tensors.items() if decl.role in BUFFER_ROLES}
    uniform = partial(draw_rounding_numbers, seed=SEED, round_number=round_number, client_id=client.name)
    ref = blobs.add(encode_arrays(encode_changes(client.codec, change, exact=exact, uniform=uniform)))
    result = Update(
        task_id=f"{client.name}/{round_number}",
        run_id="run",
        round=round_number,
        client_id=client.name,
        blob=ref,
        sample_count=client.samples,
        step_count=1,
        loss=1.0,
        accuracy=0.5,
        measured_peak_bytes=0,
        train_seconds=0.0,
        seconds=0.0,
    )
    return ClientState(
        client_id=client.name,
        device="drawn",
        stage="done",
        offer=Offer(class_counts=client.classes),
        given=Submodel(size=context.space[client.size], architecture=place_client(context, client, round_number)),
        task=_make_task(client, place_client(context, client, round_number), ref, round_number),
        trained=AcceptedUpdate(update=result),
    )


def _make_task(client: DrawnClient, architecture: Architecture, blob: BlobRef, round_number: int) -> Task:
    return Task(
        task_id=f"{client.name}/{round_number}",
        run_id="run",
        round=round_number,
        client_id=client.name,
        submodels=(
            TaskSubmodel(
                architecture=architecture,
                program=ProgramRef(program_id="drawn", target="onnx", blob=blob),
                weights=blob,
            ),
        ),
        work=Train(settings=TrainingSettings(), update_codec=client.codec),
        planned_peak_bytes=0,
        budget=Budget(memory_bytes=0),
        deadline_s=1.0,
    )


def keep_architecture(network: Network, architecture: Architecture) -> Architecture:
    """The submodel that an update changes by default: the trained one."""
    return architecture


def find_held(
    context: RunContext,
    clients: Sequence[DrawnClient],
    round_number: int = 1,
    moved: Callable[[Network, Architecture], Architecture] = keep_architecture,
) -> Mapping[str, Tensor]:
    """By tensor, a mask of the elements that the updates of the clients change."""
    architectures = [moved(context.network, place_client(context, client, round_number)) for client in clients]
    masks = [find_held_elements(context.network, architecture) for architecture in architectures]
    return {name: torch.stack([mask[name] for mask in masks]).any(dim=0) for name in context.network.tensors}


def with_steps(roles: Roles, **steps: Any) -> Roles:
    """Replace steps of roles by name.

    Raises:
        TypeError: not exactly one role has a step of this name.
    """
    for name, step in steps.items():
        owners = [
            role.name for role in fields(roles) if name in {own.name for own in fields(getattr(roles, role.name))}
        ]
        if len(owners) != 1:
            raise TypeError(f"{name!r} is a step of {len(owners)} roles, but must be one of exactly one role")
        roles = replace(roles, **{owners[0]: replace(getattr(roles, owners[0]), **{name: step})})
    return roles


def changes_whole_model(context: RunContext) -> bool:
    """Whether a method transforms the whole model after a round."""
    return (
        context.roles.aggregator.after_round is not keep_aggregate or context.roles.techniques.distillation is not None
    )


def list_clients(context: RunContext) -> list[DrawnClient]:
    """A client for each submodel of the search space, except for the largest if there are several."""
    count = max(1, len(context.space) - 1)
    return [DrawnClient(name=f"client{index}", size=index, samples=index + 1) for index in range(count)]


def compute_logits(context: RunContext, tensors: Mapping[str, Tensor]) -> list[float]:
    """The outputs of the whole model for drawn inputs."""
    module = build_module(context.network, context.network.full_architecture())
    module.load_state_dict(dict(tensors))
    inputs = torch.randn(6, *context.network.config.input_shape, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        return [float(value) for value in module.eval()(inputs).flatten()]


def view_model(context: RunContext, state: ModelState, client: DrawnClient) -> Mapping[str, Tensor]:
    """The model as a client sees it."""
    size = context.space[client.size]
    participant = Participant(client_id=client.name, architecture=size, size=size)
    return View.of(context.roles, context.network, state, participant).tensors

"""How a network can be cut, and what its submodels cost on each runtime."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from subfleet.arrays import encode_arrays
from subfleet.cli.options import RUNS
from subfleet.device.runtimes import load_trainer
from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.cost import estimate_cost
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.maps import extract
from subfleet.elastic.network import Network, Places
from subfleet.elastic.recording.loading import make_module, record_network
from subfleet.elastic.recording.record import unpack_record
from subfleet.elastic.spaces import uniform_space
from subfleet.export.cache import CacheFolder
from subfleet.export.pool import ExportPool
from subfleet.export.requests import TrainRequest
from subfleet.programs.supply import build_train_request
from subfleet.protocol.errors import ConfigError, SubfleetError
from subfleet.protocol.jobs import Job
from subfleet.protocol.programs import Program, decode_program, encode_program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.task import Train
from subfleet.protocol.task_kinds import Objective
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings, TrainingSettings
from subfleet.serving.run_context import create_context
from subfleet.settings.overrides import parse_override
from subfleet.settings.reading import read_run
from subfleet.settings.stored_networks import resolve_model
from subfleet.tasks.arrays_file import write_npz
from subfleet.tasks.dataset import Dataset

_RATES = (0.001, 0.25, 1.0)
_STEPS = 4
_BATCH_SIZE = 16
_MEMORY_LIMIT_BYTES = 2**40
_TARGETS = ("onnx", "executorch")
_OBJECTIVES: Mapping[Places, Objective] = MappingProxyType(
    {"sample": "cross_entropy", "token": "next_token", "pixel": "dense_cross_entropy"}
)
"""The objective for each kind of prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisDescription:
    """An axis.

    Attributes:
        name: its name.
        size: number of indices.
        kind: such as "channel" or "head".
        granularity: number of indices that are kept or dropped together.
        mixed: whether an operator of a recorded network combines its indices, as a layer norm does.
        tensors: the tensors that run over it.
    """

    name: str
    size: int
    kind: str
    granularity: int
    mixed: bool
    tensors: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class NetworkDescription:
    """How a network can be cut.

    Attributes:
        family: name of its family; "recorded" for a module.
        input_shape: shape of a sample.
        class_count: number of classes, labels or numbers that it predicts.
        axes: what can be cut.
        blocks: what a submodel can leave out.
        whole: tensors with the dimensions that are kept whole, by reason.
    """

    family: str
    input_shape: tuple[int, ...]
    class_count: int
    axes: tuple[AxisDescription, ...]
    blocks: tuple[str, ...]
    whole: Mapping[str, tuple[str, ...]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """The training of a submodel with one runtime.

    Attributes:
        program_bytes: size of the program.
        planned_peak_bytes: planned memory of its training.
        step_s: seconds of a step on one thread of this machine; None if this machine lacks the runtime.
        problem: why it cannot be trained; empty if it can.
    """

    program_bytes: int = 0
    planned_peak_bytes: int = 0
    step_s: float | None = None
    problem: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmodelDescription:
    """A submodel and what it costs.

    Attributes:
        name: "smallest", "quarter" (of each width, with all blocks) or "whole".
        parameters: number of parameters.
        weight_bytes: their size.
        forward_macs: multiplications of a sample's forward pass.
        runtimes: its training, by target.
    """

    name: str
    parameters: int
    weight_bytes: int
    forward_macs: int
    runtimes: dict[str, Trial]


def read_request(
    text: str, overrides: Sequence[str], input_shape: str, arguments: Sequence[str], symbols: int
) -> tuple[TrainRequest, tuple[str, ...]]:
    """Read what to inspect: a request for the training program of the whole network, and the runtimes.

    Args:
        text: a run's file or name; or a function or class that makes a PyTorch module, such as "my_net:build".
        overrides: of the run's settings.
        input_shape: of the module, such as "3,64,64".
        arguments: of the module's function, such as "width=32".
        symbols: size of the vocabulary if the module reads tokens, else 0.

    Raises:
        ConfigError: there is no such run or module, the module cannot be recorded, or options do not belong to it.
        FileError: the run's file cannot be read.
    """
    if ":" in text and not Path(text).exists():
        if overrides:
            raise ConfigError("--set changes the settings of a run, but a module has none; use --argument")
        shape = _read_shape(input_shape)
        family = record_network(make_module(text, dict(map(_read_argument, arguments))), shape, symbols=symbols)
        objective = ObjectiveSettings(name=_OBJECTIVES[family.PREDICTS])
        whole = network_of(family).full_architecture()
        return TrainRequest(
            model=family,
            architecture=whole,
            target=_TARGETS[0],
            batch_size=_BATCH_SIZE,
            objective=objective,
            optimiser=OptimiserSettings(),
        ), _TARGETS
    if input_shape or arguments or symbols:
        raise ConfigError(f"--input-shape, --argument and --symbols describe a module, but {text!r:.80} is a run")
    run = resolve_model(read_run(text, overrides), RUNS)
    context = create_context(run, run.name)
    whole = context.network.full_architecture()
    return build_train_request(context.network, whole, run.targets[0], context.training(1)), run.targets


def _read_shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) for size in sizes):
        raise ConfigError(f"--input-shape is {text!r:.80}, but must be the shape of one sample, such as 3,64,64")
    return tuple(map(int, sizes))


def _read_argument(text: str) -> tuple[str, Any]:
    name, separator, _ = text.partition("=")
    if not separator or not name.strip():
        raise ConfigError(f"--argument is {text!r:.80}, but must be like width=32")
    return name.strip(), parse_override(text)[1]


def describe_network(network: Network) -> NetworkDescription:
    """Describe how a network can be cut."""
    config = network.config
    record = unpack_record(config.recording) if isinstance(config, Recorded) else None
    tensors: dict[str, list[str]] = {}
    for decl in network.tensors.values():
        for name in network.list_axes(decl):
            tensors.setdefault(name, []).append(decl.name)
    return NetworkDescription(
        family=config.TYPE,
        input_shape=config.input_shape,
        class_count=config.class_count,
        axes=tuple(
            AxisDescription(
                name=axis.name,
                size=axis.size,
                kind=axis.kind,
                granularity=axis.granularity,
                mixed=axis.mixed,
                tensors=tuple(tensors.get(axis.name, ())),
            )
            for axis in network.axes.values()
        ),
        blocks=network.parts,
        whole=record.whole if record else {},
    )


def try_submodels(request: TrainRequest, targets: tuple[str, ...], cache: CacheFolder) -> Iterator[SubmodelDescription]:
    """Export the whole network and two submodels, if it can be cut, for each target, and train them for a few steps.

    Args:
        request: a request for the whole network's training program; its target does not matter.
        targets: such as "onnx".
        cache: of exported programs.
    """
    network = network_of(request.model)
    space = uniform_space(network, _RATES)
    quarters = [own for own in space if own.name.startswith("w1/4")]
    smaller = {"smallest": space[0], "quarter": quarters[-1]} if quarters else {}
    chosen = {**smaller, "whole": network.full_architecture()}
    with ExportPool(cache) as pool:
        futures = {
            (name, target): pool.submit(replace(request, architecture=architecture, target=target))
            for name, architecture in chosen.items()
            for target in targets
        }
        for name, architecture in chosen.items():
            cost = estimate_cost(network, architecture, batch_size=request.batch_size)
            trials = dict[str, Trial]()
            for target in targets:
                try:
                    program = decode_program(futures[name, target].result().read_bytes())
                except SubfleetError as error:
                    trials[target] = Trial(problem=str(error))
                else:
                    trials[target] = _try_program(network, architecture, request.batch_size, program)
            yield SubmodelDescription(
                name=name,
                parameters=cost.parameters,
                weight_bytes=cost.weight_bytes,
                forward_macs=cost.forward_macs,
                runtimes=trials,
            )


def _try_program(network: Network, architecture: Architecture, batch_size: int, program: Program) -> Trial:
    trial = Trial(program_bytes=len(program.body), planned_peak_bytes=program.manifest.planned_peak_bytes)
    try:
        return replace(trial, step_s=_measure_step(network, architecture, batch_size, program))
    except SubfleetError as error:
        return replace(trial, problem=f"it cannot be tried here: {error}")


def _measure_step(network: Network, architecture: Architecture, batch_size: int, program: Program) -> float:
    """Train for a few steps with random samples and weights; return the seconds of one step."""
    trainer = load_trainer(program.manifest.target)
    with tempfile.TemporaryDirectory(prefix="subfleet-inspect-") as name:
        folder = Path(name)
        (folder / "program").write_bytes(encode_program(program))
        state = extract(network, architecture, init_state(network, 0))
        (folder / "weights").write_bytes(encode_arrays({own: tensor.numpy() for own, tensor in state.items()}))
        write_npz(folder / "data.npz", _draw_samples(network, program, _STEPS * batch_size))
        trainer.describe(str(folder / "data.npz"))
        result = trainer.train(
            Job(
                work=Train(settings=TrainingSettings(batch_size=batch_size, learning_rate=1e-4)),
                program_path=folder / "program",
                weights_path=folder / "weights",
                output_path=folder / "update",
                data=str(folder / "data.npz"),
                round=1,
                client_id="inspect",
                memory_limit_bytes=_MEMORY_LIMIT_BYTES,
            ),
            lambda: False,
        )
    return result.train_seconds / result.step_count


def _draw_samples(network: Network, program: Program, count: int) -> Dataset:
    draw, config = np.random.default_rng(0), network.config
    label = next(value for value in program.manifest.inputs if value.role == "label")
    shapes = (count, *config.input_shape), (count, *label.shape[1:])
    return Dataset(
        inputs=_draw(draw, shapes[0], network.symbols),
        labels=_draw(draw, shapes[1], config.class_count if label.dtype == "I64" else 0),
    )


def _draw(draw: np.random.Generator, shape: tuple[int, ...], limit: int) -> Any:
    """Random indices below a limit, or normal numbers if it is 0."""
    return draw.integers(0, limit, shape) if limit else draw.standard_normal(shape, dtype=np.float32)

"""A small chain with programs that use PyTorch's autograd, and the same supernet in plain PyTorch."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from subfleet.arrays import encode_arrays
from subfleet.protocol.chains import Chain, Link, LinkOperator, name_program
from subfleet.protocol.errors import TrainingError
from subfleet.protocol.evaluating import EvaluationSettings
from subfleet.protocol.jobs import Job
from subfleet.protocol.memory_plan import MemoryPlan
from subfleet.protocol.paths import PathSettings
from subfleet.protocol.programs import PieceProgram, Program, ProgramManifest, ValueInfo, encode_program
from subfleet.protocol.task import Evaluate, Train
from subfleet.protocol.tensors import Tensor as Stored
from subfleet.protocol.tensors import encode_container
from subfleet.protocol.training import OptimiserSettings, TrainingSettings
from subfleet.tasks import Dataset, write_npz
from subfleet.trainers.runtime import Array, RunArrays

BATCH, WIDTH, INPUTS, CLASSES = 4, 6, 5, 3
MOMENTUM, CLIP = 0.5, 0.4
CHOICES: Mapping[str, tuple[str, ...]] = {
    "section0.block0": ("dense", "added", "identity"),
    "section0.block1": ("dense", "added", "identity"),
    "section0.block2": ("dense", "added"),
}
"""The operators of each choice; operators of the same kind share a piece."""


class Dense(nn.Module):
    """A layer with a running mean of its real input samples."""

    mean: Tensor

    def __init__(self, width_in: int = WIDTH) -> None:
        super().__init__()
        self.layer = nn.Linear(width_in, WIDTH)
        self.register_buffer("mean", torch.zeros(width_in))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        with torch.no_grad():
            self.mean = 0.5 * self.mean + 0.5 * (x * mask[:, None]).sum(0) / mask.sum()
        return torch.tanh(self.layer(x))


class Added(nn.Module):
    """A layer with a trainable scale that adds its result to its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH, bias=False)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x + self.scale * torch.tanh(self.layer(x))


class Passed(nn.Module):
    """Returns its input."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return x


class Head(nn.Module):
    """A layer that returns logits."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        logits: Tensor = self.head(x)
        return logits


class Stem(Dense):
    """The first link."""

    def __init__(self) -> None:
        super().__init__(INPUTS)


PIECES: Mapping[str, type[nn.Module]] = {"stem": Stem, "dense": Dense, "added": Added, "head": Head}


def _value(name: str, role: str, shape: Sequence[int] = (), tensor: str = "", *, dtype: str = "F32") -> ValueInfo:
    limit = CLASSES if role == "label" else 0
    return ValueInfo(name=name, role=role, shape=tuple(shape), tensor=tensor, dtype=dtype, limit=limit)  # type: ignore[arg-type] # a literal


def _batch_values(step: str) -> list[ValueInfo]:
    if step in ("forward", "middle"):
        return [_value("mask", "sample_mask", (BATCH,))]
    loss = [_value("label", "label", (BATCH,), dtype="I64"), _value("mask", "sample_mask", (BATCH,))]
    return loss if step == "evaluate" else [*loss, _value("batch_weight", "batch_weight")]


def _named(module: nn.Module, kind: str, role: str, prefix: str = "") -> list[ValueInfo]:
    tensors = module.named_buffers() if role == "buffer" else module.named_parameters()
    return [_value(f"{kind}.{prefix}{name}", role, tensor.shape, f"{prefix}{name}") for name, tensor in tensors]


def _weights(module: nn.Module, kind: str = "given", prefix: str = "") -> list[ValueInfo]:
    return [*_named(module, kind, "parameter", prefix), *_named(module, kind, "buffer", prefix)]


def _result_values(purpose: str) -> list[ValueInfo]:
    scalars = [_value(name, name) for name in ("loss", "correct", "count")]
    return scalars if purpose == "train" else [*scalars, _value("logits", "logits", (BATCH, CLASSES))]


def _programs(piece: str, purpose: str) -> list[PieceProgram]:
    module = PIECES[piece]()
    read = _value("x", "input", (BATCH, INPUTS)) if piece == "stem" else _value("x", "features", (BATCH, WIDTH))
    gives, gradient = _value("y", "features", (BATCH, WIDTH)), _value("dx", "features_gradient", (BATCH, WIDTH))
    new = _named(module, "new", "buffer")
    last = piece == "head"

    def program(step: str, inputs: list[ValueInfo], outputs: list[ValueInfo]) -> PieceProgram:
        return PieceProgram(name=name_program(piece, step), inputs=tuple(inputs), outputs=tuple(outputs))

    if purpose == "evaluate":
        step = "evaluate" if last else "forward"
        return [
            program(step, [read, *_batch_values(step), *_weights(module)], _result_values(purpose) if last else [gives])
        ]
    gradients = _named(module, "gradient", "gradient")
    back = [] if piece == "stem" else [gradient]
    middle = [read, *_batch_values("middle"), *_weights(module), replace(gradient, name="dy")]
    states = _named(module, "momentum", "optimiser_state")
    scalars = [_value("learning_rate", "learning_rate"), _value("gradient_scale", "gradient_scale")]
    after = [*_named(module, "new", "parameter"), *_named(module, "new.momentum", "optimiser_state")]
    update = program("update", [*_named(module, "given", "parameter"), *gradients, *states, *scalars], after)
    if last:
        ends = [*_result_values(purpose), gradient, *gradients, *new]
        return [program("backward", [read, *_batch_values("backward"), *_weights(module)], ends), update]
    forward = program("forward", [read, *_batch_values("forward"), *_weights(module)], [gives, *new])
    return [forward, program("backward", middle, [*back, *gradients]), update]


def _operator(name: str, piece: str, prefix: str) -> LinkOperator:
    size = 4 * sum(tensor.numel() for tensor in PIECES[piece]().state_dict().values()) if piece else 0
    costs = {"dense": (40, 30, 300), "added": (20, 60, 500)}.get(piece, (10, 10, 100) if piece else (0, 0, 0))
    return LinkOperator(
        name=name,
        piece=piece,
        prefix=prefix,
        weight_bytes=size,
        state_bytes=size,
        forward_macs=costs[0],
        kept_bytes=costs[1],
        peak_bytes=costs[2],
    )


def chain() -> Chain:
    choices = [
        Link(
            name=choice,
            operators=tuple(
                _operator(name, "" if name == "identity" else name, f"{choice}.{name}.") for name in operators
            ),
        )
        for choice, operators in CHOICES.items()
    ]
    fixed = [
        Link(name=name, operators=(_operator("", name, prefix),)) for name, prefix in (("stem", "stem."), ("head", ""))
    ]
    runtime = tuple((piece, 1000) for piece in PIECES)
    return Chain(links=(fixed[0], *choices, fixed[1]), fixed_bytes=10_000, runtime_bytes=runtime)


def program(purpose: str = "train") -> Program:
    links = chain().links
    owners = [
        (PIECES[operator.piece](), operator.prefix) for link in links for operator in link.operators if operator.piece
    ]
    pieces = [piece_program for piece in PIECES for piece_program in _programs(piece, purpose)]
    inputs = [_value("x", "input", (BATCH, INPUTS)), *_batch_values("backward" if purpose == "train" else "evaluate")]
    weights = [value for module, prefix in owners for value in _weights(module, "given", prefix)]
    outputs = _result_values(purpose)
    if purpose == "train":
        inputs += [_value("learning_rate", "learning_rate"), _value("apply", "apply")]
        states = [value for module, prefix in owners for value in _named(module, "momentum", "optimiser_state", prefix)]
        weights += states
        outputs += [replace(value, name=f"new.{value.name}") for value in weights]
    manifest = ProgramManifest(
        program_id="chain",
        target="pieces",
        purpose=purpose,  # type: ignore[arg-type] # a literal
        batch_size=BATCH,
        inputs=(*inputs, *weights),
        outputs=tuple(outputs),
        memory=MemoryPlan(runtime_bytes=1),
        max_abs_diff=0.0,
        chain=chain(),
        pieces=tuple(pieces),
    )
    bodies = [
        Stored(name=piece.name, dtype="U8", shape=(len(piece.name),), data=piece.name.encode()) for piece in pieces
    ]
    return Program(manifest=manifest, body=encode_container(bodies, {}))


@dataclass
class Pieces:
    """Loads the programs and records their runs.

    Attributes:
        refused: Pieces that this runtime refuses.
        loads: Names of the loaded programs.
        runs: Names of the programs that ran.
    """

    refused: frozenset[str] = frozenset()
    loads: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)

    def load(self, program: Program, threads: int) -> RunArrays:
        name = bytes(program.body).decode()
        piece, step = name.split("/")
        if piece in self.refused:
            raise TrainingError("NOT_IMPLEMENTED")
        self.loads.append(name)
        inputs, outputs = program.manifest.inputs, program.manifest.outputs

        def run(values: Mapping[str, Array]) -> Mapping[str, Array]:
            self.runs.append(name)
            assert {key: array.shape for key, array in values.items()} == {value.name: value.shape for value in inputs}
            tensors = {key: torch.from_numpy(np.array(array)) for key, array in values.items()}
            results = _RUNS[step](PIECES[piece](), tensors)
            return {value.name: np.array(results[value.name].detach().numpy()) for value in outputs}

        return run


def _load_weights(module: nn.Module, inputs: Mapping[str, Tensor]) -> nn.Module:
    module.load_state_dict({name: inputs[f"given.{name}"] for name in module.state_dict()})
    return module


def _forward(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    _load_weights(module, inputs)
    return {
        "y": module(inputs["x"], inputs["mask"]),
        **{f"new.{name}": buffer for name, buffer in module.named_buffers()},
    }


def _backward(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    _load_weights(module, inputs)
    x = inputs["x"].requires_grad_()
    y = module(x, inputs["mask"])
    results: dict[str, Tensor] = {}
    if "label" in inputs:
        results = losses(y, inputs["label"], inputs["mask"])
        y, inputs = results["loss"] * results["count"] / inputs["batch_weight"], {**inputs, "dy": torch.ones(())}
        results["loss"] = y
    y.backward(inputs["dy"])
    gradients = {f"gradient.{name}": parameter.grad for name, parameter in module.named_parameters()}
    new = {f"new.{name}": buffer for name, buffer in module.named_buffers()}
    return {**results, "dx": x.grad, **gradients, **new}  # type: ignore[dict-item] # after a backward pass all gradients are set


def _evaluate(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    logits = _load_weights(module, inputs)(inputs["x"], inputs["mask"])
    return {**losses(logits, inputs["label"], inputs["mask"]), "logits": logits}


def _update(module: nn.Module, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    results = {}
    for name, _ in module.named_parameters():
        velocity = MOMENTUM * inputs[f"momentum.{name}"] + inputs["gradient_scale"] * inputs[f"gradient.{name}"]
        results[f"new.{name}"] = inputs[f"given.{name}"] - inputs["learning_rate"] * velocity
        results[f"new.momentum.{name}"] = velocity
    return results


_RUNS: Mapping[str, Any] = {"forward": _forward, "backward": _backward, "evaluate": _evaluate, "update": _update}


def losses(logits: Tensor, label: Tensor, mask: Tensor) -> dict[str, Tensor]:
    """The mean loss over the labels that count, the correct ones, and their number."""
    counts = (label >= 0) * mask
    label_losses = nn.functional.cross_entropy(logits, label.clamp_min(0), reduction="none")
    correct = (logits.argmax(1) == label) * counts
    return {"loss": (label_losses * counts).sum() / counts.sum(), "correct": correct.sum(), "count": counts.sum()}


class Supernet(nn.Module):
    """The same supernet in plain PyTorch, with the same names of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = Stem()
        self.head = Head().head
        for choice, operators in CHOICES.items():
            section, block = choice.split(".")
            if not hasattr(self, section):
                self.add_module(section, nn.Module())
            kinds = OrderedDict((name, PIECES[name]() if name in PIECES else Passed()) for name in operators)
            self.get_submodule(section).add_module(block, nn.ModuleDict(kinds))

    def run(self, path: Sequence[str], x: Tensor, mask: Tensor) -> Tensor:
        """Logits along a path."""
        x = self.stem(x, mask)
        for choice, operator in zip(CHOICES, path, strict=True):
            x = self.get_submodule(f"{choice}.{operator}")(x, mask)
        logits: Tensor = self.head(x)
        return logits


def start(seed: int = 0) -> dict[str, Array]:
    """First weights of the whole supernet."""
    generator = np.random.default_rng(seed)
    shapes = {name: tensor.shape for name, tensor in Supernet().state_dict().items()}
    return {name: np.asarray(0.5 * generator.standard_normal(shape), np.float32) for name, shape in shapes.items()}


def samples(count: int = 10, seed: int = 1) -> Dataset:
    """Random samples; by default the last batch is not full."""
    generator = np.random.default_rng(seed)
    labels = generator.integers(0, CLASSES, count)
    return Dataset(inputs=generator.standard_normal((count, INPUTS)).astype(np.float32), labels=labels)


SETTINGS = TrainingSettings(
    epochs=2, batch_size=BATCH, learning_rate=0.1, seed=3, optimiser=OptimiserSettings(momentum=MOMENTUM)
)
PATHS = PathSettings()


def write_train_job(
    folder: Path,
    settings: TrainingSettings = SETTINGS,
    *,
    choices: Mapping[str, tuple[str, ...]] | None = None,
    dataset: Dataset | None = None,
    weights: Mapping[str, Array] | None = None,
) -> Job[Train]:
    """A job of a subspace, with only the weights of its tensors."""
    subspace = dict(choices or {})
    write_npz(folder / "data.npz", dataset or samples())
    (folder / "program").write_bytes(encode_program(program()))
    (folder / "weights").write_bytes(encode_arrays(of_subspace(weights or start(), subspace)))
    return Job(
        work=Train(settings=settings, paths=PATHS),
        program_path=folder / "program",
        weights_path=folder / "weights",
        output_path=folder / "update",
        data=str(folder / "data.npz"),
        round=3,
        client_id="device-1",
        memory_limit_bytes=2**30,
        choices=tuple(subspace.items()),
    )


def write_evaluate_job(folder: Path, population: Sequence[tuple[str, ...]]) -> Job[Evaluate]:
    write_npz(folder / "held_out.npz", samples(seed=2))
    (folder / "evaluation").write_bytes(encode_program(program("evaluate")))
    (folder / "weights").write_bytes(encode_arrays(start()))
    return Job(
        work=Evaluate(settings=EvaluationSettings(batch_size=BATCH, population=tuple(population))),
        program_path=folder / "evaluation",
        weights_path=folder / "weights",
        data=str(folder / "held_out.npz"),
        memory_limit_bytes=2**30,
        output_path=Path("unused"),
        client_id="laptop",
    )


def of_subspace(weights: Mapping[str, Array], choices: Mapping[str, tuple[str, ...]]) -> dict[str, Array]:
    """The tensors of the operators in the subspace."""
    removed = tuple(
        f"{choice}.{name}." for choice, selected in choices.items() for name in CHOICES[choice] if name not in selected
    )
    return {name: array for name, array in weights.items() if not name.startswith(removed)}

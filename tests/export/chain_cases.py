"""Supernets for the tests of chains, and a runner that executes their chains piece by piece, as a device does."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from subfleet.elastic.families.records.choices import ChoiceCnn, ChoiceRnn
from subfleet.elastic.network import Family
from subfleet.export.chains.supernets import read_torch_pieces
from subfleet.export.requests import EvaluateRequest, TrainRequest
from subfleet.export.targets import find_target
from subfleet.protocol.chains import LinkOperator, name_program
from subfleet.protocol.programs import PieceProgram, Program
from subfleet.protocol.submodel import Architecture
from subfleet.protocol.tensors import decode_container
from subfleet.protocol.training import ObjectiveSettings, OptimiserSettings

CNN = ChoiceCnn(
    input_shape=(2, 8, 8),
    class_count=3,
    widths=(8, 12),
    depths=(2, 2),
    last_widths=(16,),
    operators=(("dsconv3_half", "mbconv3_double", "identity"),),
    norm="batch",
)
RNN = ChoiceRnn(
    input_shape=(6,),
    class_count=5,
    vocabulary=5,
    widths=(8,),
    depths=(2,),
    embedding_width=4,
    operators=(("gru", "quasi_rnn", "conv5", "identity"),),
)
PATHS: Mapping[str, tuple[Family, tuple[str, ...]]] = {
    "cnn": (CNN, ("dsconv3_half", "identity", "mbconv3_double", "mbconv3_double")),
    "rnn": (RNN, ("quasi_rnn", "gru")),
}
CLIPPED = OptimiserSettings(momentum=0.9, weight_decay=0.01, max_gradient_norm=0.3)


def objective_of(model: Family) -> ObjectiveSettings:
    return ObjectiveSettings(name="next_token" if isinstance(model, ChoiceRnn) else "cross_entropy")


def train_request(
    model: Family,
    target: str,
    *,
    optimiser: OptimiserSettings = CLIPPED,
    objective: ObjectiveSettings | None = None,
    architecture: Architecture | None = None,
) -> TrainRequest:
    return TrainRequest(
        model=model,
        architecture=Architecture() if architecture is None else architecture,
        target=target,
        batch_size=4,
        objective=objective_of(model) if objective is None else objective,
        optimiser=optimiser,
    )


def evaluate_request(model: Family, target: str) -> EvaluateRequest:
    return EvaluateRequest(
        model=model, architecture=Architecture(), target=target, batch_size=4, objective=objective_of(model).plain
    )


def runner_of(program: Program) -> Callable[[str, Mapping[str, Tensor]], dict[str, Tensor]]:
    """A function that runs the named program of a chain; inputs and outputs are tensors by name."""
    pieces = {piece.name: piece for piece in program.manifest.pieces}
    if program.manifest.target == "torch":
        steps = read_torch_pieces(program)
        return lambda name, inputs: _named(pieces[name], steps[name].run(*inputs.values()))
    bodies, target = decode_container(program.body).tensors, find_target(program.manifest.target)
    return lambda name, inputs: _named(pieces[name], target.run(bytes(bodies[name].data), inputs))


def _named(piece: PieceProgram, results: tuple[Tensor, ...]) -> dict[str, Tensor]:
    return {value.name: result for value, result in zip(piece.outputs, results, strict=True)}


class PathRun:
    """Trains and evaluates a path of a chain.

    Args:
        program: The supernet's program.
        path: The operator of each choice.
        weights: The supernet's parameters and buffers by name; training changes a copy, `self.weights`.
    """

    def __init__(self, program: Program, path: tuple[str, ...], weights: Mapping[str, Tensor]) -> None:
        chain = program.manifest.chain
        assert chain is not None
        drawn, self._operators = iter(path), list[LinkOperator]()
        for link in chain.links:
            name = next(drawn) if link.open else ""
            self._operators.append(next(operator for operator in link.operators if operator.name == name))
        self.path = [operator for operator in self._operators if operator.piece]
        self.weights, self.states = dict(weights), dict[str, Tensor]()
        self._pieces = {piece.name: piece for piece in program.manifest.pieces}
        self._run = runner_of(program)

    def train(self, batch: Mapping[str, Tensor], optimiser: OptimiserSettings) -> dict[str, Tensor]:
        """One step on a batch: input, label, sample_mask, batch_weight and learning_rate, by role."""
        operator_inputs, read = list[Tensor](), batch["input"]
        for operator in self.path[:-1]:
            operator_inputs.append(read)
            results = self._results(operator, "forward", {**batch, "features": read, "input": read})
            read = results.pop("given")
            self._take(operator, results)
        head_results = self._results(self.path[-1], "backward", {**batch, "features": read})
        self._take(self.path[-1], {name: tensor for name, tensor in head_results.items() if name.startswith("new.")})
        gradient = head_results["read_gradient"]
        gradients = {len(self.path) - 1: head_results}
        for index in reversed(range(len(self.path) - 1)):
            inputs = {
                **batch,
                "input": operator_inputs[index],
                "features": operator_inputs[index],
                "features_gradient": gradient,
            }
            gradients[index] = self._results(self.path[index], "backward", inputs)
            gradient = gradients[index].get("read_gradient", gradient)
        scale = self._scale(gradients, optimiser)
        for index, operator in enumerate(self.path):
            if name_program(operator.piece, "update") in self._pieces:
                inputs = {**batch, **gradients[index], "gradient_scale": scale}
                self._take(operator, self._results(operator, "update", inputs))
        return {name: head_results[name] for name in ("loss", "correct", "count")}

    def evaluate(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Loss, correct, count and logits of a batch."""
        read = batch["input"]
        for operator in self.path[:-1]:
            read = self._results(operator, "forward", {"features": read, "input": read})["given"]
        return self._results(self.path[-1], "evaluate", {**batch, "features": read})

    @staticmethod
    def _scale(gradients: Mapping[int, Mapping[str, Tensor]], optimiser: OptimiserSettings) -> Tensor:
        own = (t for results in gradients.values() for name, t in results.items() if name.startswith("gradient."))
        norm = float(sum(tensor.double().square().sum() for tensor in own)) ** 0.5
        most = optimiser.max_gradient_norm
        return torch.tensor(min(1.0, most / (norm + 1e-6)) if most else 1.0)

    def _results(self, operator: LinkOperator, step: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        piece = self._pieces[name_program(operator.piece, step)]
        inputs: dict[str, Tensor] = {}
        for value in piece.inputs:
            key = f"{operator.piece}/{operator.prefix}/{value.name}"  # links without a choice may share a prefix
            if value.role in ("parameter", "buffer"):
                inputs[value.name] = self.weights[operator.prefix + value.tensor]
            elif value.role == "optimiser_state":
                inputs[value.name] = self.states.get(key, torch.zeros(value.shape))
            else:
                inputs[value.name] = tensors[value.name if value.role == "gradient" else value.role]
        return self._run(piece.name, inputs)

    def _take(self, operator: LinkOperator, results: Mapping[str, Tensor]) -> None:
        for new, tensor in results.items():
            kind, _, name = new.removeprefix("new.").partition(".")
            if kind in ("parameter", "buffer"):
                self.weights[operator.prefix + name] = tensor
            else:
                self.states[f"{operator.piece}/{operator.prefix}/{new.removeprefix('new.')}"] = tensor

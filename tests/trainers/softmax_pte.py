"""The hand-written training step of `softmax_program` as an ExecuTorch program."""

from pathlib import Path

import torch
from trainers.softmax_program import BATCH, CLASSES, FEATURES, MOMENTUM, SHAPE, manifest

from subfleet.protocol.programs import Program


class Step(torch.nn.Module):
    def forward(self, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        samples, labels, mask, rate, weight, bias, weight_momentum, bias_momentum = values
        flat = samples.reshape(BATCH, FEATURES)
        logits = flat @ weight + bias
        one_hot = (labels.unsqueeze(1) == torch.arange(CLASSES)).to(torch.float32)
        probabilities = torch.softmax(logits, 1)
        errors = (probabilities - one_hot) * mask.unsqueeze(1) / mask.sum()
        loss = -(torch.log_softmax(logits, 1) * one_hot * mask.unsqueeze(1)).sum() / mask.sum()
        correct = ((logits.argmax(1) == labels).to(torch.float32) * mask).sum()
        weight_momentum = MOMENTUM * weight_momentum + flat.transpose(0, 1) @ errors
        bias_momentum = MOMENTUM * bias_momentum + errors.sum(0)
        return (
            loss,
            correct,
            bias_momentum,
            bias - rate * bias_momentum,
            weight - rate * weight_momentum,
            weight_momentum,
        )


class Linear(torch.nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(weight)

    def forward(self, samples: torch.Tensor) -> torch.Tensor:
        return samples.flatten(1) @ self.weight


def _write(module: torch.nn.Module, arguments: tuple[torch.Tensor, ...]) -> bytes:
    from executorch.exir import EdgeCompileConfig, to_edge  # takes seconds, and collecting does not need it

    edge = to_edge(torch.export.export(module, arguments), compile_config=EdgeCompileConfig(_check_ir_validity=False))
    return bytes(edge.to_executorch().buffer)


def pte_program() -> Program:
    kinds = {"F32": torch.float32, "I64": torch.int64}
    plain = manifest("executorch")
    arguments = tuple(torch.ones(value.shape, dtype=kinds[value.dtype]) for value in plain.inputs)
    return Program(manifest=plain, body=_write(Step(), arguments))


def write_pte_model(path: Path, weight: torch.Tensor, batch: int) -> None:
    path.write_bytes(_write(Linear(weight), (torch.zeros(batch, *SHAPE),)))

"""Recomputed blocks give the same step, bit for bit, and store fewer activations."""

import pytest
import torch
from export.step_rig import example, run, step_of_module
from torch import Tensor, fx, nn

from subfleet.export.steps.recompute import blocks_of
from subfleet.export.tracing import trace
from subfleet.protocol.errors import ExportError

aten = torch.ops.aten


class Block(nn.Module):
    """A block with everything that a second run could get wrong: randomness, statistics, a keyword, two results."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6)
        self.layer = nn.Linear(6, 6)
        self.drop = nn.Dropout(0.4)

    def forward(self, x: Tensor, total: Tensor, *, scale: float = 1.0) -> tuple[Tensor, Tensor]:
        return x + self.drop(torch.relu(self.layer(self.norm(x)))) * scale, total + x.detach()


class Network(nn.Module):
    """Blocks in a list, with one of them used twice, and a head that shares its weight with the stem."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(6, 6)
        self.head.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        x, total = self.stem(x), torch.zeros_like(x)
        for block in (*self.blocks, self.blocks[0]):
            x, total = block(x, total, scale=0.5)
        out: Tensor = self.head(x) + total * 0.1
        return out


def test_blocks_are_found_below_containers() -> None:
    leaves = nn.Sequential(nn.Linear(6, 6), nn.ReLU())
    nested = nn.Sequential(nn.Linear(6, 6), nn.Sequential(Block(), nn.Sequential(nn.Linear(6, 6), nn.ReLU())))
    assert list(blocks_of(Network())) == ["blocks.0", "blocks.1"]
    assert list(blocks_of(nested)) == ["1.0", "1.1"]
    with pytest.raises(ExportError, match="recompute finds no block"):
        blocks_of(leaves)
    with pytest.raises(ExportError, match="recompute finds no block"):
        step_of_module(leaves, (6,), recompute=True)


def test_the_step_is_the_same_bit_by_bit() -> None:
    network = Network()
    plain, frugal = step_of_module(network, (6,)), step_of_module(network, (6,), recompute=True)
    assert (plain.inputs, plain.outputs) == (frugal.inputs, frugal.outputs)
    assert sum(value.role == "random" for value in plain.inputs) == 3
    inputs = example(plain)
    results = run(plain, inputs)
    for name, result in run(frugal, inputs).items():
        assert torch.equal(result, results[name]), name
    assert "forward" not in vars(network.blocks[0])


@pytest.mark.slow
def test_the_second_run_waits_for_the_gradient() -> None:
    """A runtime could merge it with the first run, or start it early, if both had the same inputs."""
    graph = trace(step_of_module(Network(), (6,), recompute=True), {})
    norms = [node for node in graph.graph.nodes if node.target == aten.rsqrt.default]
    assert len(norms) == 6  # three calls of a block, each twice
    (loss,) = (node for node in graph.graph.nodes if node.target == aten._log_softmax.default)
    assert [loss in ancestors(norm) for norm in norms] == [False] * 3 + [True] * 3


def ancestors(node: fx.Node) -> set[fx.Node]:
    """All nodes on which a node depends."""
    nodes: set[fx.Node] = set()
    todo = [node]
    while todo:
        for argument in todo.pop().all_input_nodes:
            if argument not in nodes:
                nodes.add(argument)
                todo.append(argument)
    return nodes

"""An exported network has the same logits before and after it grew: FedTrans' invariant T1 on devices.

The same holds for a union of networks and each of its members.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import product

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL
from elastic.test_cells import weights_of
from elastic.token_cases import VIT
from export.export_cases import RESNET
from matrices import mostly_long
from torch import Tensor

from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.families.records.plain import Vgg
from subfleet.elastic.families.records.residual import Mlp
from subfleet.elastic.growing import can_deepen, deepen_cell, widen_cells
from subfleet.elastic.inheriting import inherit
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication, size_in
from subfleet.elastic.unions import unite_families
from subfleet.export.programs import export_inference_model
from subfleet.export.requests import InferRequest
from subfleet.export.targets import TARGETS
from subfleet.export.versions import TARGET_NAMES

pytestmark = [pytest.mark.export, pytest.mark.slow]

CASES: Mapping[str, Family] = {
    "resnet": RESNET,
    "plain cnn": CONVOLUTIONAL["vgg"],
    "mobilenet": CONVOLUTIONAL["mobilenet_v3"],
    "nas-bench-201": CONVOLUTIONAL["nas_bench_201"],
    "vit": VIT,
}


def logits(target: str, network: Network, state: Mapping[str, Tensor], inputs: Tensor) -> Tensor:
    request = InferRequest(
        model=network.config, architecture=network.full_architecture(), target=target, weights_sha256="0" * 64
    )
    body, _ = export_inference_model(request, state)
    return torch.cat([TARGETS[target].run(body, {"input": sample})[0] for sample in torch.split(inputs, 1)])


@pytest.mark.parametrize(
    ("target", "case"),
    mostly_long(product(TARGET_NAMES, CASES), ("onnx", "resnet"), ("executorch", "plain cnn"), ("onnx", "vit")),
)
def test_every_cell_wider_and_deeper_gives_the_same_logits(target: str, case: str) -> None:
    before = network_of(CASES[case])
    config = widen_cells(before.config, [cell.name for cell in before.cells if cell.axes], 1.5)
    deepened = [cell for cell in before.cells if can_deepen(before, cell)]
    for cell in deepened:
        config = deepen_cell(config, cell)
    after = network_of(config)
    assert len(after.cells) == len(before.cells) + len(deepened) > len(before.cells)
    replication = Replication.draw(after, size_in(after, before), random.Random(1))
    state = {name: tensor.float() for name, tensor in weights_of(before).items()}
    lineage = Replicated(sources=tuple(sorted(replication.sources.items())))
    grown = inherit(lineage, after, before, state, seed=2)
    inputs = torch.randn(3, *before.config.input_shape, generator=torch.Generator().manual_seed(1))
    old_logits, new_logits = (
        logits(target, network, weights, inputs) for network, weights in ((before, state), (after, grown))
    )
    torch.testing.assert_close(new_logits, old_logits, rtol=1e-5, atol=1e-5 * max(1.0, float(old_logits.abs().max())))


UNITED: Mapping[str, tuple[Family, ...]] = {
    "vgg": (
        Vgg(input_shape=(1, 8, 8), class_count=4, widths=(4, 6), depths=(1, 2), norm="batch"),
        Vgg(input_shape=(1, 8, 8), class_count=4, widths=(8, 6), depths=(2, 1), norm="batch"),
        Vgg(
            input_shape=(1, 8, 8),
            class_count=4,
            widths=(4, 6),
            depths=(2, 3),
            norm="batch",
            layer_widths=(8, 4, 6, 12, 6),
        ),
    ),
    "resnet": (
        replace(RESNET, widths=(4, 4), depths=(1, 2)),
        replace(RESNET, widths=(8, 4), depths=(2, 1)),
        replace(RESNET, widths=(4, 12), depths=(1, 1), hidden_widths=(8, 4)),
    ),
    "mlp": (
        Mlp(input_shape=(5,), class_count=4, widths=(4,), depths=(1,)),
        Mlp(input_shape=(5,), class_count=4, widths=(12,), depths=(2,)),
        Mlp(input_shape=(5,), class_count=4, widths=(8,), depths=(3,), hidden_widths=(4, 12, 4)),
    ),
}


@pytest.mark.parametrize(
    ("target", "case"), mostly_long(product(TARGET_NAMES, UNITED), ("executorch", "mlp"), ("onnx", "vgg"))
)
def test_a_union_of_networks_gives_the_logits_of_each_member(target: str, case: str) -> None:
    """FedADP's invariant P1 on devices: a client's network, extended to the union, computes the same as before."""
    union = network_of(unite_families(UNITED[case]))
    inputs = torch.randn(3, *union.config.input_shape, generator=torch.Generator().manual_seed(1))
    for seed, family in enumerate(UNITED[case]):
        own = network_of(family)
        state = {name: tensor.float() for name, tensor in weights_of(own).items()}
        replication = Replication.draw(union, size_in(union, own), random.Random(seed))
        assert replication.sources or replication.lacking, "a member that is the union shows nothing"
        united = replication.grow(state, init_state(union, 3))
        old_logits, new_logits = (
            logits(target, network, weights, inputs) for network, weights in ((own, state), (union, united))
        )
        torch.testing.assert_close(
            new_logits, old_logits, rtol=1e-5, atol=1e-5 * max(1.0, float(old_logits.abs().max()))
        )

"""A network that grew gives, exported, the logits of the one that it grew from: FedTrans' invariant T1 on devices."""

import random
from collections.abc import Mapping

import pytest
import torch
from elastic.elastic_cases import CONVOLUTIONAL
from elastic.test_cells import weights_of
from elastic.token_cases import VIT
from export.export_cases import RESNET
from torch import Tensor

from subfleet.elastic.building import network_of
from subfleet.elastic.cells import can_deepen, cells_of, deepened, widened
from subfleet.elastic.inheriting import inherited
from subfleet.elastic.lineage import Replicated
from subfleet.elastic.network import Family, Network
from subfleet.elastic.replication import Replication, size_in
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
    request = InferRequest(model=network.config, spec=network.full_spec(), target=target, weights_sha256="0" * 64)
    body, _ = export_inference_model(request, state)
    return torch.cat([TARGETS[target].run(body, {"input": sample})[0] for sample in torch.split(inputs, 1)])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("target", TARGET_NAMES)
def test_every_cell_wider_and_deeper_gives_the_same_logits(target: str, case: str) -> None:
    before = network_of(CASES[case])
    config = widened(before.config, [cell.name for cell in cells_of(before) if cell.axes], 1.5)
    for cell in cells_of(before):
        if can_deepen(before, cell):
            config = deepened(config, cell)
    after = network_of(config)
    assert len(cells_of(after)) == 2 * len(cells_of(before))
    drawn = Replication.drawn(after, size_in(after, before), random.Random(1))
    state = {name: tensor.float() for name, tensor in weights_of(before).items()}
    how = Replicated(sources=tuple(sorted(drawn.sources.items())))
    grown = inherited(how, after, before, state, seed=2)
    inputs = torch.randn(3, *before.config.input_shape, generator=torch.Generator().manual_seed(1))
    then, now = (logits(target, one, of, inputs) for one, of in ((before, state), (after, grown)))
    torch.testing.assert_close(now, then, rtol=1e-5, atol=1e-5 * max(1.0, float(then.abs().max())))

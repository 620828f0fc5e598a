import pytest
import torch
from elastic.elastic_cases import MLP, random_state

from subfleet.elastic.evaluate import evaluate
from subfleet.elastic.families import build_module, network_of
from subfleet.elastic.maps import extract
from subfleet.elastic.spaces import uniform_space
from subfleet.protocol.errors import DataError


def test_it_is_the_accuracy_and_loss_of_the_subnet_itself() -> None:
    network = network_of(MLP)
    state, spec = random_state(network, 1), uniform_space(network, (0.5, 1))[1]
    inputs = torch.randn(37, 5, generator=torch.Generator().manual_seed(2))
    module = build_module(network, spec)
    module.load_state_dict(extract(network, spec, state))
    logits = module(inputs).detach()
    labels = logits.argmax(dim=1)
    labels[:10] = (labels[:10] + 1) % 4
    for batch_size in (5, 37, 256):
        found = evaluate(network, spec, state, inputs, labels, batch_size=batch_size)
        assert found.accuracy == 27 / 37
        assert found.loss == pytest.approx(float(torch.nn.functional.cross_entropy(logits, labels)), rel=1e-4)


@pytest.mark.parametrize(("inputs", "labels"), [(0, 0), (3, 2)])
def test_samples_must_be_there_and_labelled(inputs: int, labels: int) -> None:
    network = network_of(MLP)
    with pytest.raises(DataError, match="equally many"):
        evaluate(
            network,
            network.full_spec(),
            random_state(network, 1),
            torch.zeros(inputs, 5),
            torch.zeros(labels, dtype=torch.int64),
        )

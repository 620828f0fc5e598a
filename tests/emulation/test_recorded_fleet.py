"""A fleet of unequal devices trains a module of one's own, whose trained weights load back into it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache

import pytest
import torch
from elastic.recorded_cases import Residual
from emulation.batch_cases import client, config, part
from matrices import mostly_long
from safetensors.torch import load
from torch import Tensor, nn

from subfleet.elastic.building import init_state, network_of
from subfleet.elastic.families.records.recorded import Recorded
from subfleet.elastic.model_state import unpack_state
from subfleet.elastic.recording.adapters import add_adapters
from subfleet.elastic.recording.inputs import InputPart
from subfleet.elastic.recording.loading import record_network
from subfleet.elastic.recording.tuning import LoraSettings
from subfleet.elastic.update_form import list_frozen
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.emulation.method_checks import check_method
from subfleet.export.pool import ExportPool
from subfleet.journal.records import ClientRow
from subfleet.methods import METHODS
from subfleet.methods.fedadp import FedADP
from subfleet.methods.fedtrans import FedTrans
from subfleet.protocol.training import TrainingSettings
from subfleet.settings.named_networks import declare_network

pytestmark = [pytest.mark.slow, pytest.mark.export]


class Mine(nn.Module):
    """Two convolutions side by side, and attention over places with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Conv2d(1, 48, 3, padding=1), nn.Conv2d(1, 16, 1)
        self.norm = nn.BatchNorm2d(64)
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        features = torch.relu(self.norm(torch.cat([self.wide(images), self.narrow(images)], 1)))
        tokens = nn.functional.avg_pool2d(features, 2).flatten(2).transpose(1, 2)
        tokens = tokens + self.attention(tokens, tokens, tokens, need_weights=False)[0]
        logits: Tensor = self.head(tokens.mean(1))
        return logits


@pytest.mark.parametrize(("runtime", "few_bytes"), [("onnx", 2_900_000), ("executorch", 2_300_000)])
def test_unequal_devices_train_parts_of_it(runtime: str, few_bytes: int, exports: ExportPool) -> None:
    if runtime == "executorch":
        pytest.importorskip("executorch")
    model = record_network(Mine(), (1, 8, 8))
    devices = tuple(
        client(name, index, free_bytes, runtime=runtime)
        for index, (name, free_bytes) in enumerate((("ada", few_bytes), ("bob", 10**8), ("cyd", 10**8)))
    )
    run = config(
        model=model,
        targets=(runtime,),
        rates=(0.25, 1.0),
        rounds=3,
        training=TrainingSettings(epochs=4, batch_size=8, learning_rate=0.1),
    )
    result = run_batch(GatheredRun(run=run, devices=devices, evaluation=part(10)), exports)
    last = {row.client_id: row for row in result.rounds[-1].clients}
    assert {name: row.architecture for name, row in last.items()} == {"ada": "w1/4", "bob": "w1", "cyd": "w1"}
    trained, samples = Mine(), part(10)
    trained.load_state_dict(dict(unpack_state(load(result.model)).shared))
    predicted = trained.eval()(torch.from_numpy(samples.inputs)).argmax(1)
    assert float((predicted == torch.from_numpy(samples.labels)).float().mean()) == pytest.approx(
        result.rounds[-1].accuracy
    )


class Halves(nn.Module):
    """Classifies images by their upper and their lower half, which are inputs of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.upper, self.lower, self.head = nn.Linear(32, 40), nn.Linear(32, 40), nn.Linear(80, 10)

    def forward(self, lower: Tensor, upper: Tensor) -> Tensor:
        features = torch.cat([self.upper(upper), self.lower(lower.flatten(1))], 1)
        logits: Tensor = self.head(features.relu())
        return logits


def test_a_module_with_several_inputs_is_trained(exports: ExportPool) -> None:
    inputs = {"upper": InputPart(shape=(32,)), "lower": InputPart(shape=(1, 4, 8))}
    parts = [replace(part(index), inputs=part(index).inputs.reshape(-1, 64)) for index in (0, 1, 10)]
    devices = tuple(
        replace(client(name, index, 10**8, runtime=runtime), data=parts[index], test=None)
        for index, (name, runtime) in enumerate((("ada", "onnx"), ("bob", "torch")))
    )
    run = config(
        model=record_network(Halves(), (), inputs=inputs),
        min_clients=2,
        targets=("onnx", "torch"),
        rates=(0.5, 1.0),
        rounds=2,
        training=TrainingSettings(epochs=4, batch_size=8, learning_rate=0.1),
    )
    result = run_batch(GatheredRun(run=run, devices=devices, evaluation=parts[-1]), exports)
    trained = Halves()
    trained.load_state_dict(dict(unpack_state(load(result.model)).shared))
    images = torch.from_numpy(parts[-1].inputs)
    predicted = trained(upper=images[:, :32], lower=images[:, 32:].reshape(-1, 1, 4, 8)).argmax(1)
    accuracy = float((predicted == torch.from_numpy(parts[-1].labels)).float().mean())
    assert accuracy == pytest.approx(result.rounds[-1].accuracy)
    assert accuracy > 0.5, "of ten classes"


class Block(nn.Module):
    """Adds a bottleneck with a norm to its input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide, self.norm = nn.Conv2d(width, 2 * width, 3, padding=1), nn.GroupNorm(2, 2 * width)
        self.last = nn.Conv2d(2 * width, width, 1)

    def forward(self, images: Tensor) -> Tensor:
        added: Tensor = self.last(torch.relu(self.norm(self.wide(images))))
        return images + added


@cache
def residual() -> Recorded:
    """Two sections of residual blocks."""
    with torch.random.fork_rng():
        torch.random.set_rng_state(torch.Generator().manual_seed(1).get_state())
        module = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.Sequential(Block(16), Block(16)),
            nn.Conv2d(16, 24, 3, stride=2, padding=1),
            nn.Sequential(Block(24), Block(24)),
            nn.GroupNorm(2, 24),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(24, 10),
        )
    return record_network(module, (1, 8, 8))


SEARCHING = "fedoras"
"""The method that needs a network with a choice of operators."""


@pytest.mark.parametrize("name", mostly_long([name for name in METHODS if name != SEARCHING], "nefl"))
def test_every_method_trains_it(name: str, exports: ExportPool) -> None:
    assert check_method(METHODS.load(name)(), exports, model=residual()) == "ok"


@pytest.mark.long
def test_a_module_grows_while_it_is_trained(exports: ExportPool) -> None:
    """FedTrans makes its blocks wider, and then repeats them."""
    method = FedTrans(first="configured", beta=1e9, gamma=1, delta=1, stop_rounds=0, alpha=0.0)
    devices = tuple(client(name, index, 10**8, runtime="torch") for index, name in enumerate(("ada", "bob", "cyd")))
    run = config(model=residual(), targets=("torch",), rounds=12, method=method, communication_s=12.0)
    result = run_batch(GatheredRun(run=run, devices=devices, evaluation=part(10)), exports)
    networks = {record.lineage.id: network_of(record.lineage.config) for record in result.result.networks}
    first, wider, deeper, *_ = networks.values()
    blocks = [block.name for block in first.blocks]
    assert [block.name for block in wider.blocks] == blocks
    assert {name: axis.size for name, axis in wider.axes.items() if axis.size != first.axes[name].size} == {
        f"{name}.wide": 2 * first.axes[f"{name}.wide"].size for name in blocks
    }
    assert [block.name for block in deeper.blocks] == ["1.0", "1.2", "1.1", "1.3", "3.0", "3.2", "3.1", "3.3"]
    trained = {row.architecture for record in result.rounds for row in record.clients if row.status == "aggregated"}
    assert any(architecture.startswith("m1") for architecture in trained)


class Sized(nn.Module):
    """A network of any width and depth."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(1, width, 3, padding=1), nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Residual(width) for _ in range(depth)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.head(self.blocks(torch.relu(self.norm(self.stem(images)))).mean((2, 3)))
        return logits


def test_devices_bring_modules_of_their_own_sizes(exports: ExportPool) -> None:
    """FedADP trains each in a union, which has the width of one and the depth of another."""
    networks = {
        "narrow": record_network(Sized(8, 2), (1, 8, 8)),
        "wide": record_network(Sized(16, 1), (1, 8, 8)),
        "model": record_network(Sized(4, 1), (1, 8, 8)),
    }
    run = config(
        model=networks["model"], networks=networks, targets=("torch",), method=FedADP(choice="declared"), rounds=2,
        communication_s=4.0,
    )  # fmt: skip
    devices = tuple(
        replace(device, profile=replace(device.profile, network=declare_network(networks[name], networks)))
        for index, name in enumerate(("narrow", "wide", "narrow"))
        for device in [client(f"{name}-{index}", index, 10**8, runtime="torch")]
    )
    result = run_batch(GatheredRun(run=run, devices=devices, evaluation=part(10)), exports)
    (union,) = (record.lineage for record in result.result.networks if record.lineage.living)
    network = network_of(union.config)
    assert {block.name for block in network.blocks} == {"blocks.0", "blocks.1"}
    assert network.axes["stem"].size == 16
    parameters = {row.client_id: row.parameters for row in result.rounds[-1].clients if row.status == "aggregated"}
    assert parameters == {
        f"{name}-{index}": network_of(networks[name]).parameter_count(network_of(networks[name]).full_architecture())
        for index, name in enumerate(("narrow", "wide", "narrow"))
    }


def test_adapters_are_trained_and_sent_alone(exports: ExportPool) -> None:
    """Devices train adapters of all widths on three runtimes; everything else keeps its bits."""
    whole = nn.Sequential(
        nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )
    plain = record_network(whole, (1, 8, 8))
    add_adapters(whole, LoraSettings(rank=4, targets=("1", "3"), train=("5",)))
    adapted = record_network(whole, (1, 8, 8))
    (_, plain_rows), _ = train_on_every_runtime(plain, exports)
    (first_rows, rows), trained = train_on_every_runtime(adapted, exports)
    network = network_of(adapted)
    frozen, first = list_frozen(network), init_state(network, 5)
    assert frozen == {"1.weight", "1.bias", "3.weight", "3.bias"}
    assert {name for name, tensor in trained.items() if torch.equal(tensor, first[name])} == frozen
    for device, row in rows.items():
        assert (row.status, row.architecture) == ("aggregated", "w1")
        assert row.update_bytes == 4 * sum(trained[name].numel() for name in trained.keys() - frozen)
        assert row.planned_peak_bytes < plain_rows[device].planned_peak_bytes
        frozen_bytes = 4 * sum(trained[name].numel() for name in frozen)
        assert row.bytes_down < frozen_bytes < first_rows[device].bytes_down, "it is fetched once"


def train_on_every_runtime(
    model: Recorded, exports: ExportPool
) -> tuple[list[dict[str, ClientRow]], Mapping[str, Tensor]]:
    """The clients of each round, and the trained model."""
    runtimes = {"ada": "onnx", "bob": "executorch", "cyd": "torch"}
    devices = tuple(
        client(name, index, 10**8, runtime=runtime) for index, (name, runtime) in enumerate(runtimes.items())
    )
    run = config(model=model, targets=tuple(runtimes.values()), rounds=2, communication_s=4.0, seed=5)
    result = run_batch(GatheredRun(run=run, devices=devices, evaluation=part(10)), exports)
    rows = [{row.client_id: row for row in record.clients} for record in result.rounds]
    return rows, unpack_state(load(result.model)).shared

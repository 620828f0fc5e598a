"""A fleet of unequal devices trains a module of one's own, whose trained weights load back into it."""

import pytest
import torch
from emulation.batch_cases import client, config, part
from safetensors.torch import load
from torch import Tensor, nn

from subfleet.elastic.model_state import unpack_state
from subfleet.elastic.recording.loading import record_network
from subfleet.emulation.batch.run import run_batch
from subfleet.emulation.gathering import GatheredRun
from subfleet.export.pool import ExportPool
from subfleet.protocol.training import TrainingSettings

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


@pytest.mark.parametrize(("runtime", "few_bytes"), [("onnx", 2_900_000), ("executorch", 3_600_000)])
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
    assert {name: row.architecture for name, row in last.items()} == {"ada": "w1/4 d1", "bob": "w1 d1", "cyd": "w1 d1"}
    trained, samples = Mine(), part(10)
    trained.load_state_dict(dict(unpack_state(load(result.model)).shared))
    predicted = trained.eval()(torch.from_numpy(samples.inputs)).argmax(1)
    assert float((predicted == torch.from_numpy(samples.labels)).float().mean()) == pytest.approx(
        result.rounds[-1].accuracy
    )

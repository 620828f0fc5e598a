"""A module with several inputs is recorded with samples that hold them one after another."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from subfleet.elastic.building import build_module, network_of
from subfleet.elastic.recording.inputs import InputPart
from subfleet.elastic.recording.loading import record_network
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.submodel import Architecture, Prefix
from subfleet.settings.reading import read_run

INPUTS = {
    "tokens": InputPart(shape=(6,), symbols=30),
    "kinds": InputPart(shape=(6,), symbols=2),
    "mask": InputPart(shape=(6,)),
    "image": InputPart(shape=(1, 4, 5)),
}


class Several(nn.Module):
    """Tokens of two kinds, some of them left out, and an image."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds = nn.Embedding(30, 8), nn.Embedding(2, 8)
        self.conv, self.head = nn.Conv2d(1, 6, 3), nn.Linear(14, 3)

    def forward(self, tokens: Tensor, kinds: Tensor, image: Tensor, mask: Tensor) -> dict[str, Tensor]:
        embedded = (self.tokens(tokens) + self.kinds(kinds)) * mask[:, :, None]
        seen = self.conv(image).relu().mean((2, 3))
        return {"logits": self.head(torch.cat([embedded.sum(1), seen], 1))}


class Tokens(nn.Module):
    """Tokens alone, of two vocabularies."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.kinds, self.head = nn.Embedding(30, 8), nn.Embedding(2, 8), nn.Linear(8, 3)

    def forward(self, tokens: Tensor, kinds: Tensor) -> Tensor:
        logits: Tensor = self.head((self.tokens(tokens) + self.kinds(kinds)).mean(1))
        return logits


def test_each_input_gets_its_part_of_a_sample() -> None:
    module, generator = Several(), torch.Generator().manual_seed(0)
    family = record_network(module, (), inputs=INPUTS)
    assert (family.input_shape, family.record().symbols) == ((6 + 6 + 6 + 20,), 0)
    network = network_of(family)
    assert network.axes["tokens"].size == 8
    tokens, kinds = (torch.randint(count, (4, 6), generator=generator) for count in (30, 2))
    mask, image = torch.rand(4, 6, generator=generator), torch.rand(4, 1, 4, 5, generator=generator)
    whole = build_module(network, network.full_architecture()).eval()
    whole.load_state_dict(module.state_dict())
    logits = whole(torch.cat([tokens, kinds, mask, image.flatten(1)], 1))
    assert torch.equal(logits, module(tokens=tokens, kinds=kinds, mask=mask, image=image)["logits"])
    half = Architecture(axes=(("conv", Prefix(size=3)), ("tokens", Prefix(size=4))))
    assert build_module(network, half)(torch.rand(4, 38, generator=generator)).shape == (4, 3)


def test_samples_of_tokens_alone_are_tokens() -> None:
    module = Tokens()
    family = record_network(module, (), inputs={name: INPUTS[name] for name in ("tokens", "kinds")})
    assert (family.input_shape, family.record().symbols) == ((12,), 30)
    network = network_of(family)
    whole = build_module(network, network.full_architecture())
    whole.load_state_dict(module.state_dict())
    samples = torch.randint(30, (4, 12), generator=torch.Generator().manual_seed(0))
    expected = module(samples[:, :6], samples[:, 6:].clamp(max=1))
    assert torch.equal(whole(samples), expected), "programs are tried with any token of the largest vocabulary"


_RUN = """
base = "quickstart"

[model]
module = "test_recorded_inputs:Tokens"
"""


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ("", "a module needs either input_shape, or inputs if it has several; set one of the two"),
        ("input_shape = [4]\ninputs = { tokens = { shape = [2] } }", "a module needs either input_shape, or inputs"),
        ("symbols = 9\ninputs = { tokens = { shape = [6] } }", "symbols is 9, but each of several inputs has its own"),
        ("inputs = { tokens = { shape = [] } }", r"inputs\.tokens\.shape"),
        ("inputs = { words = { shape = [2], symbols = 9 } }", r"unexpected keyword argument 'words'"),
    ],
)
def test_wrong_inputs_are_refused(keys: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(Path(__file__).parent)
    (tmp_path / "run.toml").write_text(_RUN + keys)
    with pytest.raises(ConfigError, match=message):
        read_run(str(tmp_path / "run.toml"))
    text = "inputs = { tokens = { shape = [6], symbols = 30 }, kinds = { shape = [6], symbols = 2 } }"
    (tmp_path / "right.toml").write_text(_RUN + text)
    assert read_run(str(tmp_path / "right.toml")).model.input_shape == (12,)

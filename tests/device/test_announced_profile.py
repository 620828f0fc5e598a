import json
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from subfleet.device import describing
from subfleet.device.describing import declare_architecture, describe_device
from subfleet.device.meters import Meter
from subfleet.device_profiles import load_profile
from subfleet.protocol.errors import ConfigError
from subfleet.protocol.jobs import DataSummary
from subfleet.protocol.memory_plan import PackingWidth
from subfleet.protocol.schema import canonical_json
from subfleet.protocol.submodel import Architecture, Prefix

SUMMARY = DataSummary(sample_count=3, input_shape=(4,), class_counts=(1, 2))


METER = cast("Meter", None)


@pytest.mark.parametrize(("operators", "macs_per_s"), [((), None), (("Conv", "Gemm"), 2e9)])
def test_a_device_announces_the_settings_of_its_profile(operators: tuple[str, ...], macs_per_s: float | None) -> None:
    architecture = Architecture(axes=(("stream", Prefix(size=4)),)) if operators else None
    profile = replace(
        load_profile("raspberry_pi_4"), operators=operators, macs_per_s=macs_per_s, architecture=architecture
    )
    announced = describe_device("pi", profile, "onnx", SUMMARY, METER)
    assert announced.architecture == architecture
    assert (announced.operators, announced.macs_per_s) == (operators, macs_per_s)
    assert announced.max_training_bytes is None
    limited = describe_device("pi", replace(profile, memory_limit="300M"), "onnx", SUMMARY, METER)
    assert limited.max_training_bytes == 300_000_000
    assert announced.held_out_count == 0
    held_out = replace(SUMMARY, sample_count=7)
    tested = describe_device("pi", profile, "onnx", SUMMARY, METER, held_out=held_out)
    assert (tested.sample_count, tested.held_out_count) == (3, 7)
    assert (announced.device, announced.runtimes, announced.sample_count) == ("raspberry_pi_4", ("onnx",), 3)


@pytest.mark.parametrize(("detected", "of_profile", "announced"), [(8, 8, 8), (32, 8, 32), (16, 64, 64), (8, None, 8)])
def test_the_packing_width_is_the_maximum_of_profile_and_machine(
    detected: PackingWidth, of_profile: PackingWidth | None, announced: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(describing, "detect_packing_width", lambda: detected)
    profile = replace(load_profile("raspberry_pi_4"), packing_width=of_profile)
    assert describe_device("pi", profile, "onnx", SUMMARY, METER).packing_width == announced


def test_a_profile_that_cannot_be_announced_is_one_sentence() -> None:
    profile = replace(load_profile("raspberry_pi_4"), operators=("Conv",) * 1025)
    with pytest.raises(ConfigError, match="cannot be announced: operators has 1025 items, but must have at most 1024"):
        describe_device("pi", profile, "onnx", SUMMARY, METER)


def test_an_architecture_is_given_as_json_or_as_a_file(tmp_path: Path) -> None:
    architecture = Architecture(axes=(("stream", Prefix(size=4)),), blocks=("b1",))
    text = canonical_json(architecture).decode()
    (tmp_path / "mine.json").write_text(text, encoding="utf-8")
    laptop = replace(load_profile("laptop"), network="{}")
    for option in (text, " " + text, str(tmp_path / "mine.json")):
        profile = declare_architecture(laptop, option)
        assert (profile.architecture, profile.network) == (architecture, "")


@pytest.mark.parametrize("network", ['{"preset": "vgg16"}', ' {"family": "mlp", "widths": [8], "depths": [1]}'])
def test_a_network_is_given_as_json_or_as_a_file(network: str, tmp_path: Path) -> None:
    laptop = replace(load_profile("laptop"), architecture=Architecture(name="before"))
    (tmp_path / "mine.json").write_text(network, encoding="utf-8")
    for option in (network, str(tmp_path / "mine.json")):
        profile = declare_architecture(laptop, option)
        assert (profile.architecture, json.loads(profile.network)) == (None, json.loads(network))

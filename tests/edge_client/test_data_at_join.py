"""Data are read when a device joins: unusable data end the command with one sentence that names the file."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from subfleet.edge_client import joining
from subfleet.edge_client.commands import run
from subfleet.edge_client.device_options import DeviceOptions
from subfleet.edge_client.joining import JoinOptions, join
from subfleet.protocol.errors import DataError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.transport.address import BrokerOptions

pytestmark = pytest.mark.slow

X, Y = np.zeros((4, 6), np.float32), np.zeros(4, np.int64)
NOT_A_NUMBER = np.where(np.arange(24).reshape(4, 6) == 7, np.nan, 0).astype(np.float32)


@pytest.mark.parametrize(
    ("arrays", "words"),
    [
        ({"x": np.array([[1, "a"]] * 4, object), "y": Y}, "not a readable .npz file"),
        ({"x": NOT_A_NUMBER, "y": Y}, "inputs contain a value that is not finite"),
        ({"x": X + np.float32(np.inf), "y": Y}, "inputs contain a value that is not finite"),
        ({"x": X.astype(np.complex64), "y": Y}, "inputs are complex64"),
        ({"x": X.astype(bool), "y": Y}, "inputs are bool"),
        ({"x": X.astype("U1"), "y": Y}, "inputs are <U1"),
        ({"x": X[:0], "y": Y[:0]}, "must contain at least one value"),
        ({"x": X, "y": Y[:3]}, "labels are int64 of shape"),
        ({"x": X, "y": Y - 1}, "a label is -1"),
        ({"x": X, "y": Y.astype("M8[s]")}, "labels are datetime64"),
        ({"x": np.full((4, 6), 1e39), "y": Y}, "not finite"),
        ({"x": (X - 1).astype(np.int64), "y": Y}, "indices must be 0 or more"),
        ({"x": X, "labels": Y}, "must contain x and y"),
    ],
)
def test_invalid_arrays_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arrays: dict[str, Any], words: str
) -> None:
    np.savez(tmp_path / "mine.npz", **arrays)
    state = str(tmp_path / "state")
    code = run(["join", "mqtt://127.0.0.1:1", "--data", str(tmp_path / "mine.npz"), "--state", state])
    output = capsys.readouterr().err
    assert code == ExitCode.DATA
    (sentence,) = [line for line in output.splitlines() if line.startswith("subfleet-edge: ")]
    assert "mine.npz" in sentence
    assert words in sentence


def test_held_out_data_of_another_scale_are_refused_when_a_device_joins(tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((20, 6), np.float32)
    labels = np.arange(20) % 2
    np.savez(tmp_path / "train.npz", x=values, y=labels)
    for inputs, held_out_labels, words in (
        (values * 255, labels, "a deviation 255 times as large"),
        (values, labels.astype(np.float32), "classes on one side and numbers on the other"),
    ):
        np.savez(tmp_path / "held.npz", x=inputs, y=held_out_labels)
        options = JoinOptions(
            broker=BrokerOptions(url="mqtt://127.0.0.1:1"),
            data=str(tmp_path / "train.npz"),
            held_out=str(tmp_path / "held.npz"),
            device=DeviceOptions(state=tmp_path / "state"),
        )
        with pytest.raises(DataError, match=rf"held\.npz' do not match the data .*train\.npz': {words}"):
            join(options)


class Joined(Exception):  # noqa: N818 - it only ends the test's join
    """Carries the profile that would be sent."""


@pytest.mark.parametrize("sends", [True, False])
def test_statistics_stay_on_the_device_if_the_option_is_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sends: bool
) -> None:
    def session(settings: Any, *_: object) -> None:
        raise Joined(settings.profile)

    monkeypatch.setattr(joining, "EdgeSession", session)
    options = JoinOptions(
        broker=BrokerOptions(url="mqtt://127.0.0.1:1"),
        data="digits:train",
        device=DeviceOptions(state=tmp_path / "state"),
        tells_statistics=sends,
    )
    with pytest.raises(Joined) as caught:
        join(options)
    (profile,) = caught.value.args
    assert (profile.inputs is not None) == sends
    assert profile.class_counts  # every device sends these

"""The options that name a broker are checked before anything else."""

from pathlib import Path

import pytest

from subfleet.cli.options import read_broker_address
from subfleet.protocol.errors import ConfigError, FileError
from subfleet.transport.address import BrokerAddress

NOTHING: dict[str, None] = {"ca": None, "cert": None, "key": None, "password_file": None}


def test_without_a_broker_the_embedded_one_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBFLEET_PASSWORD", "of a broker elsewhere")
    assert read_broker_address(None, **NOTHING) is None


@pytest.mark.parametrize("name", NOTHING)
def test_an_option_for_a_broker_is_refused_without_one(name: str) -> None:
    with pytest.raises(ConfigError, match=rf"--{name.replace('_', '-')} needs a broker"):
        read_broker_address(None, **{**NOTHING, name: Path("file")})


def test_the_password_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBFLEET_PASSWORD", "word")
    expected = BrokerAddress(host="h", port=1883, username="me", password="word")  # noqa: S106
    assert read_broker_address("mqtt://me@h", **NOTHING) == expected


def test_a_file_that_is_missing_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileError, match=r"absent\.pem cannot be read"):
        read_broker_address("mqtts://h", ca=tmp_path / "absent.pem", cert=None, key=None, password_file=None)

"""What doctor reports on a broker that lacks features which a fleet uses."""

from pathlib import Path

import pytest
from transport.mosquitto import free_port, mosquitto

from subfleet.edge_client.device_options import DeviceOptions
from subfleet.edge_client.doctor import DoctorOptions, examine
from subfleet.protocol.exit_codes import ExitCode
from subfleet.transport.address import BrokerOptions

pytestmark = [pytest.mark.slow, pytest.mark.broker, pytest.mark.usefixtures("healthy")]


def test_each_limit_of_a_broker_is_a_finding_with_its_remedy(tmp_path: Path) -> None:
    port = free_port()
    settings = (f"listener {port} 127.0.0.1", "allow_anonymous true", "retain_available false")
    options = DoctorOptions(
        broker=BrokerOptions(url=f"tcp://127.0.0.1:{port}"), device=DeviceOptions(client_id="pi", state=tmp_path / "s")
    )
    with mosquitto(tmp_path, (*settings, "message_size_limit 1000"), port):
        findings = {finding.check: finding for finding in examine(options).findings}
    assert findings["broker"].code is findings["will"].code is ExitCode.OK
    assert findings["broker"].text.startswith("connected; the broker supports MQTT")
    assert (findings["retained messages"].code, findings["retained messages"].text) == (
        ExitCode.OK,
        "not supported, as the broker states",
    )
    assert "learn of a round up to 2 s later" in findings["retained messages"].remedy
    assert findings["chunks"].code is ExitCode.TRANSPORT
    assert findings["chunks"].remedy == "raise the broker's message limit to at least 65536 bytes"


def test_an_unreachable_broker_is_one_finding(tmp_path: Path) -> None:
    options = DoctorOptions(
        broker=BrokerOptions(url="mqtt://127.0.0.1:1"), device=DeviceOptions(client_id="pi", state=tmp_path / "s")
    )
    (finding,) = [finding for finding in examine(options).findings if finding.check == "broker"]
    assert (finding.code, finding.text) == (ExitCode.TRANSPORT, "cannot be used")
    assert "no broker listens at 127.0.0.1:1" in finding.remedy

"""Arguments and environment of a client process: every user can read its command line."""

from dataclasses import replace
from pathlib import Path

from subfleet.edge_client.options import COMMANDS, make_parser
from subfleet.emulation.client_processes import ClientCommand
from subfleet.transport.address import BrokerAddress, TlsFiles, parse_url


def _make_command(broker: BrokerAddress, folder: Path) -> ClientCommand:
    return ClientCommand(
        client_id="pi",
        broker=broker,
        fleet="main",
        data=folder,
        profile="laptop",
        log=folder,
        state=folder,
        runtime="onnx",
    )


def test_a_password_is_passed_in_the_environment(tmp_path: Path) -> None:
    command = _make_command(parse_url("mqtt://me:mine@h"), tmp_path)
    assert "mine" not in " ".join(command.build_arguments())
    assert "mqtt://me@h:1883" in command.build_arguments()
    assert "--shared-user" in command.build_arguments(), "every client signs in as one user"
    assert command.build_environment({})["SUBFLEET_PASSWORD"] == "mine"  # noqa: S105
    plain = _make_command(parse_url("mqtt://h"), tmp_path)
    assert "--shared-user" not in plain.build_arguments()
    assert "SUBFLEET_PASSWORD" not in plain.build_environment({"SUBFLEET_PASSWORD": "of somebody else"})


def test_a_client_gets_its_held_out_data(tmp_path: Path) -> None:
    plain = _make_command(parse_url("mqtt://h"), tmp_path)
    assert "--held-out" not in plain.build_arguments()
    arguments = replace(plain, held_out=tmp_path / "test.npz").build_arguments()
    assert arguments[arguments.index("--held-out") + 1] == str(tmp_path / "test.npz")


def test_a_client_is_as_slow_as_its_device_unless_nothing_is_to_take_time(tmp_path: Path) -> None:
    plain = _make_command(parse_url("mqtt://h"), tmp_path)
    for command, durations in ((plain, "modelled"), (replace(plain, durations="none"), "none")):
        arguments = command.build_arguments()
        assert arguments[arguments.index("--durations") + 1] == durations


def test_a_client_gets_its_limits_and_the_command_knows_all_options(tmp_path: Path) -> None:
    bound = replace(_make_command(parse_url("mqtt://h"), tmp_path), binds_memory=True, groups=(tmp_path, Path("cpu")))
    options = make_parser(dict.fromkeys(COMMANDS, lambda _: 0)).parse_args(bound.build_arguments()[3:])
    assert (options.binds_memory, options.groups) == (True, [tmp_path, Path("cpu")])
    assert options.durations == "modelled"


def test_a_client_gets_the_tls_files(tmp_path: Path) -> None:
    files = TlsFiles(ca=Path("ca.pem"), certificate=Path("our.pem"), key=Path("our.key"))
    arguments = _make_command(BrokerAddress(host="h", port=8883, tls=files), tmp_path).build_arguments()
    assert "mqtts://h:8883" in arguments
    assert [arguments[arguments.index(option) + 1] for option in ("--ca", "--cert", "--key")] == [
        *("ca.pem", "our.pem", "our.key")
    ]
    assert "--cert" not in _make_command(BrokerAddress(host="h", port=8883, tls=TlsFiles()), tmp_path).build_arguments()

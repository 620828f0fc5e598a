"""Options that several commands share, and the broker that options describe."""

import os
from pathlib import Path
from typing import Annotated

import typer

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.topics import DEFAULT_FLEET
from subfleet.transport.address import BrokerAddress, BrokerOptions, mqtt_client_id
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.tls import make_tls_context

Description = Annotated[
    str,
    typer.Argument(metavar="FILE|NAME", help="Description of the run: a TOML file, or the name of an included run."),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Set a key of the file, such as rounds=3 or method.type=fedavg."),
]
Workers = Annotated[
    int | None,
    typer.Option(min=1, help="With --host batch: train in so many processes. Results are the same, and come sooner."),
]
Ray = Annotated[
    str | None,
    typer.Option(metavar="ADDRESS", help="With --host batch: train on a Ray cluster, such as auto or local."),
]
RunName = Annotated[
    str | None, typer.Option("--name", help="Name of the run's folder. An interrupted run in that folder is resumed.")
]
Runs = Annotated[Path, typer.Option("--runs", help="Folder that contains a folder for each run.")]
RUNS = Path("runs")
"""Default of `--runs`."""
Broker = Annotated[
    str | None,
    typer.Option(help="Use this broker (mqtt://[user@]host[:port], or mqtts:// for TLS) instead of the embedded one."),
]
Ca = Annotated[Path | None, typer.Option(help="PEM file with the authorities that may sign the broker's certificate.")]
Cert = Annotated[Path | None, typer.Option(help="PEM file with the client certificate that the broker requires.")]
Key = Annotated[Path | None, typer.Option(help="PEM file with the key of the client certificate.")]
PasswordFile = Annotated[
    Path | None, typer.Option(help="File with the password of the broker's user. Default: $SUBFLEET_PASSWORD.")
]


def read_broker_address(
    broker: str | None, *, ca: Path | None, cert: Path | None, key: Path | None, password_file: Path | None
) -> BrokerAddress | None:
    """The address that the options describe, or None for the embedded broker.

    Raises:
        ConfigError: the address is invalid, or an option for a broker is given without `--broker`.
        FileError: a TLS file or the password file cannot be read.
    """
    if broker is not None:
        options = BrokerOptions(url=broker, ca=ca, cert=cert, key=key, password_file=password_file)
        address = options.address(os.environ)
        if address.tls is not None:
            make_tls_context(address.tls)  # unusable TLS files are reported before anything starts
        return address
    for name, path in {"--ca": ca, "--cert": cert, "--key": key, "--password-file": password_file}.items():
        if path is not None:
            raise ConfigError(f"{name} needs a broker; name it with --broker mqtts://HOST")
    return None


def check_broker(address: BrokerAddress | None) -> None:
    """Connect and disconnect, so that a broker that does not accept us is reported before anything starts.

    Raises:
        TransportError: the broker is unreachable, refuses the connection, or cannot be trusted.
    """
    if address is not None:
        transport = MqttTransport(address, mqtt_client_id(DEFAULT_FLEET, "server", f"look-{os.getpid()}"))
        transport.open(())
        transport.close()

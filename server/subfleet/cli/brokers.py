"""Options of commands that speak with a broker."""

import os
from pathlib import Path
from typing import Annotated

import typer

from subfleet.protocol.errors import ConfigError
from subfleet.protocol.topics import DEFAULT_FLEET
from subfleet.transport.address import BrokerAddress, BrokerOptions, mqtt_client_id
from subfleet.transport.mqtt import MqttTransport
from subfleet.transport.tls import make_tls_context

__all__ = ["Broker", "Ca", "Cert", "Key", "PasswordFile", "broker_address", "check_broker"]

Broker = Annotated[
    str | None,
    typer.Option(help="Use this broker (mqtt://[user@]host[:port], or mqtts:// for TLS) instead of the embedded one."),
]
Ca = Annotated[Path | None, typer.Option(help="Authorities that the broker's certificate is held against, PEM.")]
Cert = Annotated[Path | None, typer.Option(help="Certificate of ours, for a broker that asks for one, PEM.")]
Key = Annotated[Path | None, typer.Option(help="Key of that certificate, PEM.")]
PasswordFile = Annotated[
    Path | None, typer.Option(help="File with the password of the address's user; else $SUBFLEET_PASSWORD.")
]


def broker_address(
    broker: str | None, *, ca: Path | None, cert: Path | None, key: Path | None, password_file: Path | None
) -> BrokerAddress | None:
    """Where the broker is that the options name; None for the embedded one.

    Raises:
        ConfigError: the address is none, or an option is said without it.
        FileError: a file for TLS, or the password's, cannot be read.
    """
    if broker is not None:
        options = BrokerOptions(url=broker, ca=ca, cert=cert, key=key, password_file=password_file)
        address = options.address(os.environ)
        if address.tls is not None:
            make_tls_context(
                address.tls
            )  # a file that cannot be used is refused before anything is loaded, cut or started
        return address
    given = {"--ca": ca, "--cert": cert, "--key": key, "--password-file": password_file}
    for name, path in given.items():
        if path is not None:
            raise ConfigError(f"{name} is for a broker of your own; name it with --broker mqtts://HOST")
    return None


def check_broker(address: BrokerAddress | None) -> None:
    """Connect once and leave: a broker that will not have us is named before anything is loaded, cut or started.

    Raises:
        TransportError: it is not there, refuses us, or cannot be trusted.
    """
    if address is not None:
        look = MqttTransport(address, mqtt_client_id(DEFAULT_FLEET, "server", f"look-{os.getpid()}"))
        look.open(())
        look.close()

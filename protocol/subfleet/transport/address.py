"""The address of a broker, and the client's credentials."""

import logging
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal
from urllib.parse import quote, unquote, urlsplit

from subfleet.protocol.errors import ConfigError, explain_os_errors

_LOG = logging.getLogger(__name__)

PASSWORD_VARIABLE = "SUBFLEET_PASSWORD"  # noqa: S105 (the name of a variable, not a password)
_SCHEMES = {"mqtt": "mqtt", "tcp": "mqtt", "mqtts": "mqtts", "ssl": "mqtts"}
"""Accepted schemes and their meaning; many other clients write `tcp` and `ssl`."""
_DEFAULT_PORTS = {"mqtt": 1883, "mqtts": 8883}
_RESERVED = "/?#[]%"
"""Characters that must be percent-encoded in a user name or password. '@' and ':' are allowed in a password, as the
host begins after the last '@'."""
_MAX_PASSWORD_BYTES = 65535  # MQTT's limit

Role = Literal["server", "device", "doctor"]


def mqtt_client_id(fleet: str, role: Role, name: str) -> str:
    """Make the id under which a process connects to a broker, with a random part.

    A broker disconnects a client when another one connects under its id. Nobody can guess this one, and two processes
    with one role are detected by a lock (`subfleet.transport.locking`). The parts are separated by ':', which neither
    fleet nor name contains. It is longer than the 23 characters that an MQTT 3.1.1 broker must accept; common brokers
    accept longer ids.
    """
    return f"{fleet}:{role}:{name}:{secrets.token_hex(8)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """The PEM files for TLS.

    Attributes:
        ca: the authorities that may sign the broker's certificate; None trusts the system's.
        certificate: the client's certificate, for brokers that ask for one.
        key: the key of that certificate; None if it is in the same file.
    """

    ca: Path | None = None
    certificate: Path | None = None
    key: Path | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """The address of a broker and the client's credentials. Its `repr` and `url` do not contain the password.

    Attributes:
        tls: None for a plain connection.
    """

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    tls: TlsFiles | None = None

    @property
    def host_and_port(self) -> str:
        """Host and port, for messages."""
        return f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """The address without its password."""
        user = "" if self.username is None else f"{quote(self.username, safe='')}@"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'mqtt' if self.tls is None else 'mqtts'}://{user}{host}:{self.port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerOptions:
    """The broker options of a command line; None means "not given".

    Attributes:
        url: `mqtt://` or `mqtts://`, `[user[:password]@]host[:port]`.
        ca: see `TlsFiles`.
        cert: see `TlsFiles.certificate`.
        key: see `TlsFiles`.
        password_file: a file that contains only the user's password.
    """

    url: str = field(repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    password_file: Path | None = None

    def address(self, environment: Mapping[str, str]) -> BrokerAddress:
        """Make the address, with the password from the file, the address, or else $SUBFLEET_PASSWORD.

        Raises:
            ConfigError: the address is invalid, or an option is missing, repeated or unused.
            FileError: the password's file cannot be read.
        """
        plain = parse_url(self.url)
        password = self._password(plain.password, environment)
        if password is not None and plain.username is None:
            raise ConfigError("a password is given, but the broker's address has no user name; write mqtts://USER@host")
        if self.key is not None and self.cert is None:
            raise ConfigError(f"--key names {self.key}, but --cert names no certificate; give both")
        named = [name for name in ("ca", "cert", "key") if getattr(self, name) is not None]
        if named and plain.tls is None:
            raise ConfigError(f"--{named[0]} is for TLS, but the broker's address says mqtt://; write mqtts://")
        tls = None if plain.tls is None else TlsFiles(ca=self.ca, certificate=self.cert, key=self.key)
        return BrokerAddress(
            host=plain.host, port=plain.port, username=plain.username, password=password, tls=tls
        )  # fmt: skip

    def _password(self, in_url: str | None, environment: Mapping[str, str]) -> str | None:
        if self.password_file is None and in_url is not None:
            _LOG.warning(
                "the password in the broker's address is visible in this machine's list of processes; use "
                "--password-file or $%s instead",
                PASSWORD_VARIABLE,
            )
        if self.password_file is None:
            return in_url or environment.get(PASSWORD_VARIABLE) or None
        if in_url is not None:
            raise ConfigError("a password is given both in the broker's address and in --password-file; give it once")
        return _read_password(self.password_file)


def parse_url(url: str) -> BrokerAddress:
    """Parse `mqtt[s]://[user[:password]@]host[:port]`; user and password may be percent-encoded.

    `tcp://` means `mqtt://`, and `ssl://` means `mqtts://`.

    Raises:
        ConfigError: the address is invalid. The message never repeats it, because it may contain a password.
    """
    scheme, _, rest = url.partition("://")
    scheme = _SCHEMES.get(scheme.lower(), "")
    user, at, location = rest.rpartition("@")
    name, colon, password = user.partition(":")
    if scheme and at:
        _check_encoded("user name", name)
        _check_encoded("password", password)
    try:
        parts = urlsplit(f"mqtt://{location}")
        port = _DEFAULT_PORTS.get(scheme, 0) if parts.port is None else parts.port
    except ValueError as error:
        raise ConfigError(
            "the broker's address has a port that is not a number from 1 to 65535; write mqtt://host:1883"
        ) from error
    unused = parts.path.strip("/") or parts.query or parts.fragment
    if not scheme or not parts.hostname or port == 0 or unused:
        raise ConfigError(
            "the broker's address must be mqtt://host:port, or mqtts://host:port for TLS, with user@ before the host "
            "if the broker requires a user name"
        )
    return BrokerAddress(
        host=parts.hostname,
        port=port,
        username=unquote(name) if name else None,
        password=unquote(password) if colon and password else None,
        tls=TlsFiles() if scheme == "mqtts" else None,
    )


def _check_encoded(part: str, text: str) -> None:
    """Raise ConfigError if a character must be percent-encoded; otherwise parsing would cut or change the text."""
    unencoded = re.sub("%[0-9A-Fa-f]{2}", "", text)
    wrong = next((character for character in unencoded if character in _RESERVED or character.isspace()), None)
    if wrong is None:
        return
    alternative = f"; or leave the password out and set ${PASSWORD_VARIABLE}, which takes it as it is"
    raise ConfigError(
        f"the {part} in the broker's address contains {wrong!r}, which must be percent-encoded: write "
        f"{quote(wrong, safe='')} for it{alternative if part == 'password' else ''}"
    )


def _read_password(path: Path) -> str:
    with explain_os_errors(f"the password file {path} cannot be read", "check the path"), path.open("rb") as file:
        content = file.read(_MAX_PASSWORD_BYTES + 2)
    try:
        password = content.decode("utf-8").removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        password = ""
    if not password or len(content) > _MAX_PASSWORD_BYTES:
        raise ConfigError(f"the password file {path} must hold one password, as UTF-8 text of 1 to 65535 bytes")
    return password

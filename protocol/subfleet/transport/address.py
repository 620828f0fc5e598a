"""Where a broker is, and who we are to it."""

from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

from subfleet.protocol.errors import ConfigError

__all__ = ["BrokerAddress", "parse_url"]

_DEFAULT_PORT = 1883


@dataclass(frozen=True, slots=True, kw_only=True)
class BrokerAddress:
    """Where a broker is and who we are to it. The password is in no text made of this."""

    host: str
    port: int
    username: str | None = None
    password: str | None = field(default=None, repr=False)


def parse_url(url: str) -> BrokerAddress:
    """Read `mqtt://[user:password@]host[:port]`; user and password may be percent-encoded.

    Raises:
        ConfigError: it is not such an address. The text never repeats the address, which may hold a password.
    """
    try:
        parts = urlsplit(url)
        port = _DEFAULT_PORT if parts.port is None else parts.port
    except ValueError as error:
        raise ConfigError(
            "the broker's address has a port that is not a number from 1 to 65535; write mqtt://host:1883"
        ) from error
    if parts.scheme != "mqtt" or not parts.hostname or port == 0 or parts.path.strip("/") or parts.query:
        raise ConfigError("the broker's address must be mqtt://host:port or mqtt://user:password@host:port")
    return BrokerAddress(
        host=parts.hostname,
        port=port,
        username=unquote(parts.username) if parts.username else None,
        password=unquote(parts.password) if parts.password else None,
    )

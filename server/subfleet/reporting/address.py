"""Where the HTTP API listens."""

from dataclasses import dataclass

__all__ = ["HttpAddress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """Where the HTTP API listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000

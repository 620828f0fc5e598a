"""Where the HTTP API listens, and who reaches it there."""

import ipaddress
from dataclasses import dataclass

__all__ = ["HttpAddress"]


@dataclass(frozen=True, slots=True, kw_only=True)
class HttpAddress:
    """Where the HTTP API listens. Port 0 takes a free one."""

    host: str = "127.0.0.1"
    port: int = 8000

    @property
    def loopback(self) -> bool:
        """Whether only this machine reaches it."""
        host = self.host.partition("%")[0]
        try:
            address = ipaddress.ip_address(host)
        except ValueError:
            return host == "localhost"
        mapped = getattr(address, "ipv4_mapped", None)  # ::ffff:127.0.0.1, which is_loopback knows from Python 3.13 on
        return address.is_loopback if mapped is None else mapped.is_loopback

    @property
    def warning(self) -> str:
        """Who can read what the API tells, in a sentence; empty where it is this machine alone."""
        if self.loopback:
            return ""
        try:
            everywhere = ipaddress.ip_address(self.host.partition("%")[0]).is_unspecified
        except ValueError:
            everywhere = not self.host
        who = "every machine that reaches this one" if everywhere else f"every machine that reaches {self.host}"
        return (
            f"the HTTP API asks for no password: {who} can read this run's rounds, clients and models; keep "
            "--http-host 127.0.0.1 unless a firewall or a proxy with a login stands before it"
        )

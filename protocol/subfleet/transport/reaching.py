"""Explains why a broker cannot be reached, in one sentence with the remedy."""

import socket
import ssl
from collections.abc import Mapping
from types import MappingProxyType

from subfleet.protocol.errors import TransportError, UnreachableError
from subfleet.transport.address import BrokerAddress, TlsFiles
from subfleet.transport.tls import make_tls_context

_PROBE_S = 3.0

# OpenSSL's error numbers for certificates (X509_V_ERR_...).
_DISTRUST: Mapping[int, str] = MappingProxyType(
    {
        9: "is not valid yet; correct the clock of this machine, or the certificate",
        10: "has expired; renew it, or correct the clock of this machine",
        18: "is self-signed and not trusted here; name its authority with --ca",
        19: "is signed by an authority that is not trusted here; name that authority with --ca",
        20: "is signed by an authority that is unknown here; name that authority with --ca",
        21: "is signed by an authority that is unknown here; name that authority with --ca",
        62: "is not issued for the host name {host!r}; use a name that it lists, or have it reissued",
        64: "is not issued for the address {host}; use a name that it lists, or have it reissued",
    }
)
_REFUSED_CERTIFICATE = ("UNKNOWN_CA", "BAD_CERTIFICATE", "CERTIFICATE_EXPIRED", "CERTIFICATE_UNKNOWN", "REVOKED")


def explain_unreachable(address: BrokerAddress, error: OSError | UnicodeError) -> TransportError:
    """Explain a failed attempt to connect. An `UnreachableError` may be temporary, any other error is permanent."""
    if isinstance(error, ssl.SSLCertVerificationError):
        problem = _DISTRUST.get(error.verify_code, f"cannot be trusted ({error.verify_message}); have it reissued")
        return TransportError(
            f"the certificate of the broker at {address.host_and_port} {problem.format(host=address.host)}"
        )
    if isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
        return _explain_handshake(address, error)
    return UnreachableError(_describe_failure(address, error))


def _describe_failure(address: BrokerAddress, error: OSError | UnicodeError) -> str:
    broker = address.host_and_port
    if isinstance(error, (socket.gaierror, UnicodeError)):
        return f"the host name {address.host!r} is unknown; check the broker's address"
    if isinstance(error, ConnectionRefusedError):
        return f"no broker listens at {broker}; start it, or check the address"
    if isinstance(error, TimeoutError):
        return f"the broker at {broker} does not answer; check the address and the network"
    if address.tls is not None and isinstance(error, (ssl.SSLEOFError, ConnectionResetError, BrokenPipeError)):
        return (
            f"the broker at {broker} closes the connection during the TLS handshake; if the port is without TLS, write "
            "mqtt:// or give the port with TLS"
        )
    return f"the broker at {broker} cannot be reached ({error.strerror or error}); check the network"


def shake_hands(address: BrokerAddress, timeout_s: float) -> None:
    """Make a TLS connection, if the address asks for TLS, and close it.

    Raises:
        OSError: it cannot be made; see `explain_unreachable`.
    """
    if address.tls is None:
        return
    with socket.create_connection((address.host, address.port), timeout=timeout_s) as plain:
        make_tls_context(address.tls).wrap_socket(plain, server_hostname=address.host).close()


def explain_silence(address: BrokerAddress, timeout_s: float, *, hung_up: bool = False) -> TransportError:
    """Explain why there was no MQTT answer, by a probing connection without MQTT.

    Args:
        address: of the broker.
        timeout_s: the elapsed timeout.
        hung_up: whether the broker closed the connection.
    """
    try:
        with socket.create_connection((address.host, address.port), timeout=_PROBE_S) as plain:
            files = address.tls
            problem = _probe_tls(plain, address) if files is None else _probe_certificate(plain, address, files)
    except (OSError, UnicodeError) as error:
        return explain_unreachable(address, error)
    silence = f"does not answer as an MQTT broker within {timeout_s:g} seconds; check the address"
    if hung_up:
        silence = (
            "closes the connection without an MQTT answer; check the address, and whether the broker accepts "
            "another connection, wills and retained messages"
        )
    return problem or UnreachableError(f"the broker at {address.host_and_port} {silence}")


def _probe_tls(plain: socket.socket, address: BrokerAddress) -> TransportError | None:
    spoken = TransportError(f"the broker at {address.host_and_port} speaks TLS; write mqtts:// in its address")
    try:
        ssl.create_default_context().wrap_socket(plain, server_hostname=address.host).close()
    except ssl.SSLCertVerificationError:
        return spoken
    except ssl.SSLError as error:
        return spoken if "ALERT" in (error.reason or "") else None
    except OSError:
        return None
    return spoken


def _probe_certificate(plain: socket.socket, address: BrokerAddress, files: TlsFiles) -> TransportError | None:
    """In TLS 1.3 a broker rejects a missing or wrong certificate only after the handshake."""
    try:
        with make_tls_context(files).wrap_socket(plain, server_hostname=address.host) as link:
            link.recv(1)
    except ssl.SSLError as error:
        return _explain_handshake(address, error) if error.reason else None
    except OSError:
        return None
    return None


def _explain_handshake(address: BrokerAddress, error: ssl.SSLError) -> TransportError:
    broker, reason = address.host_and_port, error.reason or ""
    shown = address.tls is not None and address.tls.certificate is not None
    if "CERTIFICATE_REQUIRED" in reason or (reason.endswith("ALERT_HANDSHAKE_FAILURE") and not shown):
        return TransportError(f"the broker at {broker} requires a client certificate; give it with --cert and --key")
    if shown and any(name in reason for name in _REFUSED_CERTIFICATE):
        return TransportError(
            f"the broker at {broker} does not accept our certificate ({_simplify(reason)}); have it signed by an "
            "authority that the broker trusts, and correct --cert"
        )
    if reason == "WRONG_VERSION_NUMBER":
        return TransportError(
            f"the broker at {broker} does not speak TLS on this port; write mqtt://, or give the port with TLS"
        )
    detail = _simplify(reason) or str(error)
    return TransportError(f"TLS with the broker at {broker} fails ({detail}); it must speak TLS 1.2 or newer")


def _simplify(reason: str) -> str:
    return reason.partition("ALERT_")[2].lower().replace("_", " ") or reason.lower().replace("_", " ")

"""TLS connections to a broker: always verified, at least TLS 1.2."""

import ssl
from pathlib import Path

from subfleet.protocol.errors import ConfigError, explain_os_errors
from subfleet.transport.address import TlsFiles


def make_tls_context(files: TlsFiles) -> ssl.SSLContext:
    """Make the TLS context of an address. The broker is always verified.

    Raises:
        FileError: a file cannot be read.
        ConfigError: a file has the wrong content, the key is not the certificate's, or it needs a passphrase.
    """
    for path in (files.ca, files.certificate, files.key):
        _check_readable(path)
    try:
        context = ssl.create_default_context(cafile=files.ca)
    except ssl.SSLError as error:
        raise ConfigError(f"{files.ca} contains no certificate of an authority in PEM format; correct --ca") from error
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    if files.certificate is not None:
        _present(context, files.certificate, files.key)
    return context


def _present(context: ssl.SSLContext, certificate: Path, key: Path | None) -> None:
    key_file = key or certificate

    def passphrase() -> str:  # without it OpenSSL would prompt on the terminal
        raise ConfigError(f"the key in {key_file} is protected by a passphrase; give --key a key without one")

    try:
        context.load_cert_chain(certificate, key, password=passphrase)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            raise ConfigError(f"{key_file} is not the key of the certificate {certificate}; correct --key") from error
        raise ConfigError(
            f"{certificate} and {key_file} contain no certificate with its key in PEM format; correct --cert and --key"
        ) from error


def _check_readable(path: Path | None) -> None:
    if path is None:
        return
    with explain_os_errors(f"the file {path} cannot be read", "check its path and who may read it"):
        path.open("rb").close()

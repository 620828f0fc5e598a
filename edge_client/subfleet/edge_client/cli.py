"""Entry point of `subfleet-edge`: handles Ctrl-C before anything else is imported."""

import os
import sys
from collections.abc import Sequence

_INTERRUPTED = 130
"""`ExitCode.INTERRUPTED`; importing its module might be interrupted itself."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Every error becomes one sentence on standard error."""
    try:
        from subfleet.protocol.starting import settle

        if refused := settle("subfleet-edge"):
            return int(refused)
        from subfleet.edge_client.commands import run
        from subfleet.protocol.silence import silence

        silence(os.environ)
        return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("subfleet-edge: interrupted; run the same command again to continue\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

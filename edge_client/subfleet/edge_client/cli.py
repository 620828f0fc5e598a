"""Entry point of `subfleet-edge`: nothing is imported before Ctrl-C ends the command in one sentence."""

import os
import sys
from collections.abc import Sequence

_INTERRUPTED = 130
"""`ExitCode.INTERRUPTED`; its own module may be what is being imported."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns its exit code. Whatever goes wrong ends as one sentence on standard error."""
    try:
        from subfleet.protocol.starting import settle

        if refused := settle("subfleet-edge"):
            return int(refused)
        from subfleet.edge_client.commands import run
        from subfleet.protocol.silence import silence

        silence(os.environ)
        return run(arguments)
    except KeyboardInterrupt:
        sys.stderr.write("subfleet-edge: stopped; start the same command again to go on\n")
        return _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of `subfleet`: nothing is imported before Ctrl-C ends the command in one sentence."""

import os
import sys

__all__ = ["main"]

_INTERRUPTED = 130
"""`ExitCode.INTERRUPTED`; its own module may be what is being imported."""


def main() -> None:
    """Run the command that the arguments name, or say which package is missing."""
    try:
        from subfleet.protocol.starting import settle

        if refused := settle("subfleet"):
            sys.exit(int(refused))
        from subfleet.cli.failures import reporting
        from subfleet.protocol.silence import silence

        silence(os.environ)
        with reporting(verbose="--verbose" in sys.argv):
            from subfleet.cli.commands import app
        app(prog_name="subfleet")
    except KeyboardInterrupt:
        sys.stderr.write("subfleet: stopped; start the same command again to go on\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

"""Entry point of `subfleet`. Everything else is imported later, so that Ctrl-C always ends it with one sentence."""

import os
import sys

_INTERRUPTED = 130
"""`ExitCode.INTERRUPTED`, which may not be imported yet."""


def main() -> None:
    """Run the command that the arguments name."""
    try:
        from subfleet.protocol.starting import settle

        if exit_code := settle("subfleet"):
            sys.exit(int(exit_code))
        from subfleet.cli.errors import report_errors
        from subfleet.protocol.silence import silence

        silence(os.environ)
        with report_errors(verbose="--verbose" in sys.argv):
            from subfleet.cli.commands import app
        app(prog_name="subfleet")
    except KeyboardInterrupt:
        sys.stderr.write("subfleet: interrupted; run the same command again to continue\n")
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    main()

"""Entry point of the `subfleet` command: loads the commands, or says which package is missing."""

import sys

from subfleet.cli.failures import reporting

__all__ = ["main"]


def main() -> None:
    """Run the command that the arguments name."""
    with reporting(verbose="--verbose" in sys.argv):
        from subfleet.cli.commands import app
    app(prog_name="subfleet")


if __name__ == "__main__":
    main()

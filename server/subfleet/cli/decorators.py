"""Decorators that make functions commands, with the options that all commands share."""

import inspect
import json as json_module
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Annotated, Any

import typer

from subfleet.cli.errors import report_errors

Answers = Iterator[tuple[Any, Callable[[], object]]]
"""Plain data, each with a function that prints them as text."""
Verbose = Annotated[bool, typer.Option("--verbose", help="Write a detailed log to standard error.")]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
_Decorator = Callable[[Callable[..., Any]], Callable[..., None]]


def command(app: typer.Typer, example: str, name: str | None = None) -> _Decorator:
    """Make a function a command with the option `--verbose`; an error ends it with one sentence.

    Args:
        app: to which it is added.
        example: its arguments in an example.
        name: of the command; None takes the function's.
    """

    def add(function: Callable[..., Any]) -> Callable[..., None]:
        def run(*, verbose: bool, **options: Any) -> None:
            with report_errors(verbose=verbose):
                function(**options)

        return app.command(name, epilog=f"Example: subfleet {example}")(_add_option(run, function, "verbose", Verbose))

    return add


def query(app: typer.Typer, example: str, name: str | None = None) -> _Decorator:
    """Make a function a command that also has the option `--json`. It yields `Answers`; the arguments are as above."""

    def add(function: Callable[..., Answers]) -> Callable[..., None]:
        def run(*, json: bool, **options: Any) -> None:
            for plain, show in function(**options):
                if json:
                    typer.echo(json_module.dumps(plain))
                else:
                    show()

        return command(app, example, name)(_add_option(run, function, "json", Json))

    return add


def _add_option(run: Callable[..., None], function: Callable[..., Any], name: str, kind: Any) -> Callable[..., None]:
    """Give `run` the name, help and parameters of a function, and one option more."""
    signature = inspect.signature(function)
    option = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=False, annotation=kind)
    run = wraps(function)(run)
    run.__signature__ = signature.replace(parameters=[*signature.parameters.values(), option])  # type: ignore[attr-defined]
    run.__annotations__ = {**function.__annotations__, name: kind}
    return run

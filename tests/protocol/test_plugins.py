"""An exception that ends a command is attributed to the plug-in that raised it, or to Subfleet."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from subfleet.cli.errors import describe_error
from subfleet.edge_client.failures import explain_error
from subfleet.protocol.errors import DataError
from subfleet.protocol.exit_codes import ExitCode
from subfleet.protocol.schema import parse_json, to_plain

KINDS = {
    "datasets": "data set",
    "families": "family of networks",
    "methods": "method",
    "observers": "observer",
    "presets": "preset",
    "trainers": "trainer",
    "later": "plug-in",
}
CODE = """
from contextlib import contextmanager
from theirs_of_a_test import within

def direct():
    raise ValueError("nothing fits")

def lacking():
    import nowhere_of_a_test

def through(function):
    return function()

@contextmanager
def context():
    yield

@contextmanager
def broken():
    raise ValueError("at its begin")
    yield
"""


@pytest.fixture
def load_plugin_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A package that registers a plug-in of each kind, as if it were installed."""
    package = tmp_path / "theirs_of_a_test"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "within.py").write_text("def fail():\n    raise KeyError('odd')\n", encoding="utf-8")
    for kind in KINDS:
        (package / f"{kind}.py").write_text(CODE, encoding="utf-8")
    info = tmp_path / "theirs-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1\n", encoding="utf-8")
    entry_points = "".join(f"[subfleet.{kind}]\nmine = theirs_of_a_test.{kind}:direct\n" for kind in KINDS)
    (info / "entry_points.txt").write_text(entry_points, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    yield __import__("importlib").import_module
    for name in [name for name in sys.modules if name.startswith("theirs_of_a_test")]:
        del sys.modules[name]


def catch(function: Callable[..., Any], *arguments: Any) -> Exception:
    try:
        function(*arguments)
    except Exception as error:  # noqa: BLE001 - of any type
        return error
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "noun"), KINDS.items())
def test_an_exception_of_a_plugin_is_attributed_to_the_plugin(load_plugin_module: Any, kind: str, noun: str) -> None:
    error = catch(load_plugin_module(f"theirs_of_a_test.{kind}").direct)
    message = f"the {noun} 'mine' of package theirs raised ValueError: nothing fits; fix or uninstall that package"
    assert describe_error(error) == explain_error(error) == (ExitCode.CONFIG, message)


@pytest.mark.slow
def test_errors_in_code_that_a_plugin_calls_are_attributed_to_it(load_plugin_module: Any) -> None:
    module = load_plugin_module("theirs_of_a_test.methods")
    for function, words in (
        (module.broken().__enter__, "raised ValueError: at its begin"),
        (module.within.fail, "raised KeyError: 'odd'"),
        (module.lacking, "raised ModuleNotFoundError: No module named 'nowhere_of_a_test'"),
        (lambda: module.through(lambda: int("x")), "raised ValueError: invalid literal"),
        (lambda: module.through(lambda: to_plain({}).x), "raised AttributeError"),
    ):
        assert f"of package theirs {words}" in describe_error(catch(function))[1]


@pytest.mark.slow
def test_our_defects_stay_ours_within_a_context_of_a_plugin(load_plugin_module: Any) -> None:
    module = load_plugin_module("theirs_of_a_test.observers")

    def defect() -> None:
        with module.context():
            parse_json(3, max_bytes=4)  # type: ignore[arg-type]

    @contextmanager
    def wrap_context() -> Iterator[None]:
        with module.context():
            yield

    def fail_within_context() -> None:
        with wrap_context():
            raise ZeroDivisionError("x")

    for function in (defect, fail_within_context, lambda: 1 / 0):
        code, sentence = describe_error(catch(function))
        assert code == ExitCode.INTERNAL
        assert sentence.startswith("this is a defect of Subfleet")


def test_an_error_of_ours_that_a_plugin_raises_keeps_its_own_sentence(load_plugin_module: Any) -> None:
    def refuse() -> None:
        raise DataError("the file is empty")

    error = catch(load_plugin_module("theirs_of_a_test.datasets").through, refuse)
    assert describe_error(error) == (ExitCode.DATA, "the file is empty")

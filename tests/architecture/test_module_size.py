"""Modules and functions do not exceed their maximum numbers of lines."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
FOLDERS = (*(path.parent.name for path in ROOT.glob("*/subfleet")), "tests", "benchmarks", "scripts", "examples")
MODULES = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))


def long_functions(tree: ast.Module) -> list[str]:
    """Functions that are too long, each with its line number."""
    return [
        f"{node.name} at line {node.lineno}"
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        and (node.end_lineno or node.lineno) - node.lineno + 1 > MAX_FUNCTION_LINES
    ]


@pytest.mark.slow
def test_modules_and_their_functions_are_short() -> None:
    assert len(MODULES) > 400
    problems = []
    for module in MODULES:
        text = module.read_text(encoding="utf-8")
        name = str(module.relative_to(ROOT))
        lines = len(text.splitlines())
        if lines > MAX_MODULE_LINES:
            problems.append(f"{name}: {lines} lines")
        problems += [f"{name}: {function}" for function in long_functions(ast.parse(text))]
    assert problems == []

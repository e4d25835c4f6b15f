"""Ratchet: sizes that may only be raised by a deliberate edit here."""

import ast
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import pytest

from runner.input_batch import InputBatch

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("specdec", "runner", "drafters", "sampler", "experiments")
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
MAX_INPUT_BATCH_FIELDS = 24


def sources(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def functions(path: Path) -> Iterator[ast.FunctionDef]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef):
            yield node


def is_kernel(node: ast.FunctionDef) -> bool:
    return any("jit" in ast.unparse(decorator) for decorator in node.decorator_list)


@pytest.mark.parametrize(
    "path", sources(*PACKAGES, "tests"), ids=lambda p: str(p.relative_to(ROOT))
)
def test_no_file_is_too_long_to_read(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MAX_FILE_LINES


@pytest.mark.parametrize("path", sources(*PACKAGES), ids=lambda p: str(p.relative_to(ROOT)))
def test_host_functions_are_short_and_narrow(path: Path) -> None:
    for node in functions(path):
        if is_kernel(node):
            continue
        start = node.body[0].end_lineno if ast.get_docstring(node) else node.lineno
        assert node.end_lineno is not None
        assert start is not None
        where = f"{path.relative_to(ROOT)}:{node.lineno} {node.name}"
        assert node.end_lineno - start <= MAX_FUNCTION_LINES, where
        if node.name != "__init__":  # public constructors are exempt
            args = [a for a in node.args.args + node.args.kwonlyargs if a.arg != "self"]
            assert len(args) <= MAX_PARAMETERS, where


def test_input_batch_does_not_grow() -> None:
    assert len(dataclasses.fields(InputBatch)) <= MAX_INPUT_BATCH_FIELDS

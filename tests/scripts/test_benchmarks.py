"""What `benchmarks/` and `scripts/` take from ds_sft is still there: nobody runs them in CI."""

import ast
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted([*ROOT.glob("benchmarks/*.py"), *ROOT.glob("scripts/*.py")])


def exists(module: str, name: str) -> bool:
    return hasattr(import_module(module), name) or find_spec(f"{module}.{name}") is not None


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}-{file.stem}")
def test_every_name_imported_from_ds_sft_exists(file: Path) -> None:
    taken = [
        (node.module, alias.name)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("ds_sft")
        for alias in node.names
    ]
    assert [f"{module}.{name}" for module, name in taken if not exists(module, name)] == []

"""Imports point down only, and what answers at once imports nothing heavy."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "ds_sft"
MODULES = sorted(PACKAGE.rglob("*.py"))
HEAVY = {"torch", "deepspeed", "transformers", "safetensors", "matplotlib", "wandb", "tokenizers"}

# What each room may import of ours, at any level of the file; the ground (errors) is free to all.
ALLOWED = {
    "recipe": {"recipe"},
    "data": {"data", "recipe", "flags", "presets"},
    "model": {"model", "data", "recipe"},
    "engine": {"engine", "model", "data", "recipe", "run_config", "plan"},
}
LIGHT = [
    "ds_sft.cli",
    "ds_sft.flags",
    "ds_sft.plan",
    "ds_sft.plan_view",
    "ds_sft.train",
    "ds_sft.data.collate",
    "ds_sft.data.inspect",
    "ds_sft.data.packed",
    "ds_sft.data.prepare",
    "ds_sft.engine.config",
    "ds_sft.engine.memory",
    "ds_sft.engine.rates",
    "ds_sft.engine.tuning",
    "ds_sft.fit",
    "ds_sft.fit_machine",
    "ds_sft.fit_probe",
    "ds_sft.fit_rank",
    "ds_sft.fit_view",
    "ds_sft.recipe.batching",
    "ds_sft.run.commands",
    "ds_sft.run.doctor",
    "ds_sft.run.launch_env",
    "ds_sft.run.resume",
]


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)


def imports(path: Path, *, top_level_only: bool) -> set[str]:
    """Names of the modules that a file imports, type checking aside."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(tree.body) if top_level_only else [*ast.walk(tree)]
    found: set[str] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_rooms_import_downwards_only(path: Path) -> None:
    room = path.relative_to(PACKAGE).parts[0]
    allowed = ALLOWED.get(room)
    if allowed is None:
        assert room in {"run", "__init__.py", "__main__.py"} or path.parent == PACKAGE
        return
    for module in imports(path, top_level_only=False):
        if module.startswith("ds_sft."):
            assert module.split(".")[1] in allowed | {"errors"}, f"{name_of(path)} imports {module}"


@pytest.mark.parametrize("path", sorted((PACKAGE / "recipe").glob("*.py")), ids=name_of)
def test_the_science_uses_the_standard_library_only(path: Path) -> None:
    for module in imports(path, top_level_only=False):
        root = module.split(".")[0]
        assert root == "ds_sft" or root in sys.stdlib_module_names
        assert root not in {"os", "pathlib", "time", "logging", "io"}


@pytest.mark.parametrize("path", sorted((PACKAGE / "data").glob("*.py")), ids=name_of)
def test_data_imports_heavy_libraries_inside_functions_only(path: Path) -> None:
    roots = {module.split(".")[0] for module in imports(path, top_level_only=True)}
    assert not roots & HEAVY


def test_what_must_answer_at_once_imports_nothing_heavy() -> None:
    code = (
        "import importlib, json, sys\n"
        "for name in sys.argv[1:]:\n"
        "    importlib.import_module(name)\n"
        "print(json.dumps(sorted({name.split('.')[0] for name in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, *LIGHT], check=True, capture_output=True, text=True
    )
    assert not HEAVY & set(json.loads(done.stdout))


def test_the_command_itself_imports_not_even_numpy() -> None:
    code = "import sys, ds_sft.cli; sys.exit(bool({'numpy', 'tyro', 'rich'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0

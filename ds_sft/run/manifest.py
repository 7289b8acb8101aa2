"""run.json and the marker `finished`: what a run was, written by rank 0.

Owns the record of everything needed to run again. Leaves per-step numbers to `metrics`, reading
`finished` to `marker`.
"""

from __future__ import annotations

import dataclasses
import json
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ds_sft.data.model_files import ModelFiles
from ds_sft.data.packed import PackedDataset
from ds_sft.data.sealed import sealed_json
from ds_sft.presets import NOT_FOR_PUBLISHING
from ds_sft.recipe.recipe import Recipe
from ds_sft.run import changes, provenance
from ds_sft.run.atomic import write_file
from ds_sft.run.layout import RunDir
from ds_sft.run_config import RunConfig


def write_run_json(
    run_dir: RunDir,
    run: RunConfig,
    recipe: Recipe,
    ds_config: dict[str, Any],
    data: PackedDataset,
    model: ModelFiles,
    tokenizer_dir: Path,
    *,
    world_size: int,
    first_step: int,
) -> None:
    """Record recipe, configuration, data, versions and command line, and what it is made from."""
    before = _before(run_dir)
    record = {
        "recipe": dataclasses.asdict(recipe),
        "run": {k: _plain(v) for k, v in dataclasses.asdict(run).items()},
        "deepspeed_config": ds_config,
        "data": {"path": str(data.path), "manifest_sha256": data.manifest_sha256},
        "made_from": provenance.record(data, model, tokenizer_dir, before.get("made_from") or {}),
        "world_size": world_size,
        "first_step": first_step,
        "command": [sys.executable, *sys.argv],
        "versions": {"python": platform.python_version(), **changes.package_versions()},
        "code": changes.code_version(),
        "git_commit": _git_commit(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }
    if recipe.departures:
        record["not_levanters_curve"] = recipe.departures
    earlier = before.get("not_for_publishing") if first_step else None
    mark = NOT_FOR_PUBLISHING.get(run.preset) or earlier
    if mark:
        record["not_for_publishing"] = str(mark)
    write_file(run_dir.run_json, sealed_json(record))


def _before(run_dir: RunDir) -> dict[str, Any]:
    """The run.json of the start before this one; empty where there is none that can be read."""
    try:
        found = json.loads(run_dir.run_json.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def write_finished(run_dir: RunDir, completed: int, seconds: float, loss: float | None) -> None:
    """The marker from which success is read."""
    record = {"completed": completed, "seconds": round(seconds, 1), "loss": loss}
    write_file(run_dir.finished, json.dumps(record) + "\n")


def _git_commit() -> str | None:
    """Commit of the code, when it runs from a checkout that holds it.

    An environment inside somebody's repository is none: its commit says nothing about this code.
    """
    said = ""
    for words in (["ls-files", "--error-unmatch", Path(__file__).name], ["rev-parse", "HEAD"]):
        command = ["git", "-C", str(Path(__file__).parent), *words]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        except (OSError, subprocess.TimeoutExpired):
            return None
        if done.returncode:
            return None
        said = done.stdout.strip()
    return said or None


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value

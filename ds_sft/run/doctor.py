"""`ds-sft doctor`: can this machine run our JSONs, and if not, what has to be done?

Owns the table and the verdict on each DeepSpeed JSON. Exit code: 0 when the JSON of
`--deepspeed-config` can run here (default: zero3.json), 1 when it cannot; what stops only other
JSONs is in the table and changes no exit code. Imports torch only while it runs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft.data.console import open_console
from ds_sft.data.model_files import ModelFiles, find_model
from ds_sft.engine import ops, placement, swap_files
from ds_sft.engine.config import engine_config, read_json
from ds_sft.errors import ConfigError, DsSftError
from ds_sft.recipe.named import RECIPES
from ds_sft.run import doctor_build
from ds_sft.run import doctor_checks as checks
from ds_sft.run.doctor_checks import Check, Kind

CANNOT_RUN = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class DoctorFlags:
    """Look at this machine before a run: compilers, operators, disks, memory, kernels.

    Exit code 0: --deepspeed-config can run here; 1: it cannot.
    """

    build: bool = False
    """Remove stale locks and build the CPU operators first, in this one process."""
    nvme_path: Path | None = None
    """Directory for swap files to check and measure; default: nvme_path of --deepspeed-config."""
    deepspeed_config: Path = Path("ds_configs/zero3.json")
    """The JSON that decides the exit code; those beside it get a verdict too."""
    model_id: str = ""
    """Model (a directory, or in the Hub's cache) whose states are compared with memory and disk."""
    world_size: int = 1
    """Ranks (GPUs) over all hosts, for --model-id."""


def run(flags: DoctorFlags) -> None:
    """The command; ends with 1 when the chosen JSON cannot run. Raises ConfigError."""
    if not os.environ.get("DS_ACCELERATOR") and not _has_gpu():
        os.environ["DS_ACCELERATOR"] = "cpu"  # or DeepSpeed looks for one, at length
    chosen = read_json(flags.deepspeed_config)
    if flags.world_size < 1:
        raise ConfigError(
            f"--world-size {flags.world_size} is not a number of ranks: use 1 or more"
        )
    model = None
    if flags.model_id:
        model = find_model(flags.model_id)
        if model is None:
            raise ConfigError(
                f"--model-id {flags.model_id} is neither a directory nor in the Hub's cache"
            )
    if flags.build:
        build()
    path = flags.nvme_path or _nvme_path(chosen)
    rows = list(look(path))
    show("machine", rows)
    verdicts = [verdict(file, rows, flags, path, model) for file in _files(flags.deepspeed_config)]
    show("configurations", verdicts)
    if verdicts[0].state == "FAIL":
        raise SystemExit(CANNOT_RUN)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


def build() -> None:
    """Build what can be built; what cannot is in the table afterwards, with the reason here."""
    missing = [
        row for row in (doctor_build.compiler(), doctor_build.ninja()) if row.state == "FAIL"
    ]
    if missing:
        print(f"[ops] nothing is built: {missing[0].name}: {missing[0].detail}", flush=True)
        return
    for op in ("cpu_adam", "async_io"):
        try:
            ops.build_all([op])
        except ConfigError as error:
            print(f"[ops] {error}", flush=True)


def look(nvme_path: Path | None) -> Iterator[Check]:
    """Every check of this machine, in the order of the table."""
    packages = checks.packages()
    yield packages
    if packages.state == "FAIL":
        return
    yield checks.gpu()
    driver = checks.versions_of_driver()
    if driver is not None:
        yield driver
    yield doctor_build.compiler()
    yield doctor_build.ninja()
    yield doctor_build.operator("cpu_adam", minutes=2, stops="cpu")
    yield doctor_build.libaio()
    yield doctor_build.operator("async_io", minutes=6, stops="nvme")
    yield from checks.nvme(nvme_path)
    yield checks.shared_memory()
    yield checks.memory()
    yield from checks.limits()
    yield checks.threads()
    yield checks.attention()
    yield checks.liger()


def _nvme_path(config: dict[str, Any]) -> Path | None:
    zero = config.get("zero_optimization", {})
    paths = [zero[n].get("nvme_path") for n in swap_files.OFFLOADS if isinstance(zero.get(n), dict)]
    return next((Path(p) for p in paths if p), None)


def _files(chosen: Path) -> list[Path]:
    """The chosen JSON, then the DeepSpeed files beside it."""
    others = [p for p in chosen.parent.glob("*.json") if p.name != chosen.name]
    return [chosen, *sorted(p for p in others if placement.devices_of_file(p) is not None)]


def verdict(
    file: Path, rows: list[Check], flags: DoctorFlags, nvme_path: Path | None,
    model: ModelFiles | None,
) -> Check:  # fmt: skip
    """Whether the JSON in `file` can run here, by the checks of the machine and its own."""
    try:
        config = _resolved(file, flags.world_size, nvme_path)
        kinds = needs(config)
        stopping = [row for row in rows if row.state == "FAIL" and kinds & set(row.stops)]
        if stopping:
            names = ", ".join(row.name for row in stopping)
            return _cannot(file, f"stopped by: {names}", "see above")
        swap_files.check(config, model, flags.world_size)
    except DsSftError as error:
        return _cannot(file, *_split(error))
    if model is None:
        return Check(name=file.name, state="ok", detail="can run")
    problem = placement.note_host_memory(file, config, model, flags.world_size)
    if problem:
        return _cannot(file, *_split(problem.removeprefix("warning: ")))
    share = placement.host_bytes(config, model, flags.world_size) / 1e9
    return Check(
        name=file.name, state="ok", detail=f"can run; offloads {share:.1f} GB to host memory"
    )


def _cannot(file: Path, detail: str, advice: str) -> Check:
    return Check(name=file.name, state="FAIL", detail=detail, advice=advice)


def _split(error: object) -> tuple[str, str]:
    """What is wrong, and what to do, of a message of ours."""
    text = " ".join(str(error).split())
    detail, colon, advice = text.rpartition(": ")
    return (detail, advice) if colon else (text, "")


def _resolved(file: Path, world_size: int, nvme_path: Path | None) -> dict[str, Any]:
    config = read_json(file)
    on_nvme = "nvme" in placement.devices(config)
    return engine_config(
        config, file, next(iter(RECIPES.values())), world_size=world_size, per_device_batch=1,
        nvme_path=nvme_path if on_nvme else None,
    )  # fmt: skip


def needs(config: dict[str, Any]) -> set[Kind]:
    """What a configuration needs of a machine beyond what every run does."""
    where = placement.devices(config)
    kinds: set[Kind] = {"all"}
    if where[0] != "none":
        kinds.add("cpu")
    if "nvme" in where:
        kinds.add("nvme")
    return kinds


def show(title: str, rows: list[Check]) -> None:
    """A table on a terminal; elsewhere a line per row."""
    if not sys.stdout.isatty():
        print(title)
        width = max(len(row.name) for row in rows)
        for row in rows:
            advice = f": {row.advice}" if row.advice else ""
            print(f"  {row.state:<5} {row.name:<{width}}  {row.detail}{advice}")
        print(flush=True)
        return
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title, title_justify="left", box=None, pad_edge=False)
    colours = {"ok": "green", "warn": "yellow", "FAIL": "bold red", "-": "dim"}
    for name in ("", "", "found", "what to do"):
        table.add_column(name, no_wrap=name == "", overflow="fold")
    for row in rows:
        table.add_row(Text(row.state, colours[row.state]), row.name, row.detail, row.advice)
    open_console(needs_reader=True, tables=True).print(table, "")

"""`ds-sft plan`: how a plan looks, as tables, one JSON object, a drawing of the learning rate.

Owns the wording. Invariant: tables and JSON are made from the same `plan_facts`, so both always say
the same. matplotlib is imported only when a plot is asked for. No torch.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft import plan_memory
from ds_sft.data.console import open_console
from ds_sft.errors import ConfigError
from ds_sft.flags import parse_with_recipe
from ds_sft.plan import Plan, check
from ds_sft.plan_facts import corner_steps, facts
from ds_sft.recipe.recipe import Recipe
from ds_sft.run_config import RunConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanFlags:
    """Say what a run will do, need and refuse, without starting it."""

    run: RunConfig
    """Where and when."""
    science: Recipe
    """What decides the loss curve; defaults are those of --recipe."""
    world_size: int = 1
    """Ranks (GPUs) over all hosts."""
    json: bool = False
    """Print one JSON object instead of tables."""
    memory: bool = False
    """Say too what the run needs of GPU, host memory and NVMe; takes some seconds."""
    plot: Path | None = None
    """Draw the learning rate with the export labels into this .png file."""


def main(argv: Sequence[str]) -> None:
    """`ds-sft plan`. Raises ConfigError or DataError for what the run would refuse."""
    flags = parse_with_recipe(PlanFlags, argv, "ds-sft plan")
    plan = check(flags.run, flags.science, flags.world_size)
    if flags.plot is not None:
        plot(plan, flags.plot)
    show(plan, as_json=flags.json, memory=flags.memory)


def show(plan: Plan, as_json: bool = False, memory: bool = False) -> None:
    """Print the plan: tables on a terminal, a line per fact elsewhere, or one JSON object."""
    said = facts(plan)
    if memory:
        said["memory"] = plan_memory.facts(plan)
    if as_json:
        print(json.dumps(said, indent=2, default=str))
    elif sys.stdout.isatty():
        _show_tables(said)
    else:
        for title, rows in sections(said):
            print(f"{title}\n" + "".join(f"  {name:<20} {text}\n" for name, text in rows))
        for note in said["notes"]:
            print(f"note: {note}")


def _show_tables(said: dict[str, Any]) -> None:
    from rich.table import Table

    console = open_console(needs_reader=True, tables=True)
    for title, rows in sections(said):
        table = Table(box=None, show_header=False, title=title, title_justify="left")
        table.add_column(no_wrap=True, min_width=22)
        table.add_column()
        for name, value in rows:
            table.add_row(name, value)
        console.print(table)
        console.print()
    for note in said["notes"]:
        console.print(f"note: {note}")


def sections(said: dict[str, Any]) -> list[tuple[str, list[tuple[str, str]]]]:
    """The tables: title, then rows of name and text."""
    batch, steps, targets = said["batch"], said["steps"], said["targets"]
    waste = f"{batch['idle_slots']} a step ({batch['idle_share']:.1%} of the computing is wasted)"
    run_rows = [
        ("global batch", f"{batch['train_batch_size']} packs x {batch['max_seq_len']:,} tokens = "
         f"{batch['tokens_per_step']:,} tokens a step"),
        ("loss groups", f"{batch['loss_groups']} groups x {batch['microbatches_per_group']} "
         f"microbatches x {batch['world_size']} ranks x {batch['per_device_batch']} packs"),
        ("idle slots", waste if batch["idle_slots"] else "0"),
        ("steps", f"{steps['num_train_steps']:,} = {steps['epochs']:g} epochs of "
         f"{steps['num_packs']:,} packs ({steps['num_docs']:,} documents)"),
        ("8 epochs would be", f"{steps['steps_of_8_epochs_by_packs']:,} steps counting packs "
         f"(as here), {steps['steps_of_8_epochs_by_documents']:,} counting documents (as marin's "
         "experiment files do)"),
        ("order", _order_text(said["recipe"])),
        ("phases", f"{steps['warmup_steps']:,} warmup, {steps['stable_steps']:,} at the peak, "
         f"{steps['decay_steps']:,} decay"),
        ("trained tokens", f"{targets['assistant_tokens']:,} of {targets['document_tokens']:,} in "
         f"the data ({targets['assistant_share']:.1%}); packs are {targets['fill']:.1%} full"),
        ("... in a step", f"min {targets['per_step_min']:,}, mean {targets['per_step_mean']:,.0f}, "
         f"max {targets['per_step_max']:,}; whole run {targets['whole_run']:,}"),
    ]  # fmt: skip
    rates = [
        (f"step {rate['step']:,}", f"{rate['lr']:.6g}  ({rate['what']})")
        for rate in said["learning_rate"]
    ]
    return [
        ("Run", run_rows),
        ("Learning rate", rates),
        ("Engine", _engine_rows(said)),
        ("Model", _model_rows(said)),
        ("Validation", _validation_rows(said["validation"])),
        ("Labels", [
            ("hf exports",
             label_list(said["exports"], said["recipe"]["steps_per_hf_export"])),
            ("native checkpoints",
             label_list(said["checkpoints"], said["recipe"]["steps_per_checkpoint"])),
        ]),
        *([("Memory", plan_memory.rows(said["memory"]))] if "memory" in said else []),
        ("Disk", _disk_rows(said["disk"])),
        ("Data", _data_rows(said["data"])),
    ]  # fmt: skip


def _order_text(recipe: dict[str, Any]) -> str:
    order, seed = recipe["order"], f"seed {recipe['data_seed']}"
    if order == "shuffle":
        return f"shuffle, {seed}, every epoch the same"
    if not order.startswith("levanter-"):
        return str(order)
    eras = f" over eras of {recipe['era_length']:,}" if recipe["era_length"] else ""
    return (
        f"{order}, {seed}: blocks of {recipe['mixture_block_size']:,} packs{eras}; "
        "an epoch does not hold every pack once"
    )


def _engine_rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    recipe, zero = said["recipe"], said["ds_config"]["zero_optimization"]
    clip = recipe["max_grad_norm"]
    homes = {name: zero.get(f"offload_{name}", {}).get("device", "none")
             for name in ("optimizer", "param")}  # fmt: skip
    return [
        ("precision", f"compute {recipe['compute_dtype']}, masters {recipe['master_dtype']}, "
         f"moments {recipe['optimizer_state_dtype']}, accumulation float32, reduction "
         f"{recipe['grad_reduce_dtype']}"),
        ("clipping", f"global norm {clip:g}" if clip else "off"),
        ("optimizer", f"{said['optimizer']}, betas {recipe['beta1']:g} {recipe['beta2']:g}, eps "
         f"{recipe['eps']:g}, weight decay {recipe['weight_decay']:g}"),
        *(("", line) for line in said["routes"]),
        ("offload", ", ".join(f"{k} to {v}" for k, v in homes.items() if v != "none") or "none"),
    ]  # fmt: skip


def _model_rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    model = said["model"]
    if model is None:
        return [("files", f"{said['recipe']['model_id']}: not on this machine")]
    rows = [
        ("files", model["directory"]),
        ("architecture", f"{model['architecture']}, {model['parameters']:,} parameters stored as "
         f"{', '.join(model['stored_as'])}, {'tied' if model['tied'] else 'untied'} head, "
         f"vocabulary {model['vocab_size']:,}"),
    ]  # fmt: skip
    for kind, title in (("decayed", "weight decay on"), ("not_decayed", "no weight decay on")):
        group = model[kind]
        rows.append((title, f"{group['tensors']} tensors, {group['parameters']:,} parameters: "
                     f"{', '.join(group['sample'])}, ..."))  # fmt: skip
    return rows


def _validation_rows(validation: dict[str, Any] | None) -> list[tuple[str, str]]:
    if validation is None:
        return [("evaluations", "none")]
    return [
        ("directory", validation["path"]),
        ("packs", f"{validation['num_packs']:,} with {validation['assistant_tokens']:,} trained of "
         f"{validation['document_tokens']:,} tokens"),
        ("evaluations", label_list(validation["labels"], validation["every"])),
        ("cost", f"{validation['microbatches']:,} microbatches a rank each, "
         f"{validation['microbatches_whole_run']:,} in the whole run, forward only (training: "
         f"{validation['training_microbatches']:,}, forward and backward)"),
    ]  # fmt: skip


def _disk_rows(disk: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    if disk["needed"] is not None:
        rows = [
            ("checkpoints", f"{_bytes(disk['checkpoints'])} = at most "
             f"{disk['checkpoints_at_most']} x {_bytes(disk['checkpoint'])} "
             f"(keeps {disk['checkpoints_kept']})"),
            ("exports", f"{_bytes(disk['exports'])} = {disk['num_exports']} x "
             f"{_bytes(disk['export'])}"),
            ("needed", _bytes(disk["needed"])),
        ]  # fmt: skip
    if disk["free"] is None:
        return [*rows, ("free", "unknown: name the run directory with --out")]
    short = disk["needed"] is not None and disk["needed"] > disk["free"]
    return [*rows, ("free at --out", _bytes(disk["free"]) + ("  NOT ENOUGH" if short else ""))]


def _data_rows(data: dict[str, Any]) -> list[tuple[str, str]]:
    """What the data was made of and how; `--json` and the manifest itself say the rest."""
    rows = [("directory", data["path"]), ("manifest sha256", data["manifest_sha256"][:16])]
    rows.append(("tokenizer", data["tokenizer"] or "none stored with the data"))
    manifest = data["manifest"]
    for key in ("chat_template", "masks", "sources", "rejected", "dropped_tokens"):
        value = manifest.get(key)
        if value:
            text = value if isinstance(value, str) else json.dumps(value)
            rows.append((key.replace("_", " "), text if len(text) <= 160 else text[:157] + "..."))
    return rows


def label_list(labels: list[int], every: int) -> str:
    """Every label, in few words.

    >>> label_list([100, 200, 300, 400, 500, 600, 650], 100)
    '7: step-100 step-200 ... step-600 (every 100), step-650'
    """
    regular = [n for n in labels if n % every == 0 and n > 0]
    rest = [f"step-{n}" for n in labels if n not in regular]
    shown = " ".join(f"step-{n}" for n in regular)
    if len(regular) > 5:
        first, second, last = regular[0], regular[1], regular[-1]
        shown = f"step-{first} step-{second} ... step-{last} (every {every})"
    return f"{len(labels)}: " + ", ".join([*([shown] if shown else []), *rest])


def _bytes(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 1000 or unit == "TB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError(unit)


def plot(plan: Plan, path: Path) -> None:
    """Draw the learning rate with a mark at every export. Raises ConfigError."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise ConfigError("--plot needs matplotlib: pip install 'ds-sft[plot]'") from None
    schedule, peak = plan.schedule, plan.recipe.learning_rate
    stride = max(1, schedule.num_steps // 4000)
    steps = sorted({*range(0, schedule.num_steps, stride), *(s for s, _ in corner_steps(schedule))})
    exports = facts(plan)["exports"]
    figure = Figure(figsize=(8, 4), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(steps, [peak * schedule.lr_multiplier(s) for s in steps], label="learning rate")
    axes.plot(
        exports,
        [peak * schedule.lr_multiplier(s) for s in exports],
        "o",
        markersize=4,
        label="hf export",
    )
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("learning rate")
    axes.set_title(f"{plan.run.recipe}: {schedule.num_steps} steps")
    axes.legend()
    try:
        figure.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError(f"--plot {path} cannot be written: {error}") from None

"""How an answer of `ds-sft fit` looks: a table, or one JSON object.

Owns the wording. Invariant: both are made of the same values, and the assumptions are always said.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from typing import Any

from ds_sft import fit_probe
from ds_sft.data.console import open_console
from ds_sft.engine.memory import ASSUMPTIONS, GIB, Gpu, Need
from ds_sft.engine.rates import Rates, Seconds
from ds_sft.fit_probe import Probed
from ds_sft.fit_question import Machine, Question
from ds_sft.fit_rows import Row
from ds_sft.recipe.batching import MAX_IDLE_SHARE

_UNITS = {
    "gpu_flops": (1e12, "TFLOP/s of a GPU"),
    "gpu_memory": (1e9, "GB/s of GPU memory"),
    "pcie": (1e9, "GB/s over PCIe"),
    "network": (1e9, "GB/s between ranks"),
    "node_network": (1e9, "GB/s between ranks of a node"),
    "host_memory": (1e9, "GB/s of host memory"),
    "nvme_read": (1e9, "GB/s from NVMe"),
    "nvme_write": (1e9, "GB/s to NVMe"),
}
PARTS = tuple(f.name for f in dataclasses.fields(Gpu) if f.name != "phase")
_HEADS = {"parameters": "weights", "gradients": "grads", "optimizer": "adam",
          "activations": "kept", "working": "working", "gathered": "gathered",
          "buckets": "buckets", "slack": "slack"}  # fmt: skip
WIDTH = 150  # of the table where there is no terminal to ask


def show(
    question: Question,
    machine: Machine,
    rates: Rates,
    rows: list[Row],
    refused: list[str],
    written: Row | None,
    probed: list[Probed],
) -> None:
    """Print the answer; `refused` says of files why they cannot run as asked."""
    if question.flags.json:
        facts = said(question, machine, rates, rows, written)
        facts["probed"] = [probed_facts(question, p) for p in probed]
        print(json.dumps({**facts, "refused": refused}, indent=2, default=str))
        return
    _table(question, machine, rows)
    for row in rows:
        if row.short:
            print(f"{row.name} needs {', '.join(row.short)}: it would fit with "
                  f"{' or '.join(row.advice)}")  # fmt: skip
    for line in refused:
        print(f"left out: {line}")
    print()
    print(verdict(question, rows))
    if probed:
        _probed_table(question, probed)
    if written is not None:
        path, gpu = question.flags.write, _gib(written.need.gpu.total)
        print(f"wrote {path}: {written.name} with sizes for this model, {gpu} GiB of a GPU, "
              f"{_gib(written.need.host)} GiB of a node")  # fmt: skip
    print()
    for line in assumptions(question, rates):
        print(f"assumed: {line}")


def verdict(question: Question, rows: list[Row]) -> str:
    """The answer in one line."""
    fits = [row for row in rows if not row.short]
    if not fits:
        return "Nothing fits as asked: see above what would make it fit."
    best, flags = fits[0], question.flags
    tokens = flags.train_batch_size * flags.max_seq_len
    return (
        f"Fastest that fits: {best.name}, about {duration(best.seconds.total)} a step of "
        f"{flags.train_batch_size} packs ({tokens / best.seconds.total:,.0f} tokens/s), "
        f"{_gib(best.need.gpu.total)} GiB of a GPU at the peak (in the {best.need.gpu.phase})."
    )


def assumptions(question: Question, rates: Rates) -> list[str]:
    """What the numbers rest on."""
    flags = question.flags
    values = [
        f"{getattr(rates, name) / unit:.3g} {what}{' (measured)' if name in rates.measured else ''}"
        for name, (unit, what) in _UNITS.items()
    ]
    batches = question.batches
    idle = (
        f"{batches.idle_share:.0%} of a step's pack slots idle: training wants --allow-idle, or a "
        f"--world-size that divides the {batches.group_size} packs of a loss group"
    )
    return [
        *([idle] if batches.idle_share > MAX_IDLE_SHARE else []),
        ASSUMPTIONS,
        ", ".join(values),
        f"one document fills a pack of {flags.max_seq_len:,} tokens and all are trained (the "
        f"slowest case); {flags.gpus_per_node} GPUs a node; times are estimates to compare files",
    ]


def said(
    question: Question, machine: Machine, rates: Rates, rows: list[Row], written: Row | None
) -> dict[str, Any]:
    """The answer as plain values."""
    model = question.model
    return {
        "model": {
            "directory": str(model.directory),
            "parameters": model.num_parameters,
            "tied": model.tied,
        },
        "machine": dataclasses.asdict(machine),
        "rates": dataclasses.asdict(rates),
        "max_seq_len": question.flags.max_seq_len,
        "world_size": question.flags.world_size,
        "configurations": [row_facts(row) for row in rows],
        "fastest": next((row.name for row in rows if not row.short), None),
        "written": None if written is None else row_facts(written),
        "assumptions": assumptions(question, rates),
    }


def row_facts(row: Row) -> dict[str, Any]:
    """One configuration as plain values."""
    return {
        "name": row.name,
        "fits": not row.short,
        **need_facts(row.need),
        "seconds": seconds_facts(row.seconds),
        "lacks": list(row.short),
        "would_fit_with": list(row.advice),
    }


def need_facts(need: Need) -> dict[str, Any]:
    """Bytes of a configuration as plain values."""
    return {
        "gpu": {**dataclasses.asdict(need.gpu), "total": need.gpu.total},
        "host": {
            "states": need.host_states,
            "buffers": need.host_buffers,
            "processes": need.host_processes,
            "total": need.host,
        },
        "nvme": need.nvme,
        "checkpoint": need.checkpoint,
        "export": need.export,
    }


def seconds_facts(seconds: Seconds) -> dict[str, Any]:
    """Seconds of a step as plain values."""
    return {**dataclasses.asdict(seconds), "total": seconds.total}


def probed_facts(question: Question, probed: Probed) -> dict[str, Any]:
    """A candidate that ran as plain values: bytes, seconds of a step, tokens of all ranks."""
    tokens = question.flags.train_batch_size * question.flags.max_seq_len
    return {
        "name": probed.row.name,
        "memory": "resident on the host" if fit_probe.on_cpu() else "allocated on the GPU",
        "predicted": {
            "peak": probed.predicted_peak,
            "seconds": probed.row.seconds.total,
            "tokens_per_s": tokens / probed.row.seconds.total,
        },
        "measured": None
        if probed.peak is None or probed.seconds is None
        else {
            "peak": probed.peak,
            "seconds": probed.seconds,
            "tokens_per_s": tokens / probed.seconds,
        },
        "problem": probed.problem,
    }


def _probed_table(question: Question, probed: list[Probed]) -> None:
    facts = [probed_facts(question, p) for p in probed]
    steps = question.flags.probe
    print(
        f"\nProbed here with sizes for this model, {steps} steps each, predicted / measured; the "
        f"peak is the fullest rank's, in GiB, {facts[0]['memory']}:"
    )
    for fact in facts:
        one, two = fact["predicted"], fact["measured"]
        parts = [fact["problem"]] if fact["problem"] else []
        if two is not None:
            parts += [
                f"peak {_gib(one['peak'])} / {_gib(two['peak'])}",
                f"{one['tokens_per_s']:,.0f} / {two['tokens_per_s']:,.0f} tokens/s",
                f"{duration(one['seconds'])} / {duration(two['seconds'])} a step",
            ]
        print(f"  {fact['name']}: {', '.join(parts)}")
    if fit_probe.on_cpu():
        print("  The predicted speed is that of the GPU asked about; these ranks ran on a CPU.")


def _table(question: Question, machine: Machine, rows: list[Row]) -> None:
    from rich.table import Table

    flags = question.flags
    width = None if sys.stdout.isatty() else WIDTH
    console = open_console(needs_reader=True, tables=True, width=width)
    print(
        f"{flags.model_id}: {question.model.num_parameters / 1e9:.2f} B parameters, rows of "
        f"{flags.max_seq_len:,} x {flags.per_device_batch}, {flags.world_size} x "
        f"{_gib(machine.gpu_memory)} GiB; in GiB, of a rank at its peak or of a node (host, NVMe)"
    )
    table = Table(box=None, pad_edge=False)
    table.add_column("configuration", no_wrap=True)
    heads = ["fits", *_HEADS.values(), "GPU", "host", "NVMe", "ckpt", "export", "step"]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    for row in rows:
        need = row.need
        parts = [_gib(getattr(need.gpu, name)) for name in PARTS]
        sizes = [need.gpu.total, need.host, need.nvme, need.checkpoint, need.export]
        table.add_row(row.name, "no" if row.short else "yes", *parts, *map(_gib, sizes),
                      duration(row.seconds.total))  # fmt: skip
    console.print(table)
    print()


def _gib(size: float) -> str:
    return f"{math.ceil(size / GIB * 10) / 10:.1f}" if size else "0"


def duration(seconds: float) -> str:
    """Seconds in words: 45 s, 12 min, 3.4 h."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"

"""Configurations held against a machine: what fits, what is short, what would make it fit.

Owns the comparison. The bytes are `engine.memory`'s, the seconds `engine.rates`'; what the layers
keep comes from the caller. No torch.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ds_sft.engine import memory, tuning
from ds_sft.engine.memory import Need
from ds_sft.engine.rates import Rates, Seconds
from ds_sft.errors import ConfigError
from ds_sft.fit_question import Machine, Question

LENGTHS = tuple(1024 * n for n in (512, 256, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1))
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One configuration, held against the machine."""

    name: str
    """Of the JSON."""
    need: Need
    """What it takes."""
    seconds: Seconds
    """Of a step."""
    short: tuple[str, ...]
    """What is too small, in words; empty = it fits."""
    advice: tuple[str, ...]
    """What would make it fit."""


def usable(
    question: Question, jsons: Mapping[str, dict[str, Any]]
) -> tuple[dict[str, dict[str, Any]], list[str]]:
    """The files that can run on this number of ranks, and why the others cannot.

    Raises ConfigError when none can.
    """
    good, refused = {}, []
    for name, value in jsons.items():
        try:
            question.config(value, name, question.flags.world_size)
            good[name] = value
        except ConfigError as error:
            refused.append(str(error))
    if not good:
        raise ConfigError(refused[0])
    return good, refused


def compare(
    question: Question,
    jsons: Mapping[str, dict[str, Any]],
    machine: Machine,
    machine_rates: Rates,
) -> list[Row]:
    """Every configuration, those that fit first, the fastest on top."""
    rows = [row(question, name, value, machine, machine_rates) for name, value in jsons.items()]
    rows = [
        r if not r.short else replace(r, advice=advice(question, r.name, jsons[r.name], machine))
        for r in rows
    ]
    return sorted(rows, key=lambda r: (bool(r.short), r.seconds.total))


def row(
    question: Question, name: str, value: dict[str, Any], machine: Machine, machine_rates: Rates
) -> Row:
    """One configuration against the machine, without advice."""
    need = question.need(value, name)
    return Row(
        name=name,
        need=need,
        seconds=question.seconds(value, name, machine_rates),
        short=tuple(what for what, _ in shortages(need, machine)),
        advice=(),
    )


def other_layers(question: Question) -> Iterator[tuple[str, Question]]:
    """Ways to run the layers that hold less, the cheapest first: the flags, and the question so."""
    if question.remeasure is None:
        return
    flags = question.flags
    ways: list[tuple[str, dict[str, Any]]] = []
    if flags.recompute_every != 1:
        ways.append(("--recompute-every 1", {"recompute_every": 1}))
    if flags.mlp_tiles == 0:
        ways.append(("--mlp-tiles auto", {"mlp_tiles": "auto"}))
    alone = list(ways)
    if not flags.offload_activations:
        ways.append(("--offload-activations", {"offload_activations": True}))
        alone = ways if flags.recompute_every else alone  # it moves what is recomputed from
    for tried in [*([way] for way in alone), *([ways] if len(ways) > 1 else [])]:
        changed = replace(flags, **{k: v for _, changes in tried for k, v in changes.items()})
        again = replace(question, flags=changed, activations=question.remeasure(changed))
        yield " ".join(words for words, _ in tried), again


def shortages(need: Need, machine: Machine) -> list[tuple[str, str]]:
    """What a configuration lacks: words, and `gpu`, `host` or `nvme`."""
    found = []
    if need.gpu.total > machine.gpu_memory:
        found.append(
            (f"{gib(need.gpu.total)} of a GPU (there are {gib(machine.gpu_memory)})", "gpu")
        )
    if need.host > machine.host_memory:
        found.append(
            (f"{gib(need.host)} of host memory (there are {gib(machine.host_memory)})", "host")
        )
    if need.nvme and machine.nvme is None:
        found.append((f"{gib(need.nvme)} of NVMe (no --nvme-path)", "nvme"))
    elif machine.nvme is not None and need.nvme > machine.nvme:
        found.append((f"{gib(need.nvme)} of NVMe (there are {gib(machine.nvme)})", "nvme"))
    return found


def advice(
    question: Question, name: str, value: dict[str, Any], machine: Machine
) -> tuple[str, ...]:
    """What would make it fit: other sizes, other layers, a shorter row, more GPUs, more memory."""
    flags = question.flags

    def fits(json_dict: dict[str, Any], asked: Question = question, **changes: int) -> bool:
        try:
            need = asked.need(json_dict, name, **changes)
        except ConfigError:  # a file for another number of ranks
            return False
        lacking = {kind for _, kind in shortages(need, machine)}
        return not lacking - ({"nvme"} if machine.nvme is None else set())

    found = []
    need = question.need(value, name)
    kinds = {kind for _, kind in shortages(need, machine)}
    if kinds == {"nvme"}:
        return (f"--nvme-path DIR, a local disk with {gib(need.nvme)} free",)
    if fits(tuning.tuned(value, question.setup(), roomy=False)):
        found.append("sizes for this model (--write my.json)")
    if "gpu" in kinds:
        found += [w for w, asked in other_layers(question) if fits(value, asked)][:1]
        # A shorter row never needs more, so the lengths are sorted by whether they fit.
        shorter = [n for n in LENGTHS if n < flags.max_seq_len]
        first = bisect.bisect_left(shorter, True, key=lambda n: fits(value, length=n))
        if first < len(shorter):
            found.append(f"--max-seq-len {shorter[first]}")
    more = [w for w in WORLD_SIZES if w > flags.world_size]
    world = next((w for w in more if fits(value, world_size=w)), None)
    if world:
        found.append(f"{world} GPUs")
    if kinds == {"host"}:
        found.append(f"{gib(need.host)} of host memory")
    return tuple(found) or ("another JSON",)


def fitting(
    question: Question,
    jsons: Mapping[str, dict[str, Any]],
    machine: Machine,
    machine_rates: Rates,
) -> tuple[str, dict[str, Any]] | None:
    """Name and content of the fastest file that fits, with sizes for this model."""
    found = best_of_each(question, jsons, machine, machine_rates)
    return (found[0][0].name, found[0][1]) if found else None


def best_of_each(
    question: Question,
    jsons: Mapping[str, dict[str, Any]],
    machine: Machine,
    machine_rates: Rates,
) -> list[tuple[Row, dict[str, Any]]]:
    """Each file that fits with sizes for this model, roomy ones if they do, the fastest first."""
    found = []
    for name, value in jsons.items():
        for roomy in (True, False):
            candidate = tuning.tuned(value, question.setup(), roomy=roomy)
            result = row(question, name, candidate, machine, machine_rates)
            if not result.short:
                found.append((result.seconds.total, not roomy, name, result, candidate))
                break
    return [(result, candidate) for *_, result, candidate in sorted(found, key=lambda f: f[:3])]


def gib(size: float) -> str:
    """Bytes in words."""
    return f"{size / memory.GIB:.1f} GiB"

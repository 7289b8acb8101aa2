"""Configurations held against a machine: what fits, what is short, what would make it fit.

Owns the comparison. The bytes are `engine.memory`'s, the seconds `engine.rates`'; what the layers
keep comes from the caller. No torch.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import memory, rates, tuning
from ds_sft.engine.config import engine_config
from ds_sft.engine.memory import Activations, Need, Setup
from ds_sft.engine.rates import Rates, Seconds, Work
from ds_sft.errors import ConfigError
from ds_sft.recipe import low_rank
from ds_sft.recipe.batching import BatchPlan
from ds_sft.recipe.recipe import Recipe

if TYPE_CHECKING:
    from ds_sft.fit import FitFlags

LENGTHS = tuple(1024 * n for n in (512, 256, 128, 96, 64, 48, 32, 24, 16, 12, 8, 6, 4, 3, 2, 1))
WORLD_SIZES = (2, 4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What there is."""

    gpu_memory: int
    """Bytes of one GPU."""
    host_memory: int
    """Bytes of one node."""
    nvme: int | None
    """Bytes free for swap files of a node; None = no disk was named."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model and how it is to be trained."""

    model: ModelFiles
    """Shapes and config.json."""
    flags: FitFlags
    """As asked."""
    activations: Callable[[int], Activations]
    """Of a microbatch of so many tokens."""
    remeasure: Callable[[FitFlags], Callable[[int], Activations]] | None = None
    """`activations` with other flags, for advice; None = none is given about the layers."""

    def setup(self, world_size: int | None = None) -> Setup:
        """Sizes for the arithmetic."""
        world_size = world_size or self.flags.world_size
        return Setup(
            numels={name: math.prod(shape) for name, (shape, _) in self.model.tensors.items()},
            tied=self.model.tied,
            world_size=world_size,
            gpus_per_node=self.flags.gpus_per_node,
            compute_bytes=2 if self.flags.compute_dtype == "bfloat16" else 4,
            reduce_bytes=2 if self.flags.grad_reduce_dtype == "bfloat16" else 4,
            moments=low_rank.moments_of(self.model.shapes, self.recipe, world_size),
        )

    @property
    def recipe(self) -> Recipe:
        """What was asked, as a recipe; the rest moves neither memory nor speed."""
        return Recipe(
            model_id=self.flags.model_id, learning_rate=1e-5, loss_groups=self.flags.loss_groups,
            train_batch_size=self.flags.train_batch_size,
            compute_dtype=self.flags.compute_dtype,
            grad_reduce_dtype=self.flags.grad_reduce_dtype,
            optimizer=self.flags.optimizer, apollo_rank=self.flags.apollo_rank,
            master_dtype=self.flags.master_dtype,
            optimizer_state_dtype=self.flags.optimizer_state_dtype,
        )  # fmt: skip

    @property
    def batches(self) -> BatchPlan:
        """How a step is split over ranks."""
        return BatchPlan(
            self.recipe, [1], world_size=self.flags.world_size,
            per_device_batch=self.flags.per_device_batch, allow_idle=True,
        )  # fmt: skip

    def check_optimizer(self) -> None:
        """Raise ConfigError for a rank that training would refuse."""
        if self.recipe.apollo is not None:
            low_rank.check(low_rank.by_name(self.model.shapes), self.recipe.apollo.rank)

    def config(self, json_dict: dict[str, Any], where: str, world_size: int) -> dict[str, Any]:
        """The complete DeepSpeed configuration. Raises ConfigError."""
        return engine_config(
            json_dict, where, self.recipe, world_size=world_size,
            per_device_batch=self.flags.per_device_batch,
        )  # fmt: skip

    def need(
        self, json_dict: dict[str, Any], where: str, *, length: int = 0, world_size: int = 0
    ) -> Need:
        """Bytes of a configuration, at another length or number of ranks if given."""
        world_size = world_size or self.flags.world_size
        tokens = (length or self.flags.max_seq_len) * self.flags.per_device_batch
        config = self.config(json_dict, where, world_size)
        return memory.need(self.setup(world_size), config, self.activations(tokens))

    def seconds(self, json_dict: dict[str, Any], where: str, machine_rates: Rates) -> Seconds:
        """Estimated time of one optimizer step."""
        flags, setup = self.flags, self.setup()
        tokens = flags.per_device_batch * flags.max_seq_len
        work = Work(
            microbatches=self.batches.micro_per_step,
            micro_flops=rates.micro_flops(
                self.model.config,
                setup,
                tokens,
                flags.max_seq_len,
                again=1 / flags.recompute_every if flags.recompute_every else 0.0,
            ),
        )
        config = self.config(json_dict, where, flags.world_size)
        return rates.seconds(setup, config, machine_rates, work)


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

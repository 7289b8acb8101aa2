"""What `ds-sft fit` is asked: a model, how it is to be trained, and the machine.

Owns the flags, and the way from the question to the inputs of `engine.memory` and `engine.rates`.
What the layers keep comes from the caller. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import memory, rates
from ds_sft.engine.config import engine_config
from ds_sft.engine.memory import Activations, Need
from ds_sft.engine.rates import Rates, Seconds, Work
from ds_sft.engine.setup import Setup
from ds_sft.errors import ConfigError
from ds_sft.recipe import low_rank
from ds_sft.recipe.batching import BatchPlan
from ds_sft.recipe.recipe import Recipe

CONFIGS = Path("ds_configs")


@dataclass(frozen=True, slots=True, kw_only=True)
class FitFlags:
    """Say which DeepSpeed JSON fits a machine, what it needs and how fast it is."""

    model_id: str
    """Hugging Face id in the cache, or a directory; config.json is enough, weights are not read."""
    max_seq_len: int = 32768
    """Tokens of a pack."""
    gpu_memory: str = ""
    """Memory of one GPU, for example 24GiB or 80GB; default: this machine's."""
    host_memory: str = ""
    """Memory of one node; default: this machine's, or its container's limit."""
    nvme_path: Annotated[Path | None, tyro.conf.arg(aliases=("--nvme",))] = None
    """Directory on a local disk for swap files; its free space counts."""
    world_size: int = 1
    """Ranks (GPUs) over all nodes."""
    gpus_per_node: int = 8
    """GPUs that share a node's memory and disk."""
    per_device_batch: int = 1
    """Packs per rank in one microbatch."""
    train_batch_size: int = 64
    """Packs in one optimizer step, for the estimated time."""
    loss_groups: int = 2
    """As in training: parts of a step, each of whole microbatches on every rank."""
    compute_dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """Precision of forward and backward."""
    grad_reduce_dtype: Literal["float32", "bfloat16"] = "float32"
    """Precision in which gradients are summed over ranks."""
    optimizer: Literal["adamw", "apollo", "apollo-mini"] = "adamw"
    """As in training: moments of every parameter, or low-rank ones."""
    apollo_rank: int | None = None
    """As in training: rank of the moments; none = 256, of apollo-mini 1."""
    master_dtype: Literal["float32", "bfloat16"] = "float32"
    """As in training: precision of the masters."""
    optimizer_state_dtype: Literal["float32", "bfloat16"] = "float32"
    """As in training: precision of Adam's moments."""
    loss_chunk_size: int = 2048
    """Tokens per chunk of the cross-entropy."""
    recompute_every: int = 1
    """As in training: compute every so many layers again in backward; 0 = none."""
    offload_activations: bool = False
    """As in training: inputs of recomputed layers wait in host memory."""
    mlp_tiles: int | Literal["auto"] = 0
    """As in training: run each MLP over so many tiles of tokens."""
    configs: Path = CONFIGS
    """Directory of the DeepSpeed JSONs to compare, or one file."""
    measure: bool = False
    """Measure this machine's rates (matrix products, memory, disk) instead of assuming them."""
    probe: int = 0
    """Run so many real optimizer steps (2 or more) of the fastest three that fit, with sizes for
    this model, on this machine; 0 = predict only."""
    write: Path | None = None
    """Write the fastest that fits as a JSON with sizes for this model; with --probe the fastest
    measured."""
    json: bool = False
    """Print one JSON object instead of a table."""

    def __post_init__(self) -> None:
        for name in ("max_seq_len", "world_size", "gpus_per_node", "per_device_batch",
                     "train_batch_size", "loss_groups", "loss_chunk_size"):  # fmt: skip
            value = getattr(self, name)
            if not 1 <= value <= 10**9:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}={value} must be from 1 to 1,000,000,000")
        for name in ("recompute_every", "mlp_tiles"):
            value = getattr(self, name)
            if value != "auto" and not 0 <= value <= 10**9:
                raise ConfigError(f"--{name.replace('_', '-')}={value} must be 0 or more")
        if self.probe != 0 and not 2 <= self.probe <= 1000:
            raise ConfigError(
                f"--probe={self.probe} must be from 2 to 1000 steps (the first one does not count)"
            )
        if self.offload_activations and self.recompute_every == 0:
            raise ConfigError(
                "--offload-activations with --recompute-every 0: there are no inputs to move"
            )
        if self.compute_dtype == "float32" and self.grad_reduce_dtype == "bfloat16":
            raise ConfigError(
                "--compute-dtype float32 with --grad-reduce-dtype bfloat16 is refused by training: "
                "use --grad-reduce-dtype float32"
            )


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

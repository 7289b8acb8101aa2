"""What `ds-sft fit` is asked: a model, how it is to be trained, and the machine.

Owns the way from the question to the inputs of `engine.memory` and `engine.rates`. What the layers
keep comes from the caller. No torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import memory, rates
from ds_sft.engine.config import engine_config
from ds_sft.engine.memory import Activations, Need
from ds_sft.engine.rates import Rates, Seconds, Work
from ds_sft.engine.setup import Setup
from ds_sft.recipe import low_rank
from ds_sft.recipe.batching import BatchPlan
from ds_sft.recipe.recipe import Recipe

if TYPE_CHECKING:
    from ds_sft.fit import FitFlags


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

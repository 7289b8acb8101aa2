"""What decides the loss curve: one frozen `Recipe`.

Owns every number that changes what is learned. Leaves memory and speed to the DeepSpeed JSON, and
paths and cadence of the machine to `RunConfig`. Invariant: a `Recipe` that exists is consistent.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import Any

from ds_sft.errors import ConfigError

MAX_STEPS = 100_000_000
MAX_BATCH = 1_000_000  # packs: the plan lists those of a step
MAX_ERA = 2**40
WIDTHS = {"bfloat16": 2, "float32": 4}
LR_SCHEDULES = ("cosine", "linear", "constant", "inv_sqrt", "inv")
OPTIMIZERS = ("adamw", "apollo", "apollo-mini")
NO_FP8 = "FP8 (Transformer Engine) is out of scope for now: use bfloat16"


def _require(ok: bool, name: str, value: object, advice: str) -> None:
    if not ok or value == math.inf:  # NaN compares false, so it lands here too
        raise ConfigError(f"{name}={value} is out of range: {advice}")


def asks_for_fp8(word: str) -> bool:
    """Whether the value of a flag, or the name of a flag or key, means 8-bit floating point."""
    plain = word.lower().replace("-", "").replace("_", "")
    return any(part in plain for part in ("fp8", "float8", "e4m3", "e5m2", "transformerengine"))


def _choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if asks_for_fp8(value):
        raise ConfigError(f"{name}={value!r}: {NO_FP8}")
    if value not in choices:
        raise ConfigError(f"{name}={value!r} is not known: use {', '.join(choices)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApolloSettings:
    """How APOLLO updates; source of the values: arXiv:2412.05270."""

    rank: int
    """Columns of the projected gradient."""
    scale: float
    """An update is multiplied by the root of this."""
    update_proj_gap: int
    """Updates with one projection."""
    tensor_wise: bool
    """APOLLO-mini: one factor for a whole tensor, the scale before the growth limit."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """One training recipe. Raises ConfigError when its fields contradict each other."""

    model_id: str
    """Hugging Face id or directory of the model to start from."""
    chat_template: str = ""
    """Chat template that `prepare` should use: "qwen3" is the shipped one, "" the tokenizer's."""
    learning_rate: float
    """Peak learning rate."""
    weight_decay: float = 0.0
    """Decoupled weight decay; norms, embeddings and biases are excluded."""
    warmup: float = 0.0
    """Warmup: up to 1.0 a fraction of the run, above that a whole number of steps."""
    decay: float | None = None
    """Decay: as warmup; none = everything after the warmup."""
    min_lr_ratio: float = 0.1
    """Floor of the learning rate, relative to the peak."""
    lr_schedule: str = "cosine"
    """Shape of the decay: cosine, linear, constant, inv_sqrt or inv."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which gradients are scaled down; 0 = off."""
    beta1: float = 0.9
    """Adam: decay of the first moment."""
    beta2: float = 0.999
    """Adam: decay of the second moment."""
    eps: float = 1e-8
    """Adam: added to the root of the second moment."""
    optimizer: str = "adamw"
    """Optimizer: adamw (Levanter's), or apollo or apollo-mini, whose moments are low-rank."""
    apollo_rank: int | None = None
    """APOLLO: rank of the moments; none = 256, of apollo-mini 1."""
    apollo_scale: float | None = None
    """APOLLO: updates are multiplied by the root of this; none = 1.0, of apollo-mini 128."""
    apollo_update_proj_gap: int | None = None
    """APOLLO: updates until the next random projection; none = 200."""
    train_batch_size: int
    """Packs in one optimizer step, over all ranks."""
    loss_groups: int = 2
    """Groups of the batch that are normalised by their own target count, then averaged."""
    num_train_steps: int = 0
    """Optimizer steps of the whole run; 0 = ceil(8 * packs / train_batch_size)."""
    steps_per_checkpoint: int = 20
    """A native checkpoint at every label that is a multiple of this."""
    steps_per_hf_export: int = 100
    """A Hugging Face export at every label that is a multiple of this."""
    compute_dtype: str = "bfloat16"
    """Precision of forward and backward."""
    grad_reduce_dtype: str = "float32"
    """Precision in which gradients are summed over ranks."""
    master_dtype: str = "float32"
    """Precision of the masters that Adam updates; bfloat16 loses updates below half a step of it,
    so the curve is not Levanter's."""
    optimizer_state_dtype: str = "float32"
    """Precision of Adam's moments; bfloat16 needs --master-dtype bfloat16."""
    order: str = "sequential"
    """Order of the packs: sequential, shuffle (one seeded permutation), levanter-blocks,
    levanter-shuffle or levanter-era (Levanter's mixture with its `shuffle` false, true or a
    number), or an .npy file."""
    mixture_block_size: int = 2048
    """Packs in a block of Levanter's mixture, which is shuffled block by block."""
    era_length: int = 0
    """Packs in an era of --order levanter-era: the number that Levanter's `shuffle` has."""
    data_seed: int = 42
    """Seed of --order shuffle and of Levanter's orders."""
    trainer_seed: int = 0
    """Seed of torch and numpy in the trainer."""

    def __post_init__(self) -> None:
        self._check_numbers()
        self._check_order()
        self._check_optimizer()
        self._check_schedule()
        self._check_precision()
        self._check_groups()

    def _check_numbers(self) -> None:
        for name in (
            "train_batch_size",
            "loss_groups",
            "steps_per_checkpoint",
            "steps_per_hf_export",
        ):
            _require(getattr(self, name) > 0, name, getattr(self, name), "use a number above 0")
        _require(
            self.train_batch_size <= MAX_BATCH,
            "train_batch_size", self.train_batch_size, f"use at most {MAX_BATCH:,}",
        )  # fmt: skip
        _require(
            0 <= self.num_train_steps <= MAX_STEPS,
            "num_train_steps",
            self.num_train_steps,
            "use 0 (derived from the data) or more",
        )
        _require(
            self.learning_rate > 0, "learning_rate", self.learning_rate, "use a number above 0"
        )
        for name in ("weight_decay", "max_grad_norm"):
            _require(getattr(self, name) >= 0, name, getattr(self, name), "use 0 (off) or more")
        _require(self.eps > 0, "eps", self.eps, "use a number above 0")
        for name in ("beta1", "beta2"):
            _require(0 <= getattr(self, name) < 1, name, getattr(self, name), "use 0 <= x < 1")
        _require(0 <= self.min_lr_ratio <= 1, "min_lr_ratio", self.min_lr_ratio, "use 0 to 1")
        for name in ("trainer_seed", "data_seed"):
            _require(
                0 <= getattr(self, name) < 2**32, name, getattr(self, name), "use 0 to 2^32 - 1"
            )

    def _check_order(self) -> None:
        _require(
            1 <= self.mixture_block_size < 2**16,
            "mixture_block_size",
            self.mixture_block_size,
            "use 1 to 65535, as Levanter does",
        )
        _require(
            self.era_length == 0 or 2 <= self.era_length <= MAX_ERA,
            "era_length",
            self.era_length,
            "use 2 to 2^40, as Levanter does",
        )
        if (self.order == "levanter-era") != (self.era_length > 0):
            raise ConfigError(
                f"order={self.order} with era_length={self.era_length}: order=levanter-era needs "
                "the number of Levanter's `shuffle` as era_length, and no other order takes one"
            )

    def _check_schedule(self) -> None:
        _choice("lr_schedule", self.lr_schedule, LR_SCHEDULES)
        if self.lr_schedule == "inv" and self.min_lr_ratio == 0:
            raise ConfigError("lr_schedule=inv divides by min_lr_ratio: use a min_lr_ratio above 0")

    def _check_precision(self) -> None:
        for name in (
            "compute_dtype", "grad_reduce_dtype", "master_dtype", "optimizer_state_dtype",
        ):  # fmt: skip
            _choice(name, getattr(self, name), ("bfloat16", "float32"))
        if self.compute_dtype == "float32" and self.grad_reduce_dtype == "bfloat16":
            raise ConfigError(
                "compute_dtype=float32 with grad_reduce_dtype=bfloat16 loses what it "
                "computed: use --grad-reduce-dtype float32"
            )
        if self.compute_dtype == "float32" and self.master_dtype == "bfloat16":
            raise ConfigError(
                "compute_dtype=float32 with master_dtype=bfloat16 computes what the masters cannot "
                "hold: use --compute-dtype bfloat16"
            )
        if self.master_dtype == "float32" and self.optimizer_state_dtype == "bfloat16":
            raise ConfigError(
                "optimizer_state_dtype=bfloat16 with master_dtype=float32 is not possible with "
                "DeepSpeed: add --master-dtype bfloat16"
            )

    def _check_groups(self) -> None:
        if self.train_batch_size % self.loss_groups:
            low = self.train_batch_size // self.loss_groups * self.loss_groups
            near = [str(n) for n in (low, low + self.loss_groups) if n > 0]
            raise ConfigError(
                f"train_batch_size={self.train_batch_size} cannot be split into "
                f"{self.loss_groups} loss groups: use {' or '.join(near)}"
            )

    def _check_optimizer(self) -> None:
        _choice("optimizer", self.optimizer, OPTIMIZERS)
        for name in ("master_dtype", "optimizer_state_dtype"):
            if self.optimizer != "adamw" and getattr(self, name) != "float32":
                raise ConfigError(
                    f"optimizer={self.optimizer} with {name}={getattr(self, name)} is not "
                    f"possible: its arithmetic is float32: use {name}=float32 or optimizer=adamw"
                )
        for name in ("apollo_rank", "apollo_scale", "apollo_update_proj_gap"):
            value = getattr(self, name)
            if value is None:
                continue
            if self.optimizer == "adamw":
                raise ConfigError(
                    f"{name}={value} means nothing to optimizer=adamw: drop it, or use "
                    "optimizer=apollo or apollo-mini"
                )
            _require(0 < value <= 2**31, name, value, "use a number above 0")

    @property
    def apollo(self) -> ApolloSettings | None:
        """What APOLLO needs to know, defaults filled in; None for AdamW."""
        if self.optimizer == "adamw":
            return None
        mini = self.optimizer == "apollo-mini"
        return ApolloSettings(
            rank=self.apollo_rank or (1 if mini else 256),
            scale=self.apollo_scale or (128.0 if mini else 1.0),
            update_proj_gap=self.apollo_update_proj_gap or 200,
            tensor_wise=mini,
        )

    def resolved(self) -> Recipe:
        """A copy that says APOLLO's defaults, so that records and comparisons hold the values."""
        settings = self.apollo
        if settings is None:
            return self
        return self.replace(
            apollo_rank=settings.rank,
            apollo_scale=settings.scale,
            apollo_update_proj_gap=settings.update_proj_gap,
        )

    @property
    def departures(self) -> list[str]:
        """What keeps the curve from being Levanter's, in words."""
        found = []
        if self.optimizer != "adamw":
            found.append(f"the optimizer is {self.optimizer}")
        if self.master_dtype != "float32":
            found.append("masters and the gradients that Adam reads are bfloat16")
        if self.optimizer_state_dtype != "float32":
            found.append("Adam's moments are bfloat16")
        return found

    def replace(self, **changes: Any) -> Recipe:
        """A copy with `changes`, checked again."""
        return dataclasses.replace(self, **changes)

    def steps(self, num_packs: int) -> int:
        """Optimizer steps of the run over a data set of `num_packs`; 8 epochs when not given."""
        return self.num_train_steps or -(-8 * num_packs // self.train_batch_size)

"""The learning rate as a pure function of the optimizer step, as Levanter computes it.

Owns warmup, plateau and decay of one cycle. Source: Levanter `optim/config.py`, the later version
in marin, which clamps warmup and decay to the run. Invariant: `lr_multiplier(step)` is what the
update of optimizer step `step` uses: 0.0 at step 0 exactly when there is a warmup step. The floor
(reached at `num_steps`) is never used. No state: resume needs nothing from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from ds_sft.errors import ConfigError
from ds_sft.recipe.recipe import Recipe

_INV_SQRT_TIMESCALE = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Steps of each phase, and the multiplier of the peak learning rate at every step."""

    num_steps: int
    """Optimizer steps of the run."""
    warmup_steps: int
    """Linear rise from 0 to the peak."""
    decay_steps: int
    """Length of the decay at the end."""
    shape: str
    """cosine, linear, constant, inv_sqrt or inv."""
    min_lr_ratio: float
    """Floor relative to the peak."""

    @classmethod
    def from_recipe(cls, recipe: Recipe, num_packs: int) -> Schedule:
        """The schedule of `recipe` over a data set of `num_packs` packs."""
        total = recipe.steps(num_packs)
        warmup = min(fraction_or_steps("warmup", recipe.warmup, total), total)
        room = total - warmup
        decay = room if recipe.decay is None else min(
            fraction_or_steps("decay", recipe.decay, total), room
        )  # fmt: skip
        return cls(
            num_steps=total,
            warmup_steps=warmup,
            decay_steps=decay,
            shape=recipe.lr_schedule,
            min_lr_ratio=recipe.min_lr_ratio,
        )

    @property
    def stable_steps(self) -> int:
        """Steps at the peak between warmup and decay."""
        return self.num_steps - self.warmup_steps - self.decay_steps

    def lr_multiplier(self, step: int) -> float:
        """Factor of the peak learning rate in the update of 0-based optimizer step `step`."""
        if step < self.warmup_steps:
            return step / self.warmup_steps
        since_decay = step - self.warmup_steps - self.stable_steps
        if since_decay < 0 or self.decay_steps == 0:
            return 1.0
        return _decayed(
            self.shape, since_decay, self.decay_steps, self.warmup_steps, self.min_lr_ratio
        )


def _decayed(shape: str, t: int, steps: int, warmup: int, floor: float) -> float:
    """Multiplier `t` steps after the decay began; the formulas are those of optax and Levanter."""
    done = min(t, steps) / steps
    if shape == "cosine":
        return (1.0 - floor) * 0.5 * (1.0 + math.cos(math.pi * done)) + floor
    if shape == "linear":
        return 1.0 + (floor - 1.0) * done
    if shape == "inv_sqrt":
        return max(floor, min(1.0, 1.0 / math.sqrt(max(t + warmup, 1) / _INV_SQRT_TIMESCALE)))
    if shape == "inv":
        return max(floor, min(1.0, 1.0 / ((1.0 / floor - 1.0) * max(t, 1) / steps + 1.0)))
    assert shape == "constant", shape
    return 1.0


def fraction_or_steps(name: str, value: float, total: int) -> int:
    """Levanter's reading of a duration: up to 1.0 a fraction of `total`, above it whole steps."""
    if not value >= 0 or (value > 1 and value % 1 != 0):  # NaN is refused too
        raise ConfigError(
            f"{name}={value} is neither a fraction (0 to 1) nor a whole number of steps: "
            "use for example 0.05 or 100"
        )
    return int(value * total) if value <= 1 else int(value)

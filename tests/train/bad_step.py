"""A training whose step 4 goes wrong on rank 1, in the way that BAD names (see `launch_many`)."""

from __future__ import annotations

import dataclasses
import math
import os
from collections.abc import Callable, Iterator
from typing import Any

from ds_sft import train
from ds_sft.engine import step
from ds_sft.engine.step import StepResult
from ds_sft.model.sft import SftModel

BAD_STEP = 4


def main(argv: list[str]) -> None:
    """Damage the step, then train."""
    what, mine = os.environ["BAD"], os.environ["RANK"] == "1"
    if what == "left out":
        leave_out()
    elif what == "gradient" and mine:
        spoil_scale(lambda number: number == BAD_STEP)
    elif what == "every gradient" and mine:
        spoil_scale(lambda number: True)
    elif what == "loss" and mine:
        spoil_loss()
    elif what == "weight":
        spoil_weight(mine)
    train.main(argv)


def leave_out() -> None:
    """The step is not computed at all; both ranks."""
    real = step.train_step

    def train_step(engine: Any, data: Any, batches: Any, number: int, lr: float, **kw: Any) -> Any:
        if number != BAD_STEP:
            return real(engine, data, batches, number, lr, **kw)
        return StepResult(
            step=number, loss=0.0, lr=lr, grad_norm=0.0, target_tokens=1, tokens=1,
            rank0_flag=False, over_budget=False, problem="",
        )  # fmt: skip

    step.train_step = train_step


def spoil_scale(when: Callable[[int], bool]) -> None:
    """A factor that is not a number: the loss is fine, the gradient is not."""
    real = step.prefetched

    def prefetched(data: Any, batches: Any, number: int, device: Any) -> Iterator[Any]:
        for micro, batch in real(data, batches, number, device):
            bad = when(number) and micro.group == 1
            yield dataclasses.replace(micro, scale=math.nan) if bad else micro, batch

    step.prefetched = prefetched


def spoil_loss() -> None:
    """The second microbatch's loss is not a number, and its gradient is none either."""
    real, calls = SftModel.forward, [0]

    def forward(self: SftModel, *args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        loss = real(self, *args, **kwargs)
        return loss * math.nan if calls[0] == 4 * BAD_STEP + 2 else loss

    SftModel.forward = forward  # type: ignore[method-assign]


def spoil_weight(mine: bool) -> None:
    """After the update one weight of rank 1's part is infinite, and once more two steps later.

    The update between the two writes that part anew from the master.
    """
    real = step.train_step

    def train_step(engine: Any, data: Any, batches: Any, number: int, lr: float, **kw: Any) -> Any:
        result = real(engine, data, batches, number, lr, **kw)
        if mine and number in (BAD_STEP, BAD_STEP + 2):
            engine.module.lm_head.weight.ds_tensor.data[5] = math.inf
        return result

    step.train_step = train_step

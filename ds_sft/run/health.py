"""Is the run still a training? Dropped updates, spikes of the loss, weights that are not finite.

Owns when a run with bad numbers ends. Invariant: it ends before a checkpoint of such weights is
written, so that the newest checkpoint is always one to go on from; all ranks decide alike, since
they judge the same numbers. Leaves finding them to `engine.nonfinite`.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import Any

from ds_sft.engine import nonfinite
from ds_sft.engine.build import say
from ds_sft.engine.step import StepResult
from ds_sft.errors import TrainingDiverged
from ds_sft.run_config import RunConfig

SPIKE_FACTOR = 1.5
SPIKE_WINDOW = 64  # steps of the running median
SPIKE_FROM = 16  # a median of fewer says little
NOTHING_CHANGED = "no weight was changed, the newest checkpoint is from before"


class Health:
    """The counters of one run; `dropped` and `in_a_row` live on in its checkpoints."""

    def __init__(self, engine: Any, run: RunConfig) -> None:
        self._engine, self._run = engine, run
        self._losses: deque[float] = deque(maxlen=SPIKE_WINDOW)
        self.dropped = self.in_a_row = 0

    def judge(self, result: StepResult) -> None:
        """Look at one step. Raises TrainingDiverged, on every rank, when the run has to end."""
        every = self._run.check_weights_every
        if result.problem:
            self._count(result.problem)
        elif every and (result.step + 1) % every == 0:
            self.require_finite_weights(result.step)
        if not result.problem:
            self.in_a_row = 0
            self._warn_of_spike(result)

    def _count(self, problem: str) -> None:
        self.dropped += 1
        self.in_a_row += 1
        if self._run.on_nonfinite == "stop":
            raise TrainingDiverged(
                f"{problem}: {NOTHING_CHANGED}; look at the data and the learning rate, or drop "
                "such updates with --on-nonfinite skip"
            )
        if self.in_a_row >= self._run.max_nonfinite:
            raise TrainingDiverged(
                f"{problem}: the update of {self.in_a_row} steps in a row had to be dropped "
                f"(--max-nonfinite {self._run.max_nonfinite}): {NOTHING_CHANGED} those steps"
            )
        say(f"[nonfinite] {problem}: update dropped ({self.dropped} so far)")

    def _warn_of_spike(self, result: StepResult) -> None:
        if len(self._losses) >= SPIKE_FROM:
            usual = statistics.median(self._losses)
            if result.loss > SPIKE_FACTOR * usual:
                say(
                    f"[warn] the loss of step {result.step} is {result.loss:.3f}, "
                    f"{result.loss / usual:.1f} times the median of the last "
                    f"{len(self._losses)} steps ({usual:.3f})"
                )
        self._losses.append(result.loss)

    def require_finite_weights(self, label: int) -> None:
        """Raise TrainingDiverged, on every rank, if a weight is not finite."""
        bad = nonfinite.bad_weights(self._engine)
        if bad:
            raise TrainingDiverged(
                f"after step {label} weights are not finite ({nonfinite.first(bad)}): nothing is "
                "saved, the newest checkpoint is from before; start from it with a lower "
                "--learning-rate, or look for damaged memory"
            )

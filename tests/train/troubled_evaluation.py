"""A training with trouble inside an evaluation, for `harness.launch_many`.

IN_EVALUATION is "stop 5" or "kill 5": after the first microbatch of the evaluation of label 5 the
file `stop` appears, or every rank ends by SIGKILL.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from ds_sft import train
from ds_sft.engine import evaluate


def main(words: Sequence[str]) -> None:
    """`ds_sft.train`, troubled."""
    how, at = os.environ["IN_EVALUATION"].split()
    stop_file = Path(words[words.index("--out") + 1]) / "stop"
    if_due, in_advance = train.evaluate_if_due, evaluate.in_advance
    label = -1

    def watched(engine: Any, plan: Any, log: Any, now: int, stop: Any) -> bool:
        nonlocal label
        label = now
        return if_due(engine, plan, log, now, stop)

    def troubled(*args: Any) -> Iterator[Any]:
        for i, micro in enumerate(in_advance(*args)):
            if i == 1 and label == int(at):
                stop_file.touch()
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
            yield micro

    train.evaluate_if_due, evaluate.in_advance = watched, troubled
    train.main(words)

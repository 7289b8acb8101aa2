"""Weights & Biases as far as a training uses it: writes each call as a JSON line to FAKE_WANDB_LOG.

FAKE_WANDB_BREAKS=log (or init) makes that call raise, as a lost connection would.
"""

from __future__ import annotations

import json
import os
from typing import Any


def _record(call: str, /, **values: Any) -> None:
    line = {"call": call, "rank": os.environ.get("RANK"), "pid": os.getpid(), **values}
    with open(os.environ["FAKE_WANDB_LOG"], "a") as file:
        file.write(json.dumps(line, default=str) + "\n")
    if os.environ.get("FAKE_WANDB_BREAKS") == call:
        raise ConnectionError(f"no route to the server of {call}")


class _Config:
    def update(self, values: dict, allow_val_change: bool = False) -> None:
        _record("config", keys=sorted(values), allow_val_change=allow_val_change)


class Run:
    config = _Config()

    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        _record("define_metric", name=name, step_metric=step_metric)

    def log(self, values: dict) -> None:
        _record("log", values=values)

    def finish(self) -> None:
        _record("finish")


def init(**arguments: Any) -> Run:
    _record("init", arguments=arguments)
    return Run()

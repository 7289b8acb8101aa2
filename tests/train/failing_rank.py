"""A training in which one rank alone fails, at the place that FAIL_AT names (see `launch_many`)."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from ds_sft import train
from ds_sft.engine import step
from ds_sft.run import checkpoint, export, saver, watch


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def main(argv: list[str]) -> None:
    """Break one thing on one rank, then train."""
    rank, where = os.environ["RANK"], os.environ["FAIL_AT"]
    if (rank, where) == ("1", "step"):
        after(step, "train_step", 3, lambda: full_disk())
    elif (rank, where) == ("1", "save"):
        real_save = checkpoint.save

        def save(engine: Any, *args: Any, **kwargs: Any) -> int:
            engine.checkpoint_engine.save = full_disk
            return real_save(engine, *args, **kwargs)

        saver.checkpoint.save = save
    elif (rank, where) == ("0", "publish"):
        checkpoint.publish = full_disk
    elif (rank, where) == ("0", "export"):
        export.publish = full_disk
    elif where.startswith("silent"):
        watch.BEAT_SECONDS, watch.SILENT_SECONDS = 0.5, 6.0
        if rank == where[-1]:
            after(step, "train_step", 3, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    elif (rank, where) == ("1", "signal in an export"):
        after(export, "_write_one", 3, lambda: signal.raise_signal(signal.SIGTERM))
    elif (rank, where) == ("1", "signal in a save"):
        after(checkpoint, "seal", 0, lambda: signal.raise_signal(signal.SIGUSR1))
    elif (rank, where) == ("1", "hang"):
        after(step, "train_step", 3, lambda: time.sleep(600))
    train.main(argv)


def after(module: Any, name: str, calls: int, fail: Callable[[], None]) -> None:
    """Let `module.name` work so many times; from then on `fail` comes before it."""
    real, count = getattr(module, name), 0

    def replaced(*args: Any, **kwargs: Any) -> Any:
        nonlocal count
        count += 1
        if count > calls:
            fail()
        return real(*args, **kwargs)

    setattr(module, name, replaced)

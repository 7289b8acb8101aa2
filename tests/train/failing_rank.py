"""A training in which one rank alone fails, at the place that FAIL_AT names (see `launch_many`)."""

from __future__ import annotations

import errno
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ds_sft import train
from ds_sft.engine import proofs, step
from ds_sft.run import checkpoint, export, saver, watch
from ds_sft.run.stopping import Stopping


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
        watch.BEAT_SECONDS, watch.SILENT_SECONDS = 0.5, 4.0
        if rank == where[-1]:
            after(step, "train_step", 3, lambda: os.kill(os.getpid(), signal.SIGSTOP))
    elif (rank, where) == ("1", "signal in an export"):
        after(export, "_write_one", 3, lambda: signal.raise_signal(signal.SIGTERM))
    elif (rank, where) == ("1", "signal in a save"):
        after(checkpoint, "seal", 0, lambda: signal.raise_signal(signal.SIGUSR1))
    elif where in STOPS and rank == STOPS[where][0]:
        after(Stopping, "agreed", IN_THE_FOURTH_STEP, lambda: STOPS[where][1](out_of(argv)))
    elif (rank, where) == ("0", "stop at start-up"):
        after(proofs, "prove_same_files", 0, lambda: (out_of(argv) / "stop").touch())
    elif (rank, where) == ("1", "two signals"):
        after(Stopping, "agreed", 20, lambda: two_signals(out_of(argv)))
        after(Stopping, "ignore_signals", 0, lambda: (out_of(argv) / "left").touch())
    elif where == "hang":
        watch.BEAT_SECONDS = 0.5
        if rank == "1":
            after(step, "train_step", 3, lambda: time.sleep(600))
    train.main(argv)


IN_THE_FOURTH_STEP = 3 * 16 + 5  # asked before each of 16 microbatches
STOPS: dict[str, tuple[str, Callable[[Path], None]]] = {
    "SIGTERM to one rank": ("1", lambda out: signal.raise_signal(signal.SIGTERM)),
    "SIGUSR1 to one rank": ("0", lambda out: signal.raise_signal(signal.SIGUSR1)),
    "touch stop": ("0", lambda out: (out / "stop").touch()),
}


def out_of(argv: list[str]) -> Path:
    return Path(argv[argv.index("--out") + 1])


def two_signals(out: Path) -> None:
    """SIGTERM, and another one while the rank is on its way out."""
    if not (out / "signalled").exists():
        (out / "signalled").touch()
        signal.raise_signal(signal.SIGTERM)
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGTERM)).start()


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

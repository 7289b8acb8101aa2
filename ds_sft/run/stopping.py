"""Wishes to stop: signals, a launcher that is gone, and the file `<out>/stop`.

Owns when a run stops early. DeepSpeed's launchers do not pass signals on faithfully: SIGTERM to
`deepspeed` ends it and leaves `launch.py` and the ranks behind; so a rank also watches whether the
processes that started it are still its ancestors. A wish of one rank becomes everybody's in
`agreed`, a collective that all ranks reach at the same microbatch.

Invariant: a second signal changes nothing, since launchers send theirs after the terminal's; the
save that is going on is worth more than the seconds. Leaves saving to `saver`.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from types import FrameType
from typing import Any

from ds_sft.run.lock import born

EXIT_CODE = 75
"""Stopped after saving: start it again and it goes on (EX_TEMPFAIL of sysexits.h)."""
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
REASONS = ("", *(s.name for s in SIGNALS), "the launcher is gone", "the file `stop` appeared")


class Stopping:
    """The wish to stop of this process, and of all ranks."""

    def __init__(self, stop_file: Path) -> None:
        """Take over the signals, before the heavy imports, so that start-up can be stopped too."""
        self._wished = 0  # by this process; set by a signal at any moment
        self._agreed = 0  # by all ranks
        self._stop_file = stop_file
        # Without a launcher the parent is a shell, whose end (a closed terminal) means nothing.
        self._launched = "LOCAL_RANK" in os.environ and os.environ.get("WORLD_SIZE") is not None
        self._ancestors = ancestors()
        self._orphan = self._launched and was_adopted(self._ancestors)
        for number in SIGNALS:
            # Under nohup a closed terminal means nothing; else it would kill this process unsaved.
            if (number, signal.getsignal(number)) != (signal.SIGHUP, signal.SIG_IGN):
                signal.signal(number, self._on_signal)
        self._group: Any = None

    def forget_an_old_stop(self) -> None:
        """Remove a `stop` that is older than this run; rank 0 calls it once it holds the lock.

        One that was touched since the launcher began is a wish.
        """
        with contextlib.suppress(FileNotFoundError):
            if self._stop_file.stat().st_mtime < started(self._ancestors):
                self._stop_file.unlink()

    def use_group(self, group: Any) -> None:
        """The CPU group over which ranks agree from now on."""
        self._group = group

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._wished = self._wished or 1 + SIGNALS.index(signal.Signals(number))

    def _wish(self, rank: int) -> int:
        gone = self._orphan or (self._launched and ancestors() != self._ancestors)
        if not self._wished and gone:
            self._wished = REASONS.index("the launcher is gone")
        if not self._wished and rank == 0 and self._stop_file.is_file():
            self._wished = REASONS.index("the file `stop` appeared")
        return self._wished

    def agreed(self) -> bool:
        """Whether any rank wishes to stop; every rank must call it, and all get the same answer."""
        import torch
        import torch.distributed as dist

        code = torch.tensor([self._wish(dist.get_rank())])
        dist.all_reduce(code, op=dist.ReduceOp.MAX, group=self._group)
        self._agreed = int(code)
        return self._agreed > 0

    @property
    def reason(self) -> str:
        """Why the run stops, in words; empty when nobody wished it."""
        return REASONS[self._agreed]

    @property
    def exit_code(self) -> int:
        """What the process ends with when it stops before its last step."""
        return EXIT_CODE if self._agreed else 0

    def ignore_signals(self) -> None:
        """From now on signals no longer matter.

        The launcher sends SIGTERM to the ranks that are still on their way out when the first one
        has left, and a Python that shuts down has given its handlers back.
        """
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)


def started(ancestry: tuple[int, int]) -> float:
    """Seconds since the epoch at which this process or DeepSpeed's launcher began."""
    launchers = ancestry if ancestry[1] else ()
    ticks = [n for n in map(born, (os.getpid(), *launchers)) if n is not None]
    boot = time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)
    return boot + min(ticks) / os.sysconf("SC_CLK_TCK")


def was_adopted(ancestry: tuple[int, int]) -> bool:
    """Whether DeepSpeed's launcher ended while this process was still starting.

    Then there is no ancestor to lose; but who led the process group, which is the launcher or the
    shell script around it, is gone too, and the ancestor that is left is none of DeepSpeed's.
    """
    parent, grandparent = ancestry
    leader = os.getpgid(0)  # 0: it is outside of this container
    if (not grandparent and parent != 1) or leader == 0 or born(leader) is not None:
        return False
    try:
        return b"deepspeed" not in Path(f"/proc/{grandparent or parent}/cmdline").read_bytes()
    except OSError:
        return False


def ancestors() -> tuple[int, int]:
    """The parent and, for DeepSpeed's `launch.py`, its parent: `deepspeed` or pdsh's remote shell.

    Another launcher's parent is a shell, and a closed terminal is no wish to stop.
    """
    parent = os.getppid()
    try:
        if b"deepspeed" not in Path(f"/proc/{parent}/cmdline").read_bytes():
            return parent, 0
        # pid (command) state ppid ...: the command may hold spaces and brackets.
        stat = Path(f"/proc/{parent}/stat").read_text()
        return parent, int(stat.rpartition(")")[2].split()[1])
    except (OSError, ValueError, IndexError):
        return parent, 0

"""One start of a training by the real launcher: watched from outside, killed, or let end.

Owns the processes. Invariant: no process outlives its block. Leaves the choice of the moment to
`chaos`, what lies on the disk to `chaos_phases`.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
from chaos_phases import Lengths, Seen, look, phase_of

ROOT = Path(__file__).resolve().parents[1]
STARTED = b"First batch loaded"
LIFE_SECONDS = 300.0  # for one start with its steps; far more than any needs


class Failed(Exception):
    """What was promised did not hold."""


class Life:
    """One start of the run, from the launcher's birth to its death."""

    def __init__(self, command: list[str], out: Path, log: Path) -> None:
        self.out, self.log = out, log
        with log.open("wb") as console:
            self.process = subprocess.Popen(
                command, env=environment(), cwd=ROOT, start_new_session=True,
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.born = time.monotonic()
        self.tree: list[psutil.Process] = []

    def said(self) -> bytes:
        """What the ranks and the launcher said so far."""
        return self.log.read_bytes()

    def check_alive(self) -> None:
        """Raise Failed if the run ended by itself, or goes on for ever."""
        code = self.process.poll()
        if code is not None:
            raise Failed(f"the run ended by itself (exit code {code}), see {self.log}")
        if time.monotonic() - self.born > LIFE_SECONDS:
            raise Failed(f"nothing to kill came in {LIFE_SECONDS:.0f} s, see {self.log}")

    def wait_for_first_step(self) -> Seen:
        """Wait until training starts; returns what lies there then."""
        while STARTED not in self.said():
            self.check_alive()
            time.sleep(0.02)
        self.tree = self.descendants()
        return look(self.out)

    def wait_in(self, target: str, skip: int, at_start: Seen, lengths: Lengths) -> None:
        """Return as soon as the run is in phase `target` for the time `skip` + 1."""
        phase, since = "", time.monotonic()
        while True:
            now = phase_of(look(self.out), at_start)
            if now != phase:
                if phase:
                    lengths.note(phase, time.monotonic() - since)
                phase, since = now, time.monotonic()
                skip -= now == target
                if skip < 0:
                    return
            self.check_alive()
            time.sleep(0.0003)

    def descendants(self) -> list[psutil.Process]:
        """Everything that the launcher started and that runs now."""
        try:
            return psutil.Process(self.process.pid).children(recursive=True)
        except psutil.NoSuchProcess:
            return []

    def kill(self) -> None:
        """SIGKILL to the whole process group in one call, then to whoever left the group."""
        os.killpg(self.process.pid, signal.SIGKILL)
        for process in self.tree:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        self.process.wait(timeout=30)
        _, alive = psutil.wait_procs(self.tree, timeout=30)
        alive = [p for p in alive if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        if alive:
            raise Failed(f"processes outlived SIGKILL: {alive}")

    def wait_for_end(self, seconds: float) -> None:
        """Let the run end by itself. Raises Failed unless it says that it finished."""
        try:
            code = self.process.wait(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.tree = self.descendants()
            self.kill()
            raise Failed(f"the run did not end in {seconds:.0f} s, see {self.log}") from None
        if code != 0 or not (self.out / "finished").is_file():
            raise Failed(f"the run failed (exit code {code}), see {self.log}")


def environment() -> dict[str, str]:
    """Two CPU ranks of one thread, whatever the machine has; nothing from the network."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    return {
        **os.environ, "PATH": path, "PYTHONPATH": str(ROOT), "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false",
    }  # fmt: skip


@contextmanager
def life(command: list[str], out: Path, log: Path) -> Iterator[Life]:
    """A life that ends with the block, whatever happens."""
    living = Life(command, out, log)
    try:
        yield living
    finally:
        if living.process.poll() is None:
            living.tree = living.descendants()
            living.kill()

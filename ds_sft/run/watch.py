"""Hangs: a step that takes too long, a rank that has gone silent.

Owns two threads in each rank: one beats through the launcher's key-value store and listens to the
others' beats, the other watches the clock, since the store itself may fall silent for ever. Without
them a rank would wait for a dead peer as long as a collective may take, and over pdsh nobody ends
the other host's ranks. Invariants: a rank that has left in order is never missed; what ends the
process is said with host and rank. Leaves wishes to stop to `stopping`.
"""

from __future__ import annotations

import contextlib
import faulthandler
import math
import os
import socket
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from types import TracebackType

import torch.distributed as dist

BEAT_SECONDS = 5.0
SILENT_SECONDS = 45.0  # with the beats on both sides, a peer is missed within a minute
LEAVING_SECONDS = 10.0  # so long may the others take to end by the same error
SLOWEST = 10.0  # times the median step
SHORTEST_MINUTES = 30.0
SURELY_STUCK_SECONDS = 60.0
LONGEST_SECONDS = 1e9  # that the timer of the C library takes
DONE, FAILED = "done", "failed"


def step_limit(minutes: float, times: deque[float]) -> float:
    """Seconds that a step may take: what was asked for, else from the steps seen so far."""
    if minutes:
        return minutes * 60
    if not times:
        return math.inf
    return max(SHORTEST_MINUTES * 60, SLOWEST * statistics.median(times))


class Peers:
    """When each rank's beat was last seen to change."""

    def __init__(self, me: int, world_size: int, now: float) -> None:
        self._me = me
        self._beats = [""] * world_size
        self._seen = [now] * world_size

    def hear(self, beats: list[str], now: float) -> None:
        """Take note of the beats that the store holds."""
        for rank, beat in enumerate(beats):
            if beat != self._beats[rank]:
                self._beats[rank], self._seen[rank] = beat, now

    def forgive(self, now: float) -> None:
        """Count all silence from now on: this rank could not listen."""
        self._seen = [now] * len(self._seen)

    def problem(self, now: float) -> str:
        """Why this rank has to leave; empty while every peer is alive or has left in order."""
        for rank, beat in enumerate(self._beats):
            silence = now - self._seen[rank]
            if rank == self._me or beat == DONE:
                continue
            if beat == FAILED and silence >= LEAVING_SECONDS:
                return f"rank {rank} has failed"
            if silence >= SILENT_SECONDS:
                return f"rank {rank} has been silent for {silence:.0f} s"
        return ""


class Watch:
    """Beats, listens and times the steps while the block that it surrounds runs."""

    def __init__(self, step_timeout_minutes: float) -> None:
        """Every rank makes one, right after the process group."""
        self._minutes = step_timeout_minutes
        self._rank, self._world = dist.get_rank(), dist.get_world_size()
        # A connection of its own: the process group's is held by whoever waits on it.
        self._store = dist.TCPStore(
            os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False
        )
        self._keys = [f"ds_sft/beat/{rank}" for rank in range(self._world)]
        self._count = 0
        self._ended = threading.Event()
        self._times: deque[float] = deque(maxlen=50)
        self._step: tuple[int, float, float] | None = None  # step, its start, its deadline
        self._beat()
        dist.barrier()  # everybody has a beat to be read
        self._peers = Peers(self._rank, self._world, time.monotonic())
        self._ear = threading.Thread(target=self._listen, daemon=True)
        self._ear.start()
        self._clock = threading.Thread(target=self._watch, daemon=True)
        self._clock.start()

    def __enter__(self) -> Watch:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        self._ended.set()
        self._clock.join()
        # A thread that Python's teardown finds inside the store aborts the process.
        self._ear.join(timeout=BEAT_SECONDS)
        with contextlib.suppress(Exception):  # the store's host may be gone, which is no news
            self._store.set(self._keys[self._rank], DONE if kind is None else FAILED)

    @contextlib.contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Around one optimizer step."""
        start, limit = time.monotonic(), step_limit(self._minutes, self._times)
        self._step = (step, start, start + limit)
        if math.isfinite(limit):
            # A hang that holds the interpreter stops the thread as well, but not this timer.
            patience = min(limit, LONGEST_SECONDS) + SURELY_STUCK_SECONDS
            faulthandler.dump_traceback_later(patience, exit=True)
        yield
        faulthandler.cancel_dump_traceback_later()
        self._step = None
        self._times.append(time.monotonic() - start)

    def _beat(self) -> None:
        self._count += 1
        self._store.set(self._keys[self._rank], str(self._count))

    def _listen(self) -> None:
        """Beat and listen. A store that does not answer makes every peer look silent."""
        with contextlib.suppress(Exception):  # its host has ended: silence tells the clock
            while not self._ended.wait(BEAT_SECONDS):
                self._beat()
                beats = [value.decode() for value in self._store.multi_get(self._keys)]
                self._peers.hear(beats, time.monotonic())

    def _watch(self) -> None:
        last = time.monotonic()
        while not self._ended.wait(BEAT_SECONDS):
            now = time.monotonic()
            if now - last > 2 * BEAT_SECONDS:
                self._peers.forgive(now)  # this process was stopped itself, and the beats go on
            last = now
            if overdue := self._overdue():
                self._tell(overdue)
                # The others look at their clocks a beat later at most; then everybody has spoken.
                time.sleep(2 * BEAT_SECONDS)
                os._exit(1)
            problem = self._peers.problem(now)
            if problem and not self._ended.is_set():
                self._tell(problem)
                os._exit(1)

    def _overdue(self) -> str:
        if self._step is None or time.monotonic() < self._step[2]:
            return ""
        step, start, deadline = self._step
        return (
            f"step {step} has taken {(time.monotonic() - start) / 60:.1f} minutes, more than "
            f"{(deadline - start) / 60:.1f} (--step-timeout-minutes), its stack is above"
        )

    def _tell(self, problem: str) -> None:
        where = f"rank {self._rank} on host {socket.gethostname()}"
        line = f"error: {where} leaves: {problem}: start it again, it goes on from its checkpoint"
        # In one piece: the ranks of a host speak at the same time, into the same pipe.
        sys.stderr.write(f"{stacks()}{line}\n")
        sys.stderr.flush()


def stacks() -> str:
    """What every thread of this process is doing."""
    with os.fdopen(os.memfd_create("stacks"), "w+") as file:
        faulthandler.dump_traceback(file)
        file.seek(0)
        return file.read()

"""Ranks of several hosts that wait for one that will never come, before there is a process group.

A launcher ends the ranks of its own host only. When one host refuses a run (its data is missing,
another run holds --out), the others would wait at the rendezvous for as long as a collective may
take, each of their GPUs held. So the rank that ends says so in the key-value store at the meeting
point, and a thread in each rank that waits there listens. Invariants: nothing of this on one host;
nothing here raises. Leaves silence after the meeting to `run.watch`.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from ds_sft.engine import machine

LOOK_SECONDS = 1.0
TELL_SECONDS = 30.0  # so much later may another host's ranks come to the meeting point
ENDED, HEARD = "ds_sft/ended", "ds_sft/heard"
_met = threading.Event()


def over_several_hosts() -> bool:
    """Whether this run has ranks that this host's launcher does not end."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    return world > 1 and "MASTER_ADDR" in os.environ and world > machine.local_ranks(world)


def tell_others() -> None:
    """Say at the meeting point that this rank has ended before it; what is wrong is said already.

    Rank 0's host keeps the meeting point open until the other hosts' ranks have heard of it: when
    one of its ranks leaves, its launcher ends them all.
    """
    if not over_several_hosts():
        return
    with contextlib.suppress(Exception):
        rank, world = os.environ["RANK"], int(os.environ["WORLD_SIZE"])
        at_meeting_point = _node() == "0"
        store = _store(timedelta(seconds=TELL_SECONDS), is_master=rank == "0")
        if not store.check([ENDED]):
            store.set(ENDED, f"{_node()} rank {rank} on host {socket.gethostname()}")
        store.add(HEARD, int(not at_meeting_point))
        others, end = world - machine.local_ranks(world), time.monotonic() + TELL_SECONDS
        while at_meeting_point and store.add(HEARD, 0) < others and time.monotonic() < end:
            time.sleep(LOOK_SECONDS / 4)


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """While this rank waits for the others in here, it leaves when one of them says it has ended.

    One of its own host needs no word: the launcher ends this rank, and would cut the word short.
    """
    if over_several_hosts():
        threading.Thread(target=_listen, daemon=True).start()
    yield
    _met.set()


def over() -> bool:
    """Whether the ranks have met: from then on there are others who may wait for this one."""
    return _met.is_set()


def _listen() -> None:
    store = None
    while not _met.wait(LOOK_SECONDS):
        with contextlib.suppress(Exception):  # the meeting point is not open yet
            if store is None and _is_open():
                store = _store(timedelta(seconds=TELL_SECONDS), is_master=False)
            if store is None or not store.check([ENDED]):
                continue
            node, _, who = store.get(ENDED).decode().partition(" ")
            if node == _node() or _met.is_set():
                continue
            store.add(HEARD, 1)
            print(
                f"error: rank {os.environ['RANK']} on host {socket.gethostname()} leaves: {who} "
                "has ended before the ranks met; its own message says why",
                file=sys.stderr, flush=True,
            )  # fmt: skip
            os._exit(2)


def _is_open() -> bool:
    """Whether somebody listens at the meeting point; torch's own attempts are loud."""
    address = (os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    with socket.create_connection(address, timeout=LOOK_SECONDS):
        return True


def _store(timeout: timedelta, *, is_master: bool) -> Any:
    import torch.distributed as dist

    return dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=is_master,
        timeout=timeout, wait_for_workers=False,
    )  # fmt: skip


def _node() -> str:
    """This host among those of the run: the first rank of it."""
    return str(int(os.environ["RANK"]) - int(os.environ["LOCAL_RANK"]))

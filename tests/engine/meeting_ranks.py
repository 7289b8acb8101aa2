"""Ranks of two hosts as forks of one process, so that torch is imported once (see test_meeting).

    python meeting_ranks.py DIRECTORY PORT0 PORT1 PORT2

For each of three runs with ranks 0 and 1 on the first host and 2 on the second, the rank with the
run's number ends before the meeting. Exit code and words of `run-rank` go to DIRECTORY.
"""

from __future__ import annotations

import os
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch.distributed  # noqa: F401  # before the forks

from ds_sft.engine import meeting

WAITS = {0: (2,), 1: (0, 2), 2: (0,)}
LONG = 300.0


def start(directory: Path, run: int, rank: int, port: str) -> int:
    """Fork one rank; returns its process number."""
    pid = os.fork()
    if pid:
        return pid
    os.environ |= {
        "RANK": str(rank), "LOCAL_RANK": str(rank % 2), "WORLD_SIZE": "3",
        "LOCAL_SIZE": "1" if rank == 2 else "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip
    os.dup2(os.open(directory / f"{run}-{rank}", os.O_WRONLY | os.O_CREAT), 2)
    if run == rank:
        meeting.tell_others()
        os._exit(0)
    with meeting.listening():
        # As the process group would, rank 0 opens the meeting point.
        _ = meeting._store(timedelta(seconds=LONG), is_master=True) if rank == 0 else None
        time.sleep(LONG)
    os._exit(0)


def main() -> None:
    directory, ports = Path(sys.argv[1]), sys.argv[2:]
    started = {
        start(directory, run, rank, ports[run]): (run, rank)
        for run, waiting in WAITS.items()
        for rank in (run, *waiting)
    }
    at_home = next(pid for pid, who in started.items() if who == (1, 0))
    for pid, (run, rank) in started.items():
        if pid == at_home:
            continue
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        (directory / f"{run}-{rank}.code").write_text(str(code))
    still_there = os.waitpid(at_home, os.WNOHANG) == (0, 0)
    os.kill(at_home, 9)
    (directory / "1-0.code").write_text("still there" if still_there else "gone")


if __name__ == "__main__":
    main()

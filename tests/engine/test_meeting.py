"""Over several hosts no rank waits at the rendezvous for one that has ended before it."""

from __future__ import annotations

import os
import subprocess
import sys

import harness
import pytest

from ds_sft.engine import meeting

# Rank 0 of those who wait opens the meeting point, as the process group would.
CODE = """
import sys, time
from datetime import timedelta
from ds_sft.engine import meeting
if sys.argv[1] == "ends":
    meeting.tell_others()
else:
    with meeting.listening():
        store = meeting._store(timedelta(seconds=100), is_master=True) if sys.argv[2] == "0" else 0
        time.sleep(100)
"""


def rank(number: int, does: str, port: int) -> subprocess.Popen[str]:
    """One of three ranks: 0 and 1 on the first host, 2 on the second."""
    env = {
        "RANK": str(number), "LOCAL_RANK": str(number % 2), "WORLD_SIZE": "3",
        "LOCAL_SIZE": "1" if number == 2 else "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", CODE, does, str(number)], env={**os.environ, **env},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_ends_before_the_meeting_is_not_waited_for() -> None:
    """Whichever it is; all cases at the same time to save some."""
    leaves = {0: 2, 1: 2, 2: 0}
    ports = {ends: harness.free_port() for ends in leaves}
    gone = {ends: rank(ends, "ends", port) for ends, port in ports.items()}
    waiting = {ends: rank(leaves[ends], "waits", port) for ends, port in ports.items()}
    at_home = rank(0, "waits", ports[1])
    try:
        for ends, other in leaves.items():
            said = waiting[ends].communicate(timeout=100)[1]
            assert waiting[ends].returncode == 2, said
            assert f"error: rank {other} on host " in said
            assert f"leaves: rank {ends} on host " in said
            assert gone[ends].wait(timeout=100) == 0
        assert at_home.poll() is None  # its launcher ends it
    finally:
        for process in (*gone.values(), *waiting.values(), at_home):
            process.kill()
            process.wait()


def test_on_one_host_nothing_is_said_and_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_store", None)
    monkeypatch.setattr(meeting.threading, "Thread", None)
    meeting.tell_others()
    with meeting.listening():
        pass
    monkeypatch.setenv("LOCAL_SIZE", "1")
    with pytest.raises(TypeError), meeting.listening():
        pass

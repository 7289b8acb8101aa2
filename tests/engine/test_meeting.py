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
        store = meeting._store(timedelta(seconds=60), is_master=True) if sys.argv[2] == "0" else 0
        time.sleep(60)
"""


def rank(number: int, does: str, port: int) -> subprocess.Popen[str]:
    """One of two ranks, each alone on its host."""
    env = {
        "RANK": str(number), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_SIZE": "1",
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
    }  # fmt: skip
    return subprocess.Popen(
        [sys.executable, "-c", CODE, does, str(number)], env={**os.environ, **env},
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


@pytest.mark.slow
def test_a_rank_that_ends_before_the_meeting_is_not_waited_for() -> None:
    """Either of two hosts' ranks, at the same time to save some."""
    for_rank = {ends: harness.free_port() for ends in (0, 1)}
    pairs = [
        (ends, rank(ends, "ends", port), rank(1 - ends, "waits", port))
        for ends, port in for_rank.items()
    ]
    for ends, gone, waiting in pairs:
        said = waiting.communicate(timeout=50)[1]
        assert waiting.returncode == 2
        assert f"error: rank {1 - ends} on host " in said
        assert f"leaves: rank {ends} on host " in said
        assert gone.wait(timeout=50) == 0


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

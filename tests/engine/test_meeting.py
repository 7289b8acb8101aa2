"""Over several hosts no rank waits at the rendezvous for one that has ended before it."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path

import harness
import pytest

from ds_sft.engine import meeting

LEAVES = {0: 2, 1: 2, 2: 0}
ENV = harness.cpu_env(PYTHONPATH=str(harness.ROOT))


@pytest.mark.slow
def test_a_rank_that_ends_before_the_meeting_is_not_waited_for_on_another_host(
    tmp_path: Path,
) -> None:
    command = [sys.executable, Path(__file__).with_name("meeting_ranks.py"), tmp_path]
    ports = [str(harness.free_port()) for _ in LEAVES]
    subprocess.run([*command, *ports], env=ENV, cwd=harness.ROOT, check=True)
    for ends, other in LEAVES.items():
        assert (tmp_path / f"{ends}-{ends}.code").read_text() == "0"
        said = (tmp_path / f"{ends}-{other}").read_text()
        assert (tmp_path / f"{ends}-{other}.code").read_text() == "2", said
        assert f"error: rank {other} on host " in said
        assert f"leaves: rank {ends} on host " in said
    assert (tmp_path / "1-0.code").read_text() == "still there"  # its launcher ends it


def test_on_one_host_nothing_is_said_and_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"WORLD_SIZE": "2", "LOCAL_SIZE": "2", "MASTER_ADDR": "nowhere"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(meeting, "_store", None)
    monkeypatch.setattr(meeting, "_met", threading.Event())
    monkeypatch.setattr(meeting.threading, "Thread", None)
    meeting.tell_others()
    with meeting.listening():
        pass
    monkeypatch.setenv("LOCAL_SIZE", "1")
    with pytest.raises(TypeError), meeting.listening():
        pass

"""A directory with a living run is refused; what a dead one left is taken over."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from ds_sft.errors import ConfigError
from ds_sft.run import lock
from ds_sft.run.lock import RunLock

HOLDER = "import sys, time; from pathlib import Path; from ds_sft.run.lock import RunLock; "
HOLDER += "RunLock(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)"


def write(path: Path, **changes: object) -> None:
    me = {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "born": lock.born(os.getpid()),
        "beat": 1,
    }
    path.write_text(json.dumps({**me, **changes}))


def test_a_living_holder_is_named_with_the_command_that_stops_it(tmp_path: Path) -> None:
    path = tmp_path / "run" / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(
            ConfigError, match=rf"process {holder.pid}\): stop it with `touch .*/stop`"
        ):
            RunLock(path)
    finally:
        holder.kill()
        holder.wait()
    RunLock(path)  # at once, after a kill -9
    assert json.loads(path.read_text())["pid"] == os.getpid()


def test_a_reused_process_number_is_not_the_holder(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    write(path, born=1)
    RunLock(path)
    assert json.loads(path.read_text())["born"] == lock.born(os.getpid()) != 1


def test_from_another_host_the_beat_decides(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "WATCH_SECONDS", 2.0)
    path = tmp_path / "lock"
    write(path, host="elsewhere")
    reads = iter([lock.read(path), {**lock.read(path), "beat": 2}])
    monkeypatch.setattr(lock, "read", lambda _: next(reads))
    with pytest.raises(ConfigError, match="host elsewhere"):
        RunLock(path)
    monkeypatch.undo()
    monkeypatch.setattr(lock, "WATCH_SECONDS", 2.0)
    RunLock(path)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"host": "x"}'])
def test_a_lock_that_says_nothing_is_nobodys(tmp_path: Path, text: str) -> None:
    (tmp_path / "lock").write_text(text)
    RunLock(tmp_path / "lock")
    assert lock.read(tmp_path / "lock") is not None


def test_the_beat_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.05)
    RunLock(tmp_path / "lock")
    end = time.monotonic() + 10
    while lock.read(tmp_path / "lock")["beat"] < 3:
        assert time.monotonic() < end
        time.sleep(0.02)

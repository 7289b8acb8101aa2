"""A directory with a living run is refused; what a dead one left is taken over."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
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
        "host": lock.here(),
        "pid": os.getpid(),
        "born": lock.born(os.getpid()),
        "beat": 1,
    }
    path.write_text(json.dumps({**me, **changes}))


def beating(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever looks at the lock `path` finds another beat each time."""
    real, holder, beats = lock.read, lock.read(path), itertools.count(2)
    assert holder is not None
    monkeypatch.setattr(
        lock, "read", lambda p: {**holder, "beat": next(beats)} if p == path else real(p)
    )


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
    beating(path, monkeypatch)
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


RACER = "import sys; from pathlib import Path; from ds_sft.run.lock import RunLock\n"
RACER += "sys.stdin.readline()\nRunLock(Path(sys.argv[1])); print('mine', flush=True)\n"
RACER += "sys.stdin.readline()"


def test_of_many_that_start_at_once_over_a_dead_run_one_goes_on(tmp_path: Path) -> None:
    write(tmp_path / "lock", born=1)
    command = [sys.executable, "-c", RACER, tmp_path / "lock"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    racers = [subprocess.Popen(command, text=True, **pipes) for _ in range(6)]  # type: ignore[call-overload]
    for racer in racers:
        racer.stdin.write("go\n")
        racer.stdin.flush()
    first = [racer.stdout.readline() for racer in racers]
    assert sorted(first) == ["", "", "", "", "", "mine\n"]
    (winner,) = [r for r, line in zip(racers, first, strict=True) if line]
    assert lock.read(tmp_path / "lock")["pid"] == winner.pid
    for racer in racers:
        racer.communicate("end\n", timeout=30)
    assert [path.name for path in tmp_path.iterdir()] == ["lock"]


def test_only_its_own_lock_is_given_back(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with RunLock(path):
        write(path, pid=1, born=1)
    assert lock.read(path)["pid"] == 1
    with RunLock(path):
        assert lock.read(path)["pid"] == os.getpid()
    assert not path.exists()


TAKEN = "import time; from ds_sft.run import lock; lock.BEAT_SECONDS = 0.05\n"
TAKEN += "from pathlib import Path; import sys; lock.RunLock(Path(sys.argv[1]))\n"
TAKEN += "print('held', flush=True); time.sleep(60)"


def test_a_run_that_was_taken_for_dead_ends_when_it_finds_another_in_its_place(
    tmp_path: Path,
) -> None:
    command = [sys.executable, "-c", TAKEN, tmp_path / "lock"]
    run = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert run.stdout is not None
    assert run.stdout.readline() == "held\n"
    end = time.monotonic() + 30
    while run.poll() is None and time.monotonic() < end:
        write(tmp_path / "new", host="elsewhere")
        (tmp_path / "new").replace(tmp_path / "lock")
        time.sleep(0.02)
    assert run.returncode == 1
    assert f"was taken over by process {os.getpid()} on host elsewhere" in run.stderr.read()


def test_a_holder_that_ended_and_was_not_yet_buried_is_dead(tmp_path: Path) -> None:
    """Ranks whose launcher was killed become zombies where nobody waits for them (containers)."""
    path = tmp_path / "lock"
    holder = subprocess.Popen([sys.executable, "-c", HOLDER, path], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        assert lock.born(holder.pid) is not None
        holder.kill()
        stat = Path(f"/proc/{holder.pid}/stat")
        end = time.monotonic() + 10
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert time.monotonic() < end
            time.sleep(0.01)
        with RunLock(path):
            assert lock.read(path)["pid"] == os.getpid()
    finally:
        holder.wait()


BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.mark.parametrize(
    ("here", "elsewhere", "beats"),
    [("pid:[", "pid:[9", True), ("pid:[", "pid:[9", False), (BOOT, "0" * 36, True)],
)
def test_process_numbers_of_another_container_or_boot_mean_nothing_here(
    here: str, elsewhere: str, beats: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same host name, another pid namespace or machine: only the beat says who is alive.

    One holder's number is by chance that of a living process here, the other's that of none.
    """
    monkeypatch.setattr(lock, "WATCH_SECONDS", 1.5)
    path = tmp_path / "lock"
    host = lock.here().replace(here, elsewhere)
    assert host != lock.here()
    write(path, host=host, **({"pid": 999_999_999, "born": 1} if beats else {}))
    if not beats:
        with RunLock(path):
            assert lock.read(path)["host"] == lock.here()
        return
    beating(path, monkeypatch)
    with pytest.raises(ConfigError, match="is alive"):
        RunLock(path)


def test_a_beat_on_its_way_does_not_bring_a_given_back_lock_to_life(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From another host such a lock would be watched before it is found dead."""
    monkeypatch.setattr(lock, "BEAT_SECONDS", 0.5)
    real, beating = lock.write_file, threading.Event()

    def slow(path: Path, text: str) -> None:
        beating.set()
        time.sleep(0.1)
        real(path, text)

    monkeypatch.setattr(lock, "write_file", slow)
    with RunLock(tmp_path / "lock"):
        assert beating.wait(10)
    time.sleep(0.2)
    assert list(tmp_path.iterdir()) == []

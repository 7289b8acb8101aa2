"""A wish to stop is remembered whenever it comes, and belongs to all ranks once one has it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ds_sft.run import stopping
from ds_sft.run.stopping import EXIT_CODE, Stopping, ancestors


@pytest.fixture(autouse=True)
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in stopping.SIGNALS}
    signal.signal(signal.SIGHUP, signal.SIG_DFL)  # the tests may run under nohup
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.fixture
def rank_0(monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank, alone: what it wishes is agreed."""
    monkeypatch.setattr("torch.distributed.get_rank", lambda: 0)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda *_, **__: None)


@pytest.mark.usefixtures("rank_0")
@pytest.mark.parametrize("number", stopping.SIGNALS)
def test_a_signal_is_a_wish_and_a_second_one_changes_nothing(number: int, tmp_path: Path) -> None:
    stop = Stopping(tmp_path / "stop")
    assert not stop.agreed()
    assert stop.exit_code == 0
    os.kill(os.getpid(), number)
    assert stop.agreed()
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.agreed()
    assert stop.reason == signal.Signals(number).name
    assert stop.exit_code == EXIT_CODE == 75


@pytest.mark.usefixtures("rank_0")
def test_a_signal_that_comes_inside_the_collective_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop = Stopping(tmp_path / "stop")
    monkeypatch.setattr(
        "torch.distributed.all_reduce", lambda *_, **__: os.kill(os.getpid(), signal.SIGUSR1)
    )
    assert not stop.agreed()
    assert stop.agreed()


def test_a_wish_of_another_rank_is_everybodys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reduce(code: torch.Tensor, **_: object) -> None:
        code.fill_(1 + stopping.SIGNALS.index(signal.SIGINT))

    monkeypatch.setattr("torch.distributed.get_rank", lambda: 3)
    monkeypatch.setattr("torch.distributed.all_reduce", reduce)
    stop = Stopping(tmp_path / "stop")
    assert stop.agreed()
    assert stop.reason == "SIGINT"


@pytest.mark.usefixtures("rank_0")
def test_the_file_stops_the_run_and_one_from_before_does_not(tmp_path: Path) -> None:
    (tmp_path / "stop").touch()
    os.utime(tmp_path / "stop", (time.time() - 3600, time.time() - 3600))
    stop = Stopping(tmp_path / "stop")
    stop.forget_an_old_stop()
    assert not stop.agreed()
    (tmp_path / "stop").touch()
    stop.forget_an_old_stop()  # touched since this process began: a wish
    assert stop.agreed()
    assert "stop" in stop.reason


@pytest.mark.usefixtures("rank_0")
def test_a_launcher_that_is_gone_is_a_wish_but_a_closed_terminal_is_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for launched in (True, False):
        for name in ("LOCAL_RANK", "WORLD_SIZE"):
            monkeypatch.setenv(name, "0") if launched else monkeypatch.delenv(name)
        stop = Stopping(tmp_path / "stop")
        monkeypatch.setattr(stopping, "ancestors", lambda: (1, 0))
        assert stop.agreed() is launched
        monkeypatch.setattr(stopping, "ancestors", ancestors)


@pytest.mark.usefixtures("rank_0")
def test_a_closed_terminal_saves_the_run_and_under_nohup_means_nothing(tmp_path: Path) -> None:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = Stopping(tmp_path / "stop")
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.agreed()
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    stop = Stopping(tmp_path / "stop")
    os.kill(os.getpid(), signal.SIGHUP)
    assert stop.agreed()
    assert stop.reason == "SIGHUP"


def test_the_grandparent_counts_only_below_deepspeeds_launcher() -> None:
    assert ancestors() == (os.getppid(), 0)


# Stands for `launch.py`: it starts a rank, once its own parent has ended or at once.
LAUNCHER = """
import os, subprocess, sys, time  # deepspeed.launcher.launch
orphan = sys.argv[1] == "orphan"
while orphan and os.getppid() == int(sys.argv[2]):
    time.sleep(0.01)
code = "import sys; from ds_sft.run.stopping import *; print(was_adopted(ancestors()), flush=True)"
subprocess.run([sys.executable, "-c", code])
"""
STARTER = """
import os, subprocess, sys
words = [sys.executable, "-c", sys.argv[2], sys.argv[1], str(os.getpid())]
started = subprocess.Popen(words)
if sys.argv[1] != "orphan":
    started.wait()
"""


@pytest.mark.parametrize("launcher", ["orphan", "alive"])
def test_a_launcher_that_ended_before_its_ranks_could_look_is_gone_too(launcher: str) -> None:
    """`kill` of `deepspeed` within its first seconds: its ranks would train to the end alone."""
    started = subprocess.Popen(
        [sys.executable, "-c", STARTER, launcher, LAUNCHER], stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip
    output, _ = started.communicate(timeout=60)
    assert output == f"{launcher == 'orphan'}\n"

"""A run outlives its console."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

CODE = """
import os, sys, time
from ds_sft.run.console import outlive_console
outlive_console()
print("first", flush=True)
sys.stdin.readline()
for stream in (sys.stdout, sys.stderr):
    for _ in range(3):
        print("nobody reads this", file=stream, flush=True)
sys.stdout.isatty(), sys.stdout.encoding
os.write(int(sys.argv[1]), b"alive")
"""


def outlives(console: int, other_end: int) -> bool:
    """Whether a process goes on after the other end of its console is closed."""
    told, tell = os.pipe()
    process = subprocess.Popen(
        [sys.executable, "-c", CODE, str(tell)], stdin=subprocess.PIPE, stdout=console,
        stderr=console, pass_fds=[tell],
    )  # fmt: skip
    os.close(tell)
    os.close(console)
    assert os.read(other_end, 5) == b"first"
    os.close(other_end)
    process.communicate(b"go\n", timeout=30)
    answer = os.read(told, 5)
    os.close(told)
    return answer == b"alive" and process.returncode == 0


def test_the_end_of_a_pipes_reader_ends_no_training() -> None:
    reader, writer = os.pipe()
    assert outlives(writer, reader)


def test_a_closed_terminal_ends_no_training() -> None:
    master, slave = os.openpty()
    assert outlives(slave, master)


def test_a_stream_that_works_is_passed_through(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_sft.run.console import outlive_console

    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, getattr(sys, name))
    outlive_console()
    print("out")
    print("err", file=sys.stderr)
    assert capsys.readouterr() == ("out\n", "err\n")

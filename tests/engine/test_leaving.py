"""The exit code of a rank is that of what happened, also where Python's teardown aborts."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

# What the teardown comes to in the end: an abort, after the work and the exit handlers.
PROGRAM = """
import atexit, os, sys
from ds_sft.engine import meeting, swap_files
from ds_sft.engine.leaving import ending_at_once, leave

class Aborts:
    def __del__(self):
        os.abort()

aborts = Aborts()
atexit.register(print, "told")
swap_files.release = lambda: print("released")
{before}
with ending_at_once():
    print("worked")
    {error}
{after}
"""
MEET = "with meeting.listening(): pass"


def run(**parts: str) -> subprocess.CompletedProcess[str]:
    whole = {"before": MEET, "error": "", "after": "", **parts}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM.format(**whole)], capture_output=True, text=True, check=False
    )


def test_the_program_of_these_tests_aborts_when_python_takes_it_apart() -> None:
    done = run()
    assert done.returncode == -signal.SIGABRT
    assert "Fatal Python error: Aborted" in done.stderr  # a crash shows its stacks


def test_a_rank_whose_work_is_done_leaves_with_0_and_tells_what_asked_to_be_told() -> None:
    done = run(after="leave()")
    assert (done.returncode, done.stdout, done.stderr) == (0, "worked\ntold\n", "")


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        ("raise SystemExit(3)", 3, ""),
        ("raise SystemExit('words')", 1, ""),
        ("raise ValueError('broken')", 1, "ValueError: broken"),
        ("raise KeyboardInterrupt", 1, "KeyboardInterrupt"),
    ],
)
def test_after_the_meeting_an_error_leaves_with_its_code(error: str, code: int, words: str) -> None:
    done = run(error=error)
    assert (done.returncode, done.stdout) == (code, "worked\nreleased\n")
    assert words in done.stderr


def test_before_the_meeting_an_error_ends_as_it_does_in_any_program() -> None:
    done = run(before="meeting.tell_others = lambda: print('others')", error="raise SystemExit(3)",
               after="")  # fmt: skip
    assert done.stdout == "worked\nothers\ntold\n"

"""The process that imports torch, DeepSpeed and transformers once for many trainings.

What it does with them is in train/many_runs.py; `harness.launch_many` hands it the trainings.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]


class Importer:
    """The process of train/many_runs.py, kept for the tests that want the same environment.

    There is one at a time: it holds what it has imported.
    """

    def __init__(self, environment: dict[str, str]) -> None:
        self.environment = environment
        self._said = tempfile.TemporaryFile()  # noqa: SIM115  # open as long as the process
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests/train/many_runs.py")], env=environment, cwd=ROOT,
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=self._said,
        )  # fmt: skip

    def run(self, spec_file: Path, timeout: float) -> list[list[int]]:
        """Exit codes of the ranks of each training of a specification."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(f"{spec_file}\n".encode())
        self._process.stdin.flush()
        ready, _, _ = select.select([self._process.stdout], [], [], timeout)
        line = self._process.stdout.readline() if ready else b""
        if not line:
            self.end()
            self._said.seek(0)
            raise AssertionError(f"no answer in {timeout} s: {self._said.read()[-4000:].decode()}")
        return json.loads(line)

    def end(self) -> None:
        """End it and every rank that still runs."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


_importers: list[Importer] = []


def of(environment: dict[str, str]) -> Importer:
    """The process for an environment: the one that is there, or a new one in its place."""
    if not _importers or _importers[0].environment != environment:
        end()
        _importers.append(Importer(environment))
    return _importers[0]


@atexit.register
def end() -> None:
    """Give back what the trainings' process holds."""
    while _importers:
        _importers.pop().end()

"""A disk that is really full: the run goes on, then stops with a word; nothing whole is touched."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import harness
import pytest

from ds_sft.run.layout import labels_in

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0, reason="mounting a small disk needs root"),
]
CHECKPOINT = 177_000 * 12  # bytes of the tiny model's masters and moments


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 12 MB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=12m", "tmpfs", str(place)]
    if subprocess.run(mount, check=False).returncode:
        pytest.skip("this machine does not let root mount a tmpfs")
    yield place
    subprocess.run(["umount", str(place)], check=True)


def fill(place: Path, leave: int) -> Path:
    """A file that leaves so many bytes of the disk free."""
    ballast = place / "ballast"
    with ballast.open("wb") as file:
        file.write(b"\0" * (shutil.disk_usage(place).free - leave))
    return ballast


@pytest.mark.parametrize("leave", [CHECKPOINT // 2, CHECKPOINT + 60_000])
def test_three_failures_in_a_row_stop_the_run_and_the_last_whole_checkpoint_goes_on(
    leave: int, small_disk: Path, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """One leaves too little by the check before writing, the other runs out while writing."""
    often = {"--steps-per-checkpoint": 2, "--steps-per-hf-export": 100}
    straight, run = tmp_path / "straight", partial(harness.run_once, 2, work=tmp_path)
    whole = run(*harness.flags(tiny_model, tiny_data, straight, often))
    assert whole.codes == [0, 0], whole.text[-3000:]
    out = small_disk / "run"
    words = harness.flags(tiny_model, tiny_data, out, often)
    stopped = run(*words, "--stop-after", 3)
    assert stopped.codes == [0, 0], stopped.text[-3000:]
    ballast = fill(small_disk, leave)
    full = run(*words)
    assert full.codes == [1, 1], full.text[-3000:]
    assert full.text.count("[checkpoint] FAILED") == 2
    assert "error: 3 checkpoints in a row failed" in full.text
    assert ("MB are needed" in full.text) is (leave < CHECKPOINT), full.text[-3000:]
    assert labels_in(out / "checkpoints") == [2]
    assert not list(out.rglob("*.partial"))
    ballast.unlink()
    done = run(*words)
    assert done.codes == [0, 0], done.text[-3000:]
    for column in ("label", "loss", "grad_norm"):
        rows = [[row[column] for row in harness.metrics(run)] for run in (out, straight)]
        assert rows[0] == rows[1]

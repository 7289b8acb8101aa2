"""Swap directories: fit places only, one per process, and none left of the dead."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_sft.engine import swap_files
from ds_sft.errors import ConfigError

SHM = Path("/dev/shm")


def on_nvme(path: Path, *names: str) -> dict[str, Any]:
    section = {"device": "nvme", "nvme_path": str(path)}
    return {
        "bf16": {"enabled": True},
        "zero_optimization": {"stage": 3, **dict.fromkeys(names, section)},
    }


def model(numel: int) -> Any:
    return SimpleNamespace(num_parameters=numel, tensors={"w": ((numel,), "F32")})


def holder(path: Path) -> subprocess.Popen[bytes]:
    """A process that holds a swap directory with a file in it until it is killed."""
    code = (
        "import pathlib, sys, time; from ds_sft.engine import swap_files\n"
        "mine = swap_files._own_directory(pathlib.Path(sys.argv[1]))\n"
        "(mine / 'x.swp').write_bytes(bytes(1 << 20)); time.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(path)])
    end = time.monotonic() + 20
    while not list(path.glob("*/x.swp")) and time.monotonic() < end:
        time.sleep(0.02)
    return process


def test_nothing_is_asked_of_a_configuration_without_nvme() -> None:
    config = {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}
    swap_files.check(config, model(10**15), 1)
    assert swap_files.claim(config) == config


@pytest.mark.parametrize(
    ("place", "said"), [("missing", "is not a directory"), ("a_file", "is not a directory")]
)
def test_a_place_that_is_no_directory_is_refused(tmp_path: Path, place: str, said: str) -> None:
    (tmp_path / "a_file").touch()
    with pytest.raises(ConfigError, match=said) as caught:
        swap_files.check(on_nvme(tmp_path / place, "offload_optimizer"), None, 1)
    assert "--nvme-path" in str(caught.value)


def test_host_memory_is_not_taken_for_a_disk() -> None:
    assert swap_files.file_system(SHM) == "tmpfs", "this test needs a tmpfs at /dev/shm"
    with pytest.raises(ConfigError, match="is a tmpfs, which is host memory"):
        swap_files.check(on_nvme(SHM, "offload_param"), None, 1)


def test_the_room_is_that_of_the_ranks_of_this_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = 18 * 1000
    usage = SimpleNamespace(free=free)
    monkeypatch.setattr(swap_files.shutil, "disk_usage", lambda path: usage)  # type: ignore[attr-defined]
    both = on_nvme(tmp_path, "offload_optimizer", "offload_param")
    swap_files.check(both, model(1000), 8)
    with pytest.raises(ConfigError, match="8 ranks of this host swap"):
        swap_files.check(both, model(1001), 8)
    swap_files.check(both, model(2000), 16)  # two hosts of eight
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "16")
    with pytest.raises(ConfigError, match="16 ranks of this host swap"):
        swap_files.check(both, model(2000), 16)


def test_a_buffer_smaller_than_a_part_of_the_largest_parameter_is_refused(tmp_path: Path) -> None:
    config = on_nvme(tmp_path, "offload_param")
    config["zero_optimization"]["offload_param"]["buffer_size"] = 499
    with pytest.raises(ConfigError, match="is 499, but a rank's part of w has 500 elements"):
        swap_files.check(config, model(1000), 2)


def test_every_process_has_its_own_directory_and_a_living_one_keeps_it(tmp_path: Path) -> None:
    process = holder(tmp_path)
    try:
        (theirs,) = tmp_path.iterdir()
        mine = swap_files._own_directory(tmp_path)
        assert mine != theirs
        assert (theirs / "x.swp").is_file()
        assert swap_files.abandoned(tmp_path) == []
    finally:
        process.kill()
        process.wait()


def test_what_a_killed_process_left_counts_as_room_and_is_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    process = holder(tmp_path)
    process.kill()
    process.wait()
    (theirs,) = tmp_path.iterdir()
    usage = SimpleNamespace(free=0)
    monkeypatch.setattr(swap_files.shutil, "disk_usage", lambda path: usage)  # type: ignore[attr-defined]
    swap_files.check(on_nvme(tmp_path, "offload_optimizer"), model(1 << 16), 1)  # 1 MiB
    mine = swap_files._own_directory(tmp_path)
    assert list(tmp_path.iterdir()) == [mine]
    assert not theirs.exists()


def test_other_files_of_the_place_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "zero_stage_3").mkdir()
    (tmp_path / "notes.txt").write_text("mine")
    swap_files._own_directory(tmp_path)
    assert (tmp_path / "zero_stage_3").is_dir()
    assert (tmp_path / "notes.txt").read_text() == "mine"

"""Locks that a killed build left behind are removed; locks in use are waited for."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from ds_sft.engine import ops


def make_lock(root: Path, folder: str, age_seconds: float) -> Path:
    lock = root / folder / "lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    then = time.time() - age_seconds
    os.utime(lock, (then, then))
    return lock


@pytest.mark.parametrize("folder", ["cpu_adam", "py311_cpu/cpu_adam"])
def test_an_old_lock_that_nobody_holds_is_removed(tmp_path: Path, folder: str) -> None:
    lock = make_lock(tmp_path, folder, age_seconds=600)
    assert ops.clear_stale_locks(tmp_path, {"cpu_adam"}, 60) == [lock]
    assert not lock.exists()


def test_a_lock_from_the_future_is_old(tmp_path: Path) -> None:
    """The clock was set back: it would be waited for until the time comes."""
    lock = make_lock(tmp_path, "cpu_adam", age_seconds=-86400)
    assert ops.clear_stale_locks(tmp_path, {"cpu_adam"}, 60) == [lock]


def test_locks_of_other_operators_are_left_alone(tmp_path: Path) -> None:
    lock = make_lock(tmp_path, "somebody_elses_op", age_seconds=600)
    assert ops.clear_stale_locks(tmp_path, {"cpu_adam"}, 60) == []
    assert lock.exists()


def test_a_lock_is_kept_while_a_compiler_works_in_its_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lock = make_lock(tmp_path, "cpu_adam", age_seconds=600)
    compiler = subprocess.Popen(["sleep", "0.8"], cwd=lock.parent)
    try:
        assert ops.is_being_built(lock.parent)
        removed = ops.clear_stale_locks(tmp_path, {"cpu_adam"}, 60)
        assert compiler.poll() is not None
    finally:
        compiler.wait()
    assert removed == [lock]
    assert "waiting for another build" in capsys.readouterr().out


def test_a_young_lock_is_waited_for(tmp_path: Path) -> None:
    make_lock(tmp_path, "cpu_adam", age_seconds=0)
    started = time.monotonic()
    ops.clear_stale_locks(tmp_path, {"cpu_adam"}, 0.5)
    assert time.monotonic() - started >= 0.5


class Reached(Exception):
    """The start came to its swap files, which are prepared after the locks."""


SWAPPING = {"zero_optimization": {"offload_optimizer": {"device": "nvme"}}}


@pytest.mark.usefixtures("process_group")
def test_a_run_removes_stale_locks_before_an_operator_could_wait_on_one(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_sft.data.model_files import find_model
    from ds_sft.engine import build
    from ds_sft.recipe.named import RECIPES
    from ds_sft.run_config import RunConfig

    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(tmp_path))
    monkeypatch.setenv("DS_ACCELERATOR", "cpu")
    ours = [make_lock(tmp_path, name, age_seconds=600) for name in ("cpu_adam", "py3/async_io")]
    theirs = make_lock(tmp_path, "somebody_elses_op", age_seconds=600)

    def reached(config: object) -> None:
        assert not any(lock.exists() for lock in ours)
        raise Reached

    monkeypatch.setattr(build.swap_files, "claim", reached)
    run, recipe = RunConfig(data=tmp_path, liger="off"), RECIPES["qwen3-8b"]
    with pytest.raises(Reached):
        build.build_engine(run, recipe, SWAPPING, find_model(str(tiny_model)))
    assert theirs.exists()


@pytest.mark.parametrize(
    ("sections", "needed"),
    [
        ({}, []),
        ({"offload_param": "cpu"}, []),
        ({"offload_optimizer": "cpu"}, ["cpu_adam"]),
        ({"offload_optimizer": "nvme"}, ["cpu_adam", "async_io"]),
        ({"offload_param": "nvme"}, ["async_io"]),
    ],
)
def test_a_run_waits_only_for_the_operators_that_it_loads(
    sections: dict[str, str], needed: list[str]
) -> None:
    zero = {name: {"device": device} for name, device in sections.items()}
    assert ops.needed_by({"zero_optimization": zero}) == needed

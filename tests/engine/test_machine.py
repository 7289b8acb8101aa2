"""Limits of a container are found in both versions of cgroups; threads are shared out."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ds_sft.engine import machine
from ds_sft.errors import ConfigError

GB = 10**9


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A made-up host of 64 GB and 16 cores, whose files the test writes below the path."""
    monkeypatch.setattr(machine, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(machine, "_PROC", tmp_path / "proc")
    monkeypatch.setattr(machine.os, "sched_getaffinity", lambda pid: set(range(16)))
    write(tmp_path / "proc/meminfo", f"MemTotal: {64 * GB // 1024} kB\nMemFree: 1 kB\n")
    return tmp_path


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_without_cgroups_the_host_is_the_limit(host: Path) -> None:
    assert machine.memory_limit() == (64 * GB, "host")
    assert machine.cores() == 16


def test_the_tightest_group_of_version_2_counts(host: Path) -> None:
    write(host / "proc/self/cgroup", "0::/a/b\n")
    write(host / "cgroup/memory.max", "max\n")
    write(host / "cgroup/a/memory.max", f"{8 * GB}\n")
    write(host / "cgroup/a/b/memory.max", f"{12 * GB}\n")
    write(host / "cgroup/a/cpu.max", "250000 100000\n")
    write(host / "cgroup/a/b/cpu.max", "max 100000\n")
    assert machine.memory_limit() == (8 * GB, "container")
    assert machine.cores() == 3


def test_in_a_container_only_the_root_is_mounted(host: Path) -> None:
    write(host / "proc/self/cgroup", "0::/kubepods/pod1/abc\n")
    write(host / "cgroup/memory.max", f"{4 * GB}\n")
    assert machine.memory_limit() == (4 * GB, "container")


def test_version_1_is_read_too(host: Path) -> None:
    write(host / "proc/self/cgroup", "9:cpu,cpuacct:/x\n4:memory:/x\n1:name=systemd:/\n0::/\n")
    write(host / "cgroup/memory/x/memory.limit_in_bytes", f"{6 * GB}\n")
    write(host / "cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(host / "cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "400000\n")
    write(host / "cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000\n")
    assert machine.memory_limit() == (6 * GB, "container")
    assert machine.cores() == 4


@pytest.mark.parametrize("text", ["", "max", "-1", "garbage 12", "9223372036854771712"])
def test_what_is_no_limit_is_none(host: Path, text: str) -> None:
    write(host / "proc/self/cgroup", "0::/a\n")
    for name in ("memory.max", "cpu.max"):
        write(host / "cgroup/a" / name, text)
    assert machine.memory_limit() == (64 * GB, "host")
    assert machine.cores() == 16


def test_a_limit_above_the_host_is_none(host: Path) -> None:
    write(host / "proc/self/cgroup", "0::/a\n")
    write(host / "cgroup/a/memory.max", f"{100 * GB}")
    assert machine.memory_limit() == (64 * GB, "host")


def test_this_machine_has_memory_and_a_core() -> None:
    limit, _ = machine.memory_limit()
    assert 0 < limit <= machine.memory_total()
    assert 1 <= machine.cores() <= (os.cpu_count() or 1)


@pytest.mark.parametrize(
    ("env", "threads", "said"),
    [
        ({}, "16", "16 OMP threads a rank (16 cores for 1 rank of this host)"),
        ({"LOCAL_SIZE": "4"}, "4", "4 OMP threads a rank (16 cores for 4 ranks of this host)"),
        ({"LOCAL_WORLD_SIZE": "32"}, "1", "1 OMP thread a rank (16 cores for 32 ranks"),
        ({"OMP_NUM_THREADS": "1", "LOCAL_WORLD_SIZE": "4"}, "1", "faster with OMP_NUM_THREADS=4"),
        ({"OMP_NUM_THREADS": "9", "LOCAL_SIZE": "4"}, "9", "more than there are, use"),
        ({"OMP_NUM_THREADS": "4,2"}, "4,2", "4,2 OMP threads a rank (OMP_NUM_THREADS; "),
        ({"OMP_NUM_THREADS": "16"}, "16", "16 OMP threads a rank (OMP_NUM_THREADS; 16 cores for 1"),
    ],
)
def test_each_rank_gets_its_share_of_the_cores_unless_somebody_decided(
    host: Path, env: dict[str, str], threads: str, said: str
) -> None:
    assert said in machine.set_threads(env)
    assert env["OMP_NUM_THREADS"] == threads


@pytest.mark.parametrize(
    ("env", "ranks"),
    [({}, 8), ({"LOCAL_SIZE": "3"}, 3), ({"LOCAL_WORLD_SIZE": "2", "LOCAL_SIZE": "3"}, 2)],
)
def test_ranks_of_this_host_are_the_launchers_or_eight(
    env: dict[str, str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    assert machine.local_ranks(16) == ranks


RANKS_OF_4 = {"LOCAL_SIZE": "4"}


@pytest.mark.parametrize(
    ("mask", "env", "threads", "said"),
    [
        (16, {}, "4", "16 cores for 4 ranks"),
        (4, {}, "4", "bound to 4 cores of its own"),
        (4, {"OMP_NUM_THREADS": "4"}, "4", "OMP_NUM_THREADS; bound to 4 cores of its own)"),
        (1, {"OMP_NUM_THREADS": "2"}, "2", "more than there are, use OMP_NUM_THREADS=1"),
        (4, {"OMP_NUM_THREADS": "1"}, "1", "CPU Adam is faster with OMP_NUM_THREADS=4"),
    ],
)
def test_a_rank_that_the_launcher_bound_takes_its_own_cores(
    mask: int, env: dict[str, str], threads: str, said: str, host: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    def affinity(pid: int) -> set[int]:
        return set(range(16 if pid else mask))  # the launcher may use all

    monkeypatch.setattr(machine.os, "sched_getaffinity", affinity)
    environ = {**RANKS_OF_4, **env}
    assert said in machine.set_threads(environ)
    assert environ["OMP_NUM_THREADS"] == threads


def test_a_launcher_that_is_gone_bound_nobody(host: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def affinity(pid: int) -> set[int]:
        if pid:
            raise ProcessLookupError
        return set(range(16))

    monkeypatch.setattr(machine.os, "sched_getaffinity", affinity)
    assert "4 OMP threads a rank (16 cores for 4 ranks" in machine.set_threads(dict(RANKS_OF_4))


@pytest.mark.parametrize(
    ("asked", "words"),
    [("foo", "ds_sft knows cuda and cpu: unset it"), ("cuda", "no CUDA device is seen: unset it")],
)
def test_an_accelerator_that_is_not_there_is_refused_by_name(
    asked: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", asked)
    with pytest.raises(ConfigError, match=f"^DS_ACCELERATOR={asked}, but {words}$"):
        machine.check_accelerator()
    for free in ("", "cpu"):
        monkeypatch.setenv("DS_ACCELERATOR", free)
        machine.check_accelerator()

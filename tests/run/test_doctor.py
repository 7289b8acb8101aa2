"""What stops a run on a machine is found, with a remedy; the exit code is the chosen JSON's."""

from __future__ import annotations

import mmap
import os
import resource
import shutil
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from harness import ROOT

from ds_sft.engine import machine, ops, swap_files
from ds_sft.errors import ConfigError
from ds_sft.run import disk, doctor, doctor_build
from ds_sft.run import doctor_checks as checks
from ds_sft.run.doctor import DoctorFlags
from ds_sft.run.doctor_checks import Check

CONFIGS = ROOT / "ds_configs"
PLAIN = CONFIGS / "zero3.json"
OFFLOAD = CONFIGS / "zero3_offload_optimizer.json"
NVME = CONFIGS / "zero3_offload_nvme.json"


@pytest.fixture
def extensions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of compiled operators."""
    root = tmp_path / "extensions"
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(root))
    return root


@pytest.fixture
def empty_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A PATH without any program."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)
    return folder


def program(folder: Path, name: str) -> Path:
    path = folder / name
    path.write_text("#!/bin/sh\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def put_operator(root: Path, name: str, built_by: str) -> None:
    (root / name).mkdir(parents=True)
    (root / name / f"{name}.so").touch()
    (root / name / "build.ninja").write_text(f"cflags = -I{built_by}/ops/csrc/includes\n")


def test_no_compiler_stops_offload_and_names_the_json_without(empty_path: Path) -> None:
    row = doctor_build.compiler()
    assert (row.state, row.stops) == ("FAIL", ("cpu", "nvme"))
    assert "no `c++` in PATH" in row.detail
    assert "install g++" in row.advice
    assert "ds_configs/zero3.json" in row.advice
    program(empty_path, "c++")
    assert doctor_build.compiler().state == "ok"


def test_the_compiler_is_the_one_that_torch_calls(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program(empty_path, "c++")
    monkeypatch.setenv("CXX", "my-compiler")
    assert "no `my-compiler` in PATH" in doctor_build.compiler().detail


def test_ninja_beside_python_counts_though_it_is_not_in_path(
    empty_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beside = empty_path / "other"
    beside.mkdir()
    monkeypatch.setattr(sys, "executable", str(beside / "python"))
    row = doctor_build.ninja()
    assert (row.state, row.stops) == ("FAIL", ("cpu", "nvme"))
    assert "pip install ninja" in row.advice
    program(beside, "ninja")
    assert doctor_build.ninja().state == "ok"


def test_an_operator_is_missing_then_built(extensions: Path) -> None:
    import deepspeed

    row = doctor_build.operator("cpu_adam", minutes=2, stops="cpu")
    assert (row.state, row.stops) == ("warn", ())
    assert "about 2 minutes" in row.detail
    assert "doctor --build" in row.advice
    put_operator(extensions, "cpu_adam", str(Path(deepspeed.__file__).parent))
    assert doctor_build.operator("cpu_adam", minutes=2, stops="cpu").state == "ok"


def test_an_operator_that_could_not_be_built_anywhere_is_a_failure(
    extensions: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    extensions.parent.mkdir(exist_ok=True)
    (extensions.parent / "file").touch()
    monkeypatch.setenv("TORCH_EXTENSIONS_DIR", str(extensions.parent / "file/below"))
    row = doctor_build.operator("cpu_adam", minutes=2, stops="cpu")
    assert (row.state, row.stops) == ("FAIL", ("cpu",))
    assert "TORCH_EXTENSIONS_DIR" in row.advice


@pytest.mark.parametrize("name", ["cuda", "tpu"])
def test_an_accelerator_that_is_not_here_stops_every_run(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("DS_ACCELERATOR", name)
    row = checks.gpu()
    assert (row.state, row.stops) == ("FAIL", ("all",))
    assert f"DS_ACCELERATOR={name}" in row.detail


def test_what_another_environment_built_would_be_built_again(extensions: Path) -> None:
    put_operator(extensions, "cpu_adam", "/somewhere/else/deepspeed")
    row = doctor_build.operator("cpu_adam", minutes=2, stops="cpu")
    assert row.state == "warn"
    assert "not built by this environment" in row.detail
    assert "TORCH_EXTENSIONS_DIR" in row.advice


def test_async_io_needs_what_it_loads_first(extensions: Path) -> None:
    import deepspeed

    put_operator(extensions, "async_io", str(Path(deepspeed.__file__).parent))
    assert doctor_build.operator("async_io", minutes=6, stops="nvme").state == "warn"
    put_operator(extensions, "pin_memory", str(Path(deepspeed.__file__).parent))
    assert doctor_build.operator("async_io", minutes=6, stops="nvme").state == "ok"


def test_a_stale_lock_stops_runs_that_would_wait_for_ever(extensions: Path) -> None:
    lock = extensions / "cpu_adam/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    assert (
        doctor_build.operator("cpu_adam", minutes=2, stops="cpu").state == "warn"
    )  # young: in use
    long_ago = time.time() - 600
    os.utime(lock, (long_ago, long_ago))
    row = doctor_build.operator("cpu_adam", minutes=2, stops="cpu")
    assert (row.state, row.stops) == ("FAIL", ("cpu",))
    assert str(lock) in row.detail
    assert "doctor --build" in row.advice
    assert lock.exists()  # looking changes nothing


def test_a_lock_of_what_an_operator_loads_first_stops_it_too(extensions: Path) -> None:
    lock = extensions / "pin_memory/lock"
    lock.parent.mkdir(parents=True)
    lock.touch()
    os.utime(lock, (1, 1))
    assert doctor_build.operator("async_io", minutes=6, stops="nvme").state == "FAIL"
    assert doctor_build.operator("cpu_adam", minutes=2, stops="cpu").state == "warn"


def only(path: Path | None) -> Check:
    (row,) = checks.nvme(path)
    return row


def test_a_path_that_is_not_given_is_not_looked_at() -> None:
    assert only(None).state == "-"


@pytest.mark.parametrize(
    ("place", "said"),
    [
        ("/nowhere/at/all", "is not a directory"),
        ("/dev/shm", "is a tmpfs, which is host memory and no disk"),
        ("/proc", "cannot be written as DeepSpeed does"),
    ],
)
def test_a_path_that_is_unfit_for_swap_files_names_the_json_without(place: str, said: str) -> None:
    row = only(Path(place))
    assert (row.state, row.stops) == ("FAIL", ("nvme",))
    assert said in row.detail
    assert "--nvme-path" in row.advice
    assert "ds_configs/zero3_offload_optimizer.json" in row.advice


def test_a_fit_path_is_measured_and_left_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(disk, "bandwidth", lambda path: (2.5e9, 0.4e9))
    place, speed, leftovers = checks.nvme(tmp_path)
    assert place.state == "ok"
    assert "takes direct writes" in place.detail
    assert speed.state == "warn"
    assert "2.50 GB/s written, 0.40 GB/s read" in speed.detail
    assert leftovers.detail == "none of dead runs"
    assert list(tmp_path.iterdir()) == []


def test_what_dead_runs_left_is_counted_and_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = tmp_path / f"{swap_files.PREFIX}rank0-x"
    dead.mkdir()
    (dead / "a.swp").write_bytes(bytes(50_000_000))
    monkeypatch.setattr(disk, "bandwidth", lambda path: (2e9, 2e9))
    row = list(checks.nvme(tmp_path))[-1]
    assert row.state == "warn"
    assert "1 of dead runs, 0.05 GB" in row.detail
    assert dead.is_dir()


def test_a_disk_that_fills_up_while_it_is_measured_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(disk.os, "posix_fallocate", full)
    row = list(checks.nvme(tmp_path))[1]
    assert row.state == "warn"
    assert "No space left" in row.detail
    assert list(tmp_path.iterdir()) == []


def test_bandwidth_is_what_was_moved_over_the_time_it_took(tmp_path: Path) -> None:
    started = time.monotonic()
    write, read = disk.bandwidth(tmp_path, num_bytes=16 << 20, seconds=1.0)
    spent = time.monotonic() - started
    # Both went over in `spent`: neither can have been slower than that.
    assert write > (16 << 20) / (spent + 0.1) * 0.9
    assert read > 0
    assert list(tmp_path.iterdir()) == []


def test_bandwidth_stops_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev

    def slow(*args: Any) -> int:
        time.sleep(0.05)
        return real(*args)

    monkeypatch.setattr(disk.os, "pwritev", slow)
    started = time.monotonic()
    disk.bandwidth(tmp_path, num_bytes=512 << 20, seconds=0.2)
    assert time.monotonic() - started < 5  # all of it would take 3.2 s at eight a time
    assert list(tmp_path.iterdir()) == []


def test_bandwidth_wants_room(tmp_path: Path) -> None:
    too_much = shutil.disk_usage(tmp_path).free
    with pytest.raises(OSError, match="GB free"):
        disk.bandwidth(tmp_path, num_bytes=too_much)


def test_segments_of_the_dead_are_found_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    for name in ("deepspeed_allreduce_buffer_0", "nccl-abc", "torch_1_2", "somebody-elses"):
        (tmp_path / name).write_bytes(bytes(1 << 20))
    with (tmp_path / "nccl-abc").open("r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()  # mapped and no longer open, as NCCL does it
        dead, size = disk.shared_memory_leftovers(tmp_path)
        row = checks.shared_memory(tmp_path)
    assert {p.name for p in dead} == {"deepspeed_allreduce_buffer_0", "torch_1_2"}
    assert size == 2 << 20
    assert row.state == "warn"
    assert "2 segments of dead processes hold 2 MB" in row.detail


def test_limits_of_the_shell_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {resource.RLIMIT_MEMLOCK: 65_536, resource.RLIMIT_NOFILE: 1024}
    monkeypatch.setattr(checks.resource, "getrlimit", lambda kind: (values[kind], values[kind]))
    locked, files = checks.limits()
    assert (locked.state, files.state) == ("ok", "warn")
    assert "1,024 open files" in files.detail
    assert "ulimit -n" in files.advice
    monkeypatch.setenv("DS_PIN_MEMORY_BACKEND", "native")
    assert next(iter(checks.limits())).state == "warn"
    values = dict.fromkeys(values, resource.RLIM_INFINITY)
    assert [row.state for row in checks.limits()] == ["ok", "ok"]


def test_the_containers_memory_is_the_one_that_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "memory_limit", lambda: (16 * 10**9, "container"))
    monkeypatch.setattr(machine, "memory_total", lambda: 64 * 10**9)
    said = checks.memory().detail
    assert "16.0 GB (container) of the host's 64.0 GB" in said
    assert "0.7 B parameters (20 bytes each" in said


def row(state: checks.State, *stops: checks.Kind) -> Check:
    return Check(name="thing", state=state, detail="d", advice="a", stops=stops)


@pytest.mark.parametrize(
    ("stops", "cannot"),
    [
        (("cpu",), {"zero3_offload_optimizer.json", "zero3_offload_optimizer_nvme.json",
                    "zero3_offload_nvme.json"}),
        (("nvme",), {"zero3_offload_optimizer_nvme.json", "zero3_offload_nvme.json"}),
        (("all",), {p.name for p in CONFIGS.glob("zero3*.json")}),
        ((), set()),
    ],
)  # fmt: skip
def test_a_failure_stops_the_jsons_that_need_the_thing(
    stops: tuple[checks.Kind, ...], cannot: set[str], tmp_path: Path
) -> None:
    names = ["zero3", "zero3_offload_optimizer", "zero3_offload_optimizer_nvme",
             "zero3_offload_nvme"]  # fmt: skip
    rows = [row("FAIL", *stops)] if stops else [row("warn")]
    found = set()
    for name in names:
        file = CONFIGS / f"{name}.json"
        said = doctor.verdict(file, rows, DoctorFlags(), tmp_path, None)
        found |= {file.name} if said.state == "FAIL" else set()
        assert said.state == "ok" or "thing" in said.detail
    assert found == cannot & {f"{name}.json" for name in names}


def test_a_model_is_compared_with_the_memory_of_the_host(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ds_sft.data.model_files import find_model

    model = find_model(str(tiny_model))
    fits = doctor.verdict(OFFLOAD, [], DoctorFlags(), None, model)
    assert fits.state == "ok"
    monkeypatch.setattr(machine, "memory_limit", lambda: (1_000_000, "container"))
    tight = doctor.verdict(OFFLOAD, [], DoctorFlags(), None, model)
    assert tight.state == "FAIL"
    assert "the container has 0.0 GB" in tight.detail
    assert "zero3_offload_optimizer_nvme.json" in tight.advice
    assert doctor.verdict(PLAIN, [], DoctorFlags(), None, model).state == "ok"


def test_files_that_are_not_deepspeeds_get_no_verdict(
    tmp_path: Path, quiet_machine: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copy(PLAIN, tmp_path / "mine.json")
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "list.json").write_text("[1]")
    (tmp_path / "two.json").write_text('{"zero_optimization": {"stage": 2}}')
    doctor.run(DoctorFlags(deepspeed_config=tmp_path / "mine.json"))
    said = capsys.readouterr().out
    assert "ok    mine.json  can run" in said
    assert "FAIL  two.json" in said
    assert "package.json" not in said
    assert "list.json" not in said


def test_a_json_that_is_refused_has_the_reason_in_its_row(tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text('{"zero_optimization": {"stage": 3}, "gradient_cliping": 1.0}')
    said = doctor.verdict(file, [], DoctorFlags(), None, None)
    assert said.state == "FAIL"
    assert "gradient_cliping" in said.detail
    assert "did you mean" in said.advice


@pytest.fixture
def quiet_machine(monkeypatch: pytest.MonkeyPatch) -> list[Check]:
    """A machine whose checks are this list."""
    rows = [row("ok")]
    monkeypatch.setattr(doctor, "look", lambda path: iter(rows))
    monkeypatch.chdir(ROOT)
    return rows


def test_the_exit_code_is_the_chosen_jsons(
    quiet_machine: list[Check], capsys: pytest.CaptureFixture[str]
) -> None:
    quiet_machine.append(row("FAIL", "cpu"))
    doctor.run(DoctorFlags())  # zero3.json needs no compiled operator
    said = capsys.readouterr().out
    assert "ok    zero3.json " in said
    assert "FAIL  zero3_offload_optimizer.json " in said
    with pytest.raises(SystemExit) as ended:
        doctor.run(DoctorFlags(deepspeed_config=OFFLOAD))
    assert ended.value.code == 1
    assert "stopped by: thing: see above" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"deepspeed_config": Path("none.json")}, "does not exist"),
        ({"world_size": 0}, "--world-size 0"),
        ({"model_id": "no/such-model"}, "neither a directory nor in the Hub's cache"),
    ],
)
@pytest.mark.usefixtures("quiet_machine")
def test_wrong_flags_are_refused(flags: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        doctor.run(DoctorFlags(**flags))


@pytest.mark.usefixtures("quiet_machine", "empty_path")
def test_nothing_is_built_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(ops, "build_all", lambda wanted: pytest.fail(f"builds {wanted}"))
    doctor.run(DoctorFlags(build=True))
    said = capsys.readouterr().out
    assert said.startswith("[ops] nothing is built: C++ compiler: no `c++` in PATH\n")


@pytest.mark.usefixtures("extensions", "empty_path")
def test_without_a_compiler_nobody_looks_for_libaio() -> None:
    assert doctor_build.libaio().state == "-"


@pytest.mark.usefixtures("extensions")
def test_missing_headers_of_libaio_name_the_json_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor_build, "compiler", lambda: row("ok"))
    builder = SimpleNamespace(is_compatible=lambda verbose: False)
    monkeypatch.setattr(ops, "builder", lambda op: builder)
    said = doctor_build.libaio()
    assert (said.state, said.stops) == ("FAIL", ("nvme",))
    assert "install_nvme_deps.sh" in said.advice
    assert "ds_configs/zero3_offload_optimizer.json" in said.advice
    builder.is_compatible = lambda verbose: True
    assert doctor_build.libaio().state == "ok"


@pytest.mark.usefixtures("quiet_machine")
def test_build_goes_on_when_one_operator_cannot_be_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def build_all(wanted: list[str]) -> None:
        tried.extend(wanted)
        if wanted == ["cpu_adam"]:
            raise ConfigError("DeepSpeed cannot build cpu_adam here: so it is")

    monkeypatch.setattr(ops, "build_all", build_all)
    doctor.run(DoctorFlags(build=True))
    assert tried == ["cpu_adam", "async_io"]
    assert "[ops] DeepSpeed cannot build cpu_adam here" in capsys.readouterr().out


def test_the_table_of_a_terminal_keeps_every_word(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("COLUMNS", "60")
    long = "/a/very/long/path/" + "x" * 60
    doctor.show("machine", [Check(name="n", state="warn", detail=long, advice="ds-sft[gpu] [x]")])
    said = capsys.readouterr().out
    assert said.count("x") == 61
    assert "ds-sft[gpu]" in said


@pytest.mark.slow
def test_on_this_machine_the_plain_json_can_run() -> None:
    env = {**os.environ, "DS_ACCELERATOR": "cpu"}
    done = subprocess.run(
        [sys.executable, "-m", "ds_sft", "doctor"], cwd=ROOT, env=env, text=True,
        capture_output=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    names = [line[8:].split("  ")[0] for line in lines if line.startswith("  ")]
    for name in ("packages", "C++ compiler", "ninja", "cpu_adam", "libaio", "async_io",
                 "NVMe path", "host memory", "attention", "Liger", "zero3.json"):  # fmt: skip
        assert name in names
    for line in lines:
        if line.startswith("  FAIL"):
            assert ": " in line, line

"""The shell scripts: they parse, choose a Python that runs, and report the right exit code."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHELL_FILES = [
    *sorted(ROOT.glob("scripts/*.sh")),
    ROOT / "scripts" / "check",
    ROOT / ".ci" / "run",
]


def bash(script: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-c", script], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )


def write_program(path: Path, body: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)


@pytest.mark.parametrize("path", SHELL_FILES, ids=lambda path: path.name)
def test_the_shell_accepts_the_script(path: Path) -> None:
    done = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", ["quickstart.sh", "test.sh", "check"])
def test_the_script_can_be_started_directly(name: str) -> None:
    assert os.access(ROOT / "scripts" / name, os.X_OK)


def test_ci_runs_exactly_the_test_script() -> None:
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    commands = [line for line in lines if line and not line.startswith(("#", "set ", "cd "))]
    assert commands == ["exec ./scripts/test.sh"]


def test_an_interpreter_that_does_not_run_is_passed_over(tmp_path: Path) -> None:
    write_program(tmp_path / "python3", "echo 'no version selected' >&2; exit 127")
    write_program(tmp_path / "python3.13", "exit 1")  # too old, as it would say itself
    write_program(tmp_path / "python3.12", f'exec "{sys.executable}" "$@"')
    done = bash(". scripts/venv.sh; find_python", PATH=f"{tmp_path}:{os.environ['PATH']}")
    assert done.stdout == "python3.12\n"


def test_no_python_is_an_error_of_one_line(tmp_path: Path) -> None:
    done = bash(
        ". scripts/venv.sh; make_venv base .",
        PYTHON="/nonexistent/python",
        DS_SFT_VENV=str(tmp_path / "venv"),
    )
    assert done.returncode == 1
    assert done.stderr.startswith("error: no Python 3.11 or newer")
    assert done.stderr.count("\n") == 1


def test_unknown_arguments_are_an_error_of_one_line() -> None:
    done = bash("scripts/quickstart.sh --fast")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: unknown arguments: --fast: use no argument, or --real\n"


def test_pins_hold_one_version_each_and_torch_without_a_local_part() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    names = [pin.split("==")[0] for pin in pins]
    assert all(pin.count("==") == 1 for pin in pins)
    assert len(set(names)) == len(names)
    assert not any("+" in pin for pin in pins)
    assert {"torch", "deepspeed", "transformers", "pytest", "ruff", "mypy"} <= set(names)
    assert not any(name == "triton" or name.startswith("nvidia") for name in names)


@pytest.fixture
def fake_checkout(tmp_path: Path) -> Path:
    """test.sh with an environment of stand-ins, whose exit codes the test chooses by RC_<name>."""
    checkout = tmp_path / "checkout"
    (checkout / "scripts").mkdir(parents=True)
    for name in ("scripts/test.sh", "scripts/venv.sh", "constraints.txt", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout / name)
    tools = checkout / ".venv" / "bin"
    header_folder = sysconfig.get_path("include")
    write_program(
        tools / "python",
        f'case "$*" in *sysconfig*) echo {header_folder};;\n'
        '*pytest*) echo "ran: $*"; exit "${RC_pytest:-0}";;\n'
        '*build_ops*) echo "ran: $*"; exit "${RC_ops:-0}";; esac',
    )
    for name in ("ruff", "mypy"):
        write_program(tools / name, f'exit "${{RC_{name}:-0}}"')
    done = subprocess.run(
        ["bash", "-c", ". scripts/venv.sh; mark_installed dev; mark_installed slow"], cwd=checkout
    )
    assert done.returncode == 0
    return checkout


def run_tests(checkout: Path, *args: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(checkout / "scripts" / "test.sh"), *args],
        env={**os.environ, "DS_SFT_VENV": ".venv", **env},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize("code", [0, 1, 5])
def test_the_exit_code_is_pytests(fake_checkout: Path, code: int) -> None:
    done = run_tests(fake_checkout, RC_pytest=str(code))
    assert done.returncode == code, done.stdout + done.stderr


def test_the_first_failure_wins_and_later_stages_still_run(fake_checkout: Path) -> None:
    done = run_tests(fake_checkout, RC_mypy="2", RC_pytest="1")
    assert done.returncode == 2
    assert "ran: -m pytest" in done.stdout


def test_the_time_of_every_stage_is_printed(fake_checkout: Path) -> None:
    table = run_tests(fake_checkout).stdout.partition("== time\n")[2].splitlines()
    stages = [line.split()[0] for line in table]
    assert stages == ["install", "ops", "ruff", "format", "mypy", "pytest", "in"]


def test_arguments_reach_pytest_and_the_quick_run_compiles_less(fake_checkout: Path) -> None:
    quick = run_tests(fake_checkout, "-m", "not slow").stdout
    assert "ran: -m pytest -n 2 --dist loadfile -m not slow" in quick
    assert "build_ops.py" not in quick
    assert "build_ops.py cpu_adam async_io\n" in run_tests(fake_checkout).stdout


def test_a_failed_install_ends_the_run_and_is_the_exit_code(fake_checkout: Path) -> None:
    write_program(fake_checkout / ".venv" / "bin" / "python", "exit 3")
    done = run_tests(fake_checkout, PYTHON="/nonexistent/python")
    assert done.returncode == 1
    assert "error: no Python 3.11 or newer" in done.stderr
    assert "ran:" not in done.stdout

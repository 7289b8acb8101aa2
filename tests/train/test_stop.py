"""A run that is asked to stop saves, leaves in seconds, and goes on with the same numbers."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import psutil
import pytest
from harness import ROOT, Result, Running, Training, launch_many

from ds_sft.run.layout import labels_in

pytestmark = pytest.mark.slow
# Many microbatches in a step, so that most signals come in the middle of one.
SLOW_STEPS = {"--train-batch-size": 32, "--num-train-steps": 8, "--steps-per-checkpoint": 100}
SECONDS_TO_LEAVE = 30


def ranks_of(run: Running) -> list[psutil.Process]:
    tree = run.tree()
    found = [p for p in tree if "--local_rank" in " ".join(p.cmdline())]
    return sorted(found, key=lambda p: " ".join(p.cmdline()))


def launcher_of(run: Running) -> psutil.Process:
    return next(p for p in run.tree() if "deepspeed.launcher.launch" in p.cmdline())


def wait_until_gone(processes: list[psutil.Process]) -> float:
    started = time.monotonic()
    _, alive = psutil.wait_procs(processes, timeout=SECONDS_TO_LEAVE)
    assert not alive, alive
    return time.monotonic() - started


# What only a launcher can show, on launches of their own; the rest happens in forks of one process.
LAUNCHED: dict[str, Callable[[Running], None]] = {
    "SIGTERM to launch.py": lambda run: launcher_of(run).send_signal(signal.SIGTERM),
    "SIGKILL to launch.py": lambda run: launcher_of(run).send_signal(signal.SIGKILL),
    "SIGTERM to deepspeed": lambda run: run.process.send_signal(signal.SIGTERM),
}
FORKED = ("SIGTERM to one rank", "SIGUSR1 to one rank", "touch stop")
WAYS = (*LAUNCHED, *FORKED)


@dataclass(frozen=True)
class Stopped:
    """A run that was stopped in one way and started again."""

    saved: list[int]
    """Labels of its temporary checkpoints, once it had left."""
    finished: bool
    """Whether it claimed to be finished then."""
    again: Result
    """The second start, to the end."""


@pytest.fixture(scope="module")
def launched(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, list[str]]]:
    """Run directory of each launch that was stopped, and what its ranks' launchers said."""
    work = tmp_path_factory.mktemp("launched")
    left = {}
    for number, (way, stop) in enumerate(LAUNCHED.items()):
        out = work / str(number)
        with Running(2, *harness.flags(tiny_model, tiny_data, out, SLOW_STEPS)) as run:
            run.wait_for("[init]")
            refused = second_start(tiny_model, tiny_data, out) if number == 0 else ""
            run.wait_for("Progress on:train 3it")
            ranks = ranks_of(run)
            assert len(ranks) == 2
            stop(run)
            wait_until_gone(ranks)
        left[way] = out, [*run.lines, refused]
    return left


def second_start(model: Path, data: Path, out: Path) -> str:
    """What a second start of a run says that is alive; it is refused before it imports torch."""
    environment = harness.cpu_env(RANK="0", LOCAL_RANK="0", WORLD_SIZE="2", PYTHONPATH=str(ROOT))
    words = map(str, harness.flags(model, data, out, SLOW_STEPS))
    command = [sys.executable, "-m", "ds_sft.train", *words]
    done = subprocess.run(
        command, env=environment, text=True, capture_output=True, timeout=120, check=False
    )
    return f"{done.returncode} {done.stderr}"


@pytest.fixture(scope="module")
def straight_and_stopped(
    launched: dict[str, tuple[Path, list[str]]],
    tiny_model: Path,
    tiny_data: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[Result, dict[str, Stopped]]:
    """A run without a stop, and each that was stopped, as it was left and gone on with."""
    work = tmp_path_factory.mktemp("stopped")

    def words(out: Path) -> list[object]:
        return harness.flags(tiny_model, tiny_data, out, SLOW_STEPS)

    outs = {way: launched[way][0] if way in launched else work / way for way in WAYS}
    straight, *forked = launch_many(
        2,
        [
            Training(words(work / "straight")),
            *(Training(words(outs[way]), {"FAIL_AT": way}, "failing_rank") for way in FORKED),
        ],
        work,
    )
    assert straight.codes == [0, 0], straight.text[-3000:]
    for result in forked:
        assert result.codes == [75, 75], result.text[-3000:]
    left = {
        way: (labels_in(out / "checkpoints-temp"), (out / "finished").exists())
        for way, out in outs.items()
    }
    again = launch_many(2, [Training(words(outs[way])) for way in WAYS], work)
    return straight, {
        way: Stopped(*left[way], result) for way, result in zip(WAYS, again, strict=True)
    }


@pytest.mark.parametrize("way", WAYS)
def test_a_stopped_run_saves_leaves_soon_and_goes_on_bit_identically(
    way: str, straight_and_stopped: tuple[Result, dict[str, Stopped]]
) -> None:
    straight, stopped = straight_and_stopped[0], straight_and_stopped[1][way]
    (saved,) = stopped.saved
    assert 2 <= saved < 7
    assert not stopped.finished
    again = stopped.again
    assert again.codes == [0, 0], again.text[-3000:]
    wanted = f"resumed from {again.out}/checkpoints-temp/step-{saved} at step {saved + 1}"
    assert wanted in again.text
    for column in ("label", "loss", "lr", "grad_norm"):
        assert again.column(column) == straight.column(column)
    got, want = (run.out / "hf/step-7/model.safetensors" for run in (again, straight))
    assert got.read_bytes() == want.read_bytes()


def test_in_a_step_of_minutes_the_ranks_leave_with_75_in_seconds_and_a_second_signal_is_harmless(
    start_and_long_step: dict[str, Result],
) -> None:
    run = start_and_long_step["two signals"]
    assert run.codes == [75, 75], run.text[-3000:]
    assert "[stop] SIGTERM after 0 steps" in run.text
    signalled, left = ((run.out / name).stat().st_mtime for name in ("signalled", "left"))
    assert left - signalled < SECONDS_TO_LEAVE
    assert harness.metrics(run.out) == []


def test_a_second_start_is_refused_while_the_first_is_alive(
    launched: dict[str, tuple[Path, list[str]]],
) -> None:
    out, said = launched["SIGTERM to launch.py"]
    assert said[-1].startswith(f"2 error: another run of --out {out} is alive"), said[-1]
    assert said[-1].count("\n") == 1


def test_a_stop_during_start_up_is_not_lost(start_and_long_step: dict[str, Result]) -> None:
    run = start_and_long_step["stop at start-up"]
    assert run.codes == [75, 75], run.text[-3000:]
    assert "[stop] the file `stop` appeared after 0 steps" in run.text
    assert harness.metrics(run.out) == []


@pytest.fixture(scope="module")
def start_and_long_step(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """A run that is stopped while it starts, then one in a step that would take minutes."""
    work = tmp_path_factory.mktemp("started")
    long_step = {"--train-batch-size": 20_000, "--num-train-steps": 2}
    changes = {"stop at start-up": SLOW_STEPS, "two signals": long_step}
    trainings = [
        Training(
            harness.flags(tiny_model, tiny_data, work / name, more), {"FAIL_AT": name},
            "failing_rank",
        )
        for name, more in changes.items()
    ]  # fmt: skip
    return dict(zip(changes, launch_many(2, trainings, work), strict=True))


# Where the signal comes, flags beside six steps, completed steps at the stop.
INSIDE: dict[str, tuple[str, dict[str, int], int]] = {
    "export": ("signal in an export", {"--steps-per-hf-export": 2}, 3),
    "last export": ("signal in an export", {"--steps-per-hf-export": 100}, 6),
    "save": ("signal in a save", {"--steps-per-hf-export": 2, "--steps-per-checkpoint": 1}, 2),
}


@pytest.fixture(scope="module")
def signalled(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """`straight` exports labels 2, 4 and 5; each other run is stopped and started again."""
    work = tmp_path_factory.mktemp("signalled")
    runs: dict[str, Training] = {}
    for name, (where, changes, _) in {"straight": ("", {}, 0), **INSIDE}.items():
        base = {"--num-train-steps": 6, "--steps-per-hf-export": 2, "--steps-per-checkpoint": 100}
        words = harness.flags(tiny_model, tiny_data, work / name, {**base, **changes})
        if where:
            runs[f"{name} stopped"] = Training(words, {"FAIL_AT": where}, "failing_rank")
        runs[name] = Training(words)
    return dict(zip(runs, launch_many(2, list(runs.values()), work), strict=True))


@pytest.mark.parametrize("name", INSIDE)
def test_a_signal_in_an_export_or_a_save_stops_the_run_with_nothing_half(
    name: str, signalled: dict[str, Result]
) -> None:
    where, _, completed = INSIDE[name]
    straight, stopped, ended = (signalled[n] for n in ("straight", f"{name} stopped", name))
    assert (straight.codes, stopped.codes, ended.codes) == ([0, 0], [75, 75], [0, 0]), stopped.text
    assert f"after {completed} steps: start it again" in stopped.text
    assert "[done]" not in stopped.text
    assert ("was interrupted: the run stops" in stopped.text) == where.endswith("export")
    assert f"at step {completed}\n" in ended.text
    exported = labels_in(ended.out / "hf")
    assert exported == ([5] if name == "last export" else [2, 4, 5])
    for label in exported:
        weights = f"hf/step-{label}/model.safetensors"
        assert (ended.out / weights).read_bytes() == (straight.out / weights).read_bytes()
    for column in ("label", "loss", "grad_norm"):
        assert ended.column(column) == straight.column(column)
    assert not [*ended.out.rglob("*.partial"), *ended.out.rglob("*.replaced")]

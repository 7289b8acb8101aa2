"""A run that is asked to stop saves, leaves in seconds, and goes on with the same numbers."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import harness
import psutil
import pytest
from harness import Result, Running, Training, launch_many

from ds_sft.run.layout import labels_in

pytestmark = pytest.mark.slow
# Many microbatches in a step, so that most signals come in the middle of one.
SLOW_STEPS = {"--train-batch-size": 64, "--num-train-steps": 8, "--steps-per-checkpoint": 100}
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


WAYS: dict[str, Callable[[Running, Path], None]] = {
    "SIGTERM to one rank": lambda run, out: ranks_of(run)[1].send_signal(signal.SIGTERM),
    "SIGUSR1 to one rank": lambda run, out: ranks_of(run)[0].send_signal(signal.SIGUSR1),
    "SIGTERM to launch.py": lambda run, out: launcher_of(run).send_signal(signal.SIGTERM),
    "SIGKILL to launch.py": lambda run, out: launcher_of(run).send_signal(signal.SIGKILL),
    "SIGTERM to deepspeed": lambda run, out: run.process.send_signal(signal.SIGTERM),
    "touch stop": lambda run, out: (out / "stop").touch(),
}


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
def straight_and_stopped(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Result, dict[str, Stopped]]:
    """Each way needs a launcher of its own to be stopped; what goes on needs none."""
    work = tmp_path_factory.mktemp("stopped")
    left: dict[str, tuple[list[int], bool]] = {}
    trainings = [Training(harness.flags(tiny_model, tiny_data, work / "straight", SLOW_STEPS))]
    for number, (way, stop) in enumerate(WAYS.items()):
        out = work / str(number)
        words = harness.flags(tiny_model, tiny_data, out, SLOW_STEPS)
        with Running(2, *words) as run:
            run.wait_for("Progress on:train 3it")
            ranks = ranks_of(run)
            assert len(ranks) == 2
            stop(run, out)
            wait_until_gone(ranks)
        left[way] = labels_in(out / "checkpoints-temp"), (out / "finished").exists()
        trainings.append(Training(words))
    straight, *again = launch_many(2, trainings, work)
    assert straight.codes == [0, 0], straight.text[-3000:]
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
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    long_step = {"--train-batch-size": 20_000, "--num-train-steps": 2}
    with Running(2, *harness.flags(tiny_model, tiny_data, out, long_step)) as run:
        run.wait_for("First batch loaded")
        time.sleep(2)
        ranks = ranks_of(run)
        for _ in range(2):
            ranks[0].send_signal(signal.SIGTERM)
            time.sleep(0.2)
        seconds = wait_until_gone(ranks)
        run.wait_for("[stop] SIGTERM after 0 steps")
        run.process.wait(timeout=30)
    assert seconds < SECONDS_TO_LEAVE
    assert run.process.returncode == 75
    assert harness.metrics(out) == []


def test_a_second_start_is_refused_while_orphans_of_the_first_are_alive(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    endless = {**SLOW_STEPS, "--num-train-steps": 500}  # however long the second start takes
    words = harness.flags(tiny_model, tiny_data, out, endless)
    with Running(2, *words) as run:
        run.wait_for("Progress on:train 1it")
        done = harness.launch(2, *words)
        assert done.returncode == 2, done.stdout[-2000:]
        assert f"error: another run of --out {out} is alive" in done.stdout
        assert "step-" not in "".join(p.name for p in out.rglob("*.partial"))


def test_a_stop_during_start_up_is_not_lost(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    with Running(2, *harness.flags(tiny_model, tiny_data, out, SLOW_STEPS)) as run:
        run.wait_for("[init]")
        ranks = ranks_of(run)
        (out / "stop").touch()
        wait_until_gone(ranks)
        run.wait_for("[stop] the file `stop` appeared after 0 steps")
        run.process.wait(timeout=30)
    assert run.process.returncode == 75
    assert harness.metrics(out) == []


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

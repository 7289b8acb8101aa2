"""SIGKILL at random moments of every phase: the run ends as if it had been left alone.

The short form of `scripts/chaos.py`, which has the reasons and the long form.
"""

from __future__ import annotations

import random
import sys
from collections import Counter
from pathlib import Path

import harness
import pytest

sys.path.insert(0, str(harness.ROOT / "scripts"))
import chaos
import chaos_phases


@pytest.mark.slow
@pytest.mark.timeout(1500)  # three minutes on two quiet cores
def test_a_run_killed_ten_times_and_more_is_the_straight_run(tmp_path: Path) -> None:
    fell = chaos.prove(tmp_path, kills=11, steps=42, seed=random.randrange(1 << 30))
    assert fell.total() >= 11
    assert min(fell[phase] for phase in chaos_phases.REQUIRED) >= chaos.EACH_AT_LEAST


def directories(root: Path, *names: str) -> chaos_phases.Seen:
    for name in names:
        path = root / name
        if path.suffix == ".json":
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text("{}")
        else:
            path.mkdir(parents=True, exist_ok=True)
    return chaos_phases.look(root)


PHASES = {
    chaos_phases.STEP: [],
    chaos_phases.BEFORE: ["checkpoints-temp/step-5.partial"],
    chaos_phases.MARKER: ["checkpoints/step-5.partial/meta.json"],
    chaos_phases.EXPORT: ["hf/step-6.partial"],
    chaos_phases.EXPORTED: ["hf/step-6"],
    chaos_phases.AFTER: ["checkpoints/step-5"],
}


@pytest.mark.parametrize("phase", PHASES)
def test_the_phase_is_read_from_what_lies_there(phase: str, tmp_path: Path) -> None:
    at_start = directories(tmp_path, "checkpoints-temp/step-4", "hf/step-4")
    assert chaos_phases.phase_of(at_start, at_start) == chaos_phases.STEP
    assert chaos_phases.phase_of(directories(tmp_path, *PHASES[phase]), at_start) == phase


def test_a_deletion_that_did_not_end_belongs_to_the_save_before_it(tmp_path: Path) -> None:
    at_start = directories(tmp_path, "checkpoints-temp/step-4")
    (tmp_path / "checkpoints-temp/step-4").rename(tmp_path / "checkpoints-temp/step-4.partial")
    now = directories(tmp_path, "checkpoints-temp/step-5")
    assert chaos_phases.phase_of(now, at_start) == chaos_phases.AFTER


def write_rows(out: Path, losses: list[float]) -> None:
    out.mkdir(exist_ok=True)
    row = '{{"label": {}, "loss": {}, "lr": 0, "grad_norm": 0, "target_tokens": 1, "tokens": 1}}\n'
    text = "".join(row.format(label, loss) for label, loss in enumerate(losses))
    (out / "metrics.jsonl").write_text(text)


def test_one_other_loss_a_lost_row_and_a_leftover_are_found(tmp_path: Path) -> None:
    run, alone = tmp_path / "run", tmp_path / "alone"
    write_rows(alone, [1.0, 2.0])
    for losses in ([1.0, 2.0000000001], [1.0], [1.0, 2.0, 2.0]):
        write_rows(run, losses)
        with pytest.raises(chaos.Failed, match="differs at row"):
            chaos.compare(run, alone)
    write_rows(run, [1.0, 2.0])
    assert len(chaos.compare(run, alone)) == 2
    directories(run, "checkpoints/step-1.partial")
    with pytest.raises(chaos.Failed, match="leftovers"):
        chaos.compare(run, alone)


def test_every_phase_gets_its_share_of_kills() -> None:
    fell = Counter(dict.fromkeys(chaos_phases.REQUIRED, 2))
    fell[chaos_phases.MARKER] = 1
    assert chaos.next_target(fell, 8, random.Random(0)) == chaos_phases.MARKER
    assert chaos.next_target(fell, 14, random.Random(0)) == chaos_phases.START

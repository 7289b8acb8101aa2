"""One flipped bit in a checkpoint: it is passed over with a word, and never laundered."""

from __future__ import annotations

from pathlib import Path

import harness
import pytest

from ds_sft.errors import CheckpointError
from ds_sft.run.export import export_offline
from ds_sft.run.layout import labels_in
from ds_sft.run.reshard import convert
from ds_sft.run.verify import verify

pytestmark = pytest.mark.slow
OFTEN = {"--steps-per-checkpoint": 2, "--steps-per-hf-export": 100, "--keep-checkpoints": 2}


def optim_file(checkpoint: Path) -> Path:
    return next(checkpoint.glob("*rank_1_*optim_states.pt"))


@pytest.fixture
def stopped(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> tuple[Path, list[object]]:
    """A run with checkpoints step-2 and step-4, the newer one damaged; and its words."""
    words = harness.flags(tiny_model, tiny_data, tmp_path / "run", OFTEN)
    done = harness.run_once(2, *words, "--stop-after", 5, work=tmp_path)
    assert done.codes == [0, 0], done.text[-3000:]
    harness.flip_a_bit(optim_file(tmp_path / "run/checkpoints/step-4"))
    return tmp_path / "run", words


def test_the_run_goes_on_from_the_one_before_and_pruning_spares_what_is_whole(
    stopped: tuple[Path, list[object]], tmp_path: Path
) -> None:
    out, words = stopped
    damaged = out / "checkpoints/step-4"
    for laundering in (
        lambda: export_offline(
            damaged, tmp_path / "hf", dtype="float32", keep_generation_config=False
        ),
        lambda: convert(damaged, tmp_path / "other", 1),
        lambda: verify(damaged),
    ):
        with pytest.raises(CheckpointError, match="another sha256"):
            laundering()
    first = harness.metrics(out)
    done = harness.run_once(2, *words, "--stop-after", 4, work=tmp_path)
    assert done.codes == [0, 0], done.text[-3000:]
    assert "passed over, now" in done.text
    assert f"resumed from {out}/checkpoints/step-2 at step 3" in done.text
    assert (out / "checkpoints/step-4.broken").is_dir()
    assert labels_in(out / "checkpoints") == [2]
    assert labels_in(out / "checkpoints-temp") == [3]
    columns = ("label", "loss", "grad_norm")
    again = [[row[c] for c in columns] for row in harness.metrics(out)]
    assert again == [[row[c] for c in columns] for row in first][:4]


def test_when_none_is_whole_the_run_stops_and_touches_nothing(
    stopped: tuple[Path, list[object]],
) -> None:
    out, words = stopped
    harness.flip_a_bit(optim_file(out / "checkpoints/step-2"))
    before = (out / "metrics.jsonl").read_bytes()
    done = harness.run_once(2, *words, work=out.parent)
    assert done.codes == [2, 2], done.text[-3000:]
    assert "no whole checkpoint is left" in done.text
    assert (out / "metrics.jsonl").read_bytes() == before

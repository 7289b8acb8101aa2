"""A run that was killed, stopped or extended goes on as if nothing had happened.

Killed means `kill -9` of the launcher and every rank. The reference is the same run, uninterrupted:
losses, learning rates, gradient norms and final weights are compared bit for bit.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import harness
import numpy as np
import pytest
from harness import Result, Running, Training, launch_many

from ds_sft import train
from ds_sft.data.packed import PackedDataset
from ds_sft.recipe.named import RECIPES
from ds_sft.run import changes
from ds_sft.run.layout import labels_in

EXACT = ("label", "loss", "lr", "grad_norm", "target_tokens", "tokens")
EVERY_STEP = {"--temp-checkpoint-minutes": 0.0001}
DTYPES = ("float32", "bfloat16")


def for_dtype(dtype: str) -> dict[str, object]:
    """Compute in `dtype`; export the fp32 masters, which hide nothing."""
    return {"--compute-dtype": dtype, "--hf-export-dtype": "float32"}


def same_run(run: Path, straight: Path) -> None:
    """Everything that a person keeps of a run is what the uninterrupted run has."""
    got, want = harness.metrics(run), harness.metrics(straight)
    assert [row["label"] for row in got] == list(range(len(want)))
    assert [[row[n] for n in EXACT] for row in got] == [[row[n] for n in EXACT] for row in want]
    last = f"step-{len(want) - 1}"
    names = sorted(path.name for path in (straight / "hf" / last).iterdir())
    assert sorted(path.name for path in (run / "hf" / last).iterdir()) == names
    for name in names:
        ours, theirs = ((d / "hf" / last / name).read_bytes() for d in (run, straight))
        assert ours == theirs, name


# Every export fails: one weight does not fit float16.
OVERFLOW = {
    "--hf-export-dtype": "float16", "--steps-per-hf-export": 3, "--steps-per-checkpoint": 3,
}  # fmt: skip


def overflowing_model(model: Path, data: Path, to: Path) -> Path:
    """The tiny model with 1e5 in the embedding of a token that the data does not have."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(model, to)
    tensors = load_file(to / "model.safetensors")
    unused = next(i for i in range(512) if i not in PackedDataset.open(data).tokens)
    tensors["model.embed_tokens.weight"][unused, 0] = 1e5
    save_file(tensors, to / "model.safetensors", metadata={"format": "pt"})
    return to


@pytest.fixture(scope="module")
def runs(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    """Uninterrupted and stopped runs on two ranks, in one launch."""
    work = tmp_path_factory.mktemp("resume")
    bf16, extend = for_dtype("bfloat16"), {"--allow-change": "num_train_steps"}
    wanted: dict[str, tuple[str, dict]] = {
        "float32": ("float32", for_dtype("float32")),
        "bfloat16": ("bfloat16", {**bf16, "--steps-per-checkpoint": 3}),
        "after 1": ("pieces", {**bf16, "--stop-after": 1}),
        "after 7": ("pieces", {**bf16, "--stop-after": 7}),  # 56 packs: two epochs exactly
        "after 12": ("pieces", bf16),
        "extended": ("pieces", {**bf16, "--num-train-steps": 14, **extend}),
        "label 0": ("label-0", {**bf16, "--stop-after": 1}),
        "no export": ("no-export", OVERFLOW),
    }
    huge = overflowing_model(tiny_model, tiny_data, work / "model")
    trainings = [
        Training(
            harness.flags(huge if name == "no export" else tiny_model, tiny_data, work / out, more)
        )
        for name, (out, more) in wanted.items()
    ]
    results = dict(zip(wanted, launch_many(2, trainings, work), strict=True))
    for name, result in results.items():
        assert result.codes == [0, 0], f"{name}: {result.text[-3000:]}"
    return results


@pytest.mark.slow
def test_stop_after_and_going_on_twice_also_at_an_epochs_end_is_bit_identical(
    runs: dict[str, Result], tmp_path: Path
) -> None:
    assert "[stop] --stop-after after 1 steps" in runs["after 1"].text
    assert "[done]" not in runs["after 7"].text
    assert "at step 7" in runs["after 12"].text
    before_extension = tmp_path / "pieces"
    shutil.copytree(runs["after 12"].out, before_extension)
    rows = (before_extension / "metrics.jsonl").read_text().splitlines(keepends=True)
    (before_extension / "metrics.jsonl").write_text("".join(rows[:12]))
    same_run(before_extension, runs["bfloat16"].out)


@pytest.mark.slow
def test_two_permanent_checkpoints_stay_and_no_temporary_one(runs: dict[str, Result]) -> None:
    out = runs["bfloat16"].out
    assert labels_in(out / "checkpoints") == [9, 11]
    assert labels_in(out / "checkpoints-temp") == []


@pytest.mark.slow
def test_an_extended_run_goes_on_and_prints_old_and_new_learning_rate(
    runs: dict[str, Result],
) -> None:
    run = runs["extended"]
    assert "num_train_steps changes from 12 to 14" in run.text
    # 12 steps: at its floor of 0.1 x 0.002. 14 steps: cosine over 7 steps, after 5 of them.
    new = 0.002 * (0.9 * 0.5 * (1 + np.cos(np.pi * 5 / 7)) + 0.1)
    assert f"learning rate of step 12: 0.0002 before the change, {new:.6g} now" in run.text
    assert run.column("label") == list(range(14))
    assert run.rows[12]["lr"] == pytest.approx(new, rel=1e-12)
    assert json.loads((run.out / "finished").read_text())["completed"] == 14


@pytest.mark.slow
def test_bfloat16_masters_hold_the_values_of_a_float32_model(
    runs: dict[str, Result], tiny_model: Path, tmp_path: Path
) -> None:
    """Label 0 changes nothing, so its masters are the file's values and not their rounding."""
    import torch

    from ds_sft.run.export import export_offline

    point = runs["label 0"].out / "checkpoints-temp/step-0"
    export_offline(point, tmp_path / "hf", dtype="float32", keep_generation_config=False)
    got, source = harness.weights(tmp_path / "hf"), harness.weights(tiny_model)
    assert all((got[name] == source[name]).all() for name in source)
    rounded = torch.from_numpy(source["lm_head.weight"]).bfloat16().double().numpy()
    assert (rounded != source["lm_head.weight"]).any()


@pytest.mark.slow
def test_a_checkpoint_whose_export_failed_stays(runs: dict[str, Result]) -> None:
    run = runs["no export"]
    assert run.text.count("[export] FAILED") == 4
    assert labels_in(run.out / "checkpoints") == [3, 6, 9, 11]
    assert not list((run.out / "hf").iterdir())
    assert f"ds-sft export --checkpoint {run.out}/checkpoints/step-11" in run.text


def newest_label(out: Path) -> int:
    """Label of the newest whole checkpoint of either kind."""
    return max(labels_in(out / "checkpoints-temp") + labels_in(out / "checkpoints"))


@pytest.mark.slow
def test_kill_9_twice_between_steps_is_bit_identical_also_where_the_directory_is_moved(
    runs: dict[str, Result], tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    out, said = tmp_path / "run", ""
    for moment in ("Progress on:train 4it", "Progress on:train 8it"):
        words = harness.flags(tiny_model, tiny_data, out, {**for_dtype("bfloat16"), **EVERY_STEP})
        with Running(2, *words) as running:
            running.wait_for(moment)
        assert said in "".join(running.lines)
        assert 1 <= len(labels_in(out / "checkpoints-temp")) <= 2
        out = out.rename(tmp_path / f"moved-{moment[-3]}")
        said = f"resumed from {out}/checkpoints-temp/step-{newest_label(out)} "
    words = harness.flags(tiny_model, tiny_data, out, {**for_dtype("bfloat16"), **EVERY_STEP})
    done = harness.launch(2, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    assert said in done.stdout
    same_run(out, runs["bfloat16"].out)
    assert labels_in(out / "checkpoints-temp") == []


@pytest.mark.slow
def test_kill_9_in_the_middle_of_a_save_takes_the_one_before_it(
    runs: dict[str, Result], tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    out = tmp_path / "run"
    words = harness.flags(tiny_model, tiny_data, out, {**for_dtype("float32"), **EVERY_STEP})
    with Running(2, *words) as running:
        running.kill_when(lambda: any(out.glob("checkpoints-temp/step-[3-9].partial")))
    [partial] = out.glob("checkpoints-temp/*.partial")
    label = newest_label(out)
    assert partial.name == f"step-{label + 1}.partial"
    done = harness.launch(2, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"step-{label} at step {label + 1}" in done.stdout
    same_run(out, runs["float32"].out)
    assert not list(out.rglob("*.partial"))


# Without a launch: what is decided before torch is imported.


def run_main(monkeypatch: pytest.MonkeyPatch, words: list[object], world_size: int = 2) -> int:
    """Exit code of `train.main` as rank 0 of a launch that never comes to pass."""
    for name, value in {"WORLD_SIZE": str(world_size), "RANK": "0", "PATH": "/usr/bin"}.items():
        monkeypatch.setenv(name, value)
    try:
        train.main([str(word) for word in words])
    except SystemExit as exit_:
        return int(exit_.code or 0)
    return 0


@pytest.fixture
def started(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Path:
    """A run directory with checkpoints of 4 and 7 steps, as far as `--resume` looks at them."""
    golden = harness.GOLDEN_RECIPE
    recipe = RECIPES["qwen3-8b"].replace(
        model_id=str(tiny_model),
        **{n.removeprefix("--").replace("-", "_"): value for n, value in golden.items()},
    )
    for completed in (4, 7):
        point = tmp_path / "run/checkpoints" / f"step-{completed - 1}"
        point.mkdir(parents=True)
        meta = {
            "format": 1,
            "completed": completed,
            "world_size": 2,
            "data_manifest_sha256": PackedDataset.open(tiny_data).manifest_sha256,
            "recipe": {f: getattr(recipe, f) for f in recipe.__slots__},
            "model": {"config.json": json.loads((tiny_model / "config.json").read_text())},
        }
        (point / "meta.json").write_text(json.dumps(meta))
    return tmp_path / "run"


REFUSED = {
    "num_train_steps was 12": {"--num-train-steps": 16},
    "learning_rate was 0.002": {"--learning-rate": 0.001},
    "compute_dtype was float32": {"--compute-dtype": "bfloat16"},
    "holds 7 steps, more than the 5": {
        "--num-train-steps": 5, "--allow-change": "num_train_steps",
    },
    "--allow-change steps is no field": {"--allow-change": "steps"},
    "--resume none, but": {"--resume": "none"},
    "step-3 is not a directory": {"--resume": "nowhere/step-3"},
}  # fmt: skip


@pytest.mark.parametrize("words", REFUSED)
def test_what_would_change_the_numbers_is_refused_in_one_line(
    words: str,
    started: Path,
    tiny_model: Path,
    tiny_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = harness.flags(tiny_model, tiny_data, started, REFUSED[words])
    assert run_main(monkeypatch, flags) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert words in said
    assert said.count("\n") == 1


def test_going_back_inside_a_run_that_has_newer_checkpoints_is_refused(
    started: Path,
    tiny_model: Path,
    tiny_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """They would be pruned in the wrong order, and win at the next `--resume auto`."""
    back = {"--resume": started / "checkpoints/step-3"}
    assert run_main(monkeypatch, harness.flags(tiny_model, tiny_data, started, back)) == 2
    assert "step-6 is newer: use --resume auto" in capsys.readouterr().err
    branch = {**back, "--dry-run": True}
    other = started.parent / "branch"
    assert run_main(monkeypatch, harness.flags(tiny_model, tiny_data, other, branch)) == 0


def test_another_world_size_is_taken_and_said(
    started: Path,
    tiny_model: Path,
    tiny_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = harness.flags(tiny_model, tiny_data, started, {"--dry-run": True})
    assert run_main(monkeypatch, flags, world_size=4) == 0
    assert "step-6 was written by 2 ranks, 4 read it" in capsys.readouterr().out.replace("\n", "")


def test_other_data_is_refused(
    started: Path,
    tiny_model: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    shutil.copytree(tiny_data, tmp_path / "other")
    manifest = json.loads((tmp_path / "other/manifest.json").read_text())
    (tmp_path / "other/manifest.json").write_text(json.dumps({**manifest, "packing": "other"}))
    assert run_main(monkeypatch, harness.flags(tiny_model, tmp_path / "other", started)) == 2
    assert ": data was " in capsys.readouterr().err


def test_another_model_is_refused(
    started: Path,
    tiny_model: Path,
    tiny_data: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    meta_file = started / "checkpoints/step-6/meta.json"
    meta = json.loads(meta_file.read_text())
    meta["model"]["config.json"]["num_hidden_layers"] = 36
    meta_file.write_text(json.dumps(meta))
    assert run_main(monkeypatch, harness.flags(tiny_model, tiny_data, started)) == 2
    assert "is of another model: num_hidden_layers is 36" in capsys.readouterr().err


@pytest.mark.slow
def test_a_finished_run_says_so_and_makes_a_missing_final_export_again(
    runs: dict[str, Result],
    tiny_model: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "run"
    shutil.copytree(runs["float32"].out, out)
    shutil.rmtree(out / "hf/step-11")
    before = (out / "finished").read_text()
    words = harness.flags(tiny_model, tiny_data, out, for_dtype("float32"))
    monkeypatch.setattr(changes, "code_version", lambda: "newer")
    for _ in range(2):
        assert run_main(monkeypatch, words) == 0
        assert f"[done] {out} already has its 12 steps" in capsys.readouterr().out
    same_run(out, runs["float32"].out)
    assert (out / "finished").read_text() == before


def test_a_finished_run_without_its_checkpoints_is_not_trained_again(
    tiny_model: Path,
    tiny_data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """People delete the checkpoints of a finished run: they are large."""
    out = tmp_path / "run"
    (out / "hf/step-11").mkdir(parents=True)
    (out / "finished").write_text('{"completed": 12}')
    assert run_main(monkeypatch, harness.flags(tiny_model, tiny_data, out)) == 0
    assert "already has its 12 steps" in capsys.readouterr().out
    more = {"--num-train-steps": 16}
    assert run_main(monkeypatch, harness.flags(tiny_model, tiny_data, out, more)) == 2
    assert "finished 12 steps and has no checkpoint left" in capsys.readouterr().err

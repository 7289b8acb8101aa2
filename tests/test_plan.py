import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest

from ds_sft import plan as planning
from ds_sft import plan_view
from ds_sft.data.levanter_order import LevanterOrder
from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.tokenizer import tokenizer_hash
from ds_sft.errors import ConfigError, DataError
from ds_sft.flags import parse_train
from ds_sft.plan import Plan
from ds_sft.plan_facts import corner_steps, facts, step_targets
from ds_sft.plan_view import label_list
from ds_sft.recipe.batching import BatchPlan
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe
from ds_sft.recipe.schedule import Schedule


def make_plan(
    model: Path, data: Path, out: Path, changes: dict[str, Any] | None = None, world_size: int = 2
) -> Plan:
    run, recipe = parse_train([str(word) for word in harness.flags(model, data, out, changes)])
    return planning.check(run, recipe, world_size)


@pytest.fixture
def golden(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> Plan:
    """The plan of the golden 12-step run on 2 ranks."""
    return make_plan(tiny_model, tiny_data, tmp_path / "run")


def test_the_plan_holds_what_the_run_needs(golden: Plan) -> None:
    assert golden.schedule.num_steps == 12
    assert golden.batches.micro_per_step == 4
    assert golden.ds_config["train_batch_size"] == 2
    assert golden.ds_config["gradient_clipping"] == 1.0
    assert golden.model is not None
    assert golden.resume_from is None


def test_learning_rates_are_levanters(golden: Plan) -> None:
    # golden/tiny_qwen3_train: peak 2e-3, warmup 3 of 12 steps, cosine over 6 to a tenth.
    rates = {entry["step"]: entry["lr"] for entry in facts(golden)["learning_rate"]}
    assert rates[0] == 0.0
    assert rates[1] == pytest.approx(2e-3 / 3)
    assert rates[3] == rates[6] == pytest.approx(2e-3)
    assert rates[11] == pytest.approx(2e-4 + 1.8e-3 * 0.5 * (1 + math.cos(math.pi * 5 / 6)))


def test_batch_and_steps_are_counted_both_ways(golden: Plan) -> None:
    said = facts(golden)
    assert said["batch"]["tokens_per_step"] == 8 * 64
    assert said["batch"]["microbatches_per_group"] == 2
    assert said["steps"]["epochs"] == pytest.approx(12 * 8 / 28, abs=1e-4)
    assert said["steps"]["steps_of_8_epochs_by_packs"] == math.ceil(8 * 28 / 8)
    assert said["steps"]["steps_of_8_epochs_by_documents"] == math.ceil(8 * 58 / 8)


def test_trained_tokens_are_those_of_the_steps(golden: Plan) -> None:
    per_step = [sum(golden.batches.step_tokens(step)) for step in range(12)]
    said = facts(golden)["targets"]
    assert said["per_step_min"] == min(per_step)
    assert said["per_step_mean"] == pytest.approx(np.mean(per_step), abs=0.1)
    assert said["whole_run"] == sum(per_step)
    assert said["assistant_tokens"] == int(golden.data.assistant_counts.sum())


@pytest.mark.parametrize("num_packs", [1, 3, 8, 20])
def test_targets_of_a_step_wrap_around_like_the_batches(num_packs: int) -> None:
    counts = np.random.default_rng(0).integers(1, 50, num_packs).tolist()
    recipe = RECIPES["qwen3-4b"].replace(train_batch_size=8)
    batches = BatchPlan(recipe, counts, world_size=1)
    expected = [sum(batches.step_tokens(step)) for step in range(30)]
    assert step_targets(batches, 30).tolist() == expected


def test_a_levanter_order_is_planned_over_the_whole_run(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = {"--order": "levanter-era", "--era-length": 10, "--mixture-block-size": 7}
    plan = make_plan(tiny_model, tiny_data, tmp_path / "run", changes)
    want = list(LevanterOrder(28, 12 * 8, 42, 7, 10))
    got = [
        p for step in range(12) for group in (0, 1) for p in plan.batches.group_packs(step, group)
    ]
    assert got == want
    assert facts(plan)["steps"]["epochs"] == pytest.approx(12 * 8 / 28, abs=1e-4)
    per_step = [sum(plan.batches.step_tokens(step)) for step in range(12)]
    assert step_targets(plan.batches, 12).tolist() == per_step
    plan_view.show(plan)
    assert "levanter-era, seed 42: blocks of 7 packs over eras of 10;" in capsys.readouterr().out


def test_parameters_that_decay_are_counted_from_the_headers(golden: Plan) -> None:
    said = facts(golden)["model"]
    norms = 2 * (2 * 64 + 2 * 32) + 64
    assert said["not_decayed"]["parameters"] == 512 * 64 + norms
    assert said["not_decayed"]["tensors"] == 1 + 2 * 4 + 1
    assert said["decayed"]["parameters"] == said["parameters"] - 512 * 64 - norms
    assert "lm_head.weight" in said["decayed"]["sample"]


def test_disk_counts_kept_checkpoints_one_in_flight_a_temporary_one_and_all_exports(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    changes = {"--steps-per-checkpoint": 2, "--steps-per-hf-export": 4, "--keep-checkpoints": 3}
    plan = make_plan(tiny_model, tiny_data, tmp_path / "a" / "run", changes)
    said = facts(plan)["disk"]
    assert plan.model is not None
    size = plan.model.num_parameters
    assert said["checkpoint"] == 12 * size
    assert said["checkpoints"] == (3 + 1 + 1) * 12 * size
    assert said["num_exports"] == len([4, 8, 11])
    assert said["needed"] == 5 * 12 * size + 3 * 2 * size
    assert said["free"] > 0


def test_keeping_all_checkpoints_needs_room_for_all(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    changes = {"--steps-per-checkpoint": 2, "--keep-checkpoints": 0, "--temp-checkpoint-minutes": 0}
    plan = make_plan(tiny_model, tiny_data, tmp_path / "run", changes)
    assert facts(plan)["disk"]["checkpoints_at_most"] == len([2, 4, 6, 8, 10, 11])


def test_epochs_become_steps_by_decimal_arithmetic() -> None:
    words = ["--data", "x", "--epochs", "1.1", "--train-batch-size", "2"]
    run, recipe = parse_train(words)
    assert planning.final_steps(run, recipe, 100) == 55  # in floats 1.1 * 100 / 2 is above 55
    run, recipe = parse_train(["--data", "x", "--epochs", "3", "--train-batch-size", "8"])
    assert planning.final_steps(run, recipe, 28) == 11


def test_steps_default_to_eight_epochs_and_epochs_win_over_the_recipes_steps() -> None:
    run, recipe = parse_train(["--data", "x", "--recipe", "qwen3-4b"])
    assert planning.final_steps(run, recipe, 1000) == math.ceil(8 * 1000 / 128)
    run, recipe = parse_train(["--data", "x", "--recipe", "qwen3-8b", "--epochs", "1"])
    assert planning.final_steps(run, recipe, 640) == 10


def test_corner_steps_are_inside_the_run_and_named_once() -> None:
    recipe = RECIPES["qwen3-8b"]
    corners = corner_steps(Schedule.from_recipe(recipe, 1000))
    assert [step for step, _ in corners] == [0, 1, 99, 100, 200, 1000, 1999]
    short = corner_steps(Schedule.from_recipe(recipe.replace(num_train_steps=1), 1000))
    assert [step for step, _ in short] == [0]


def test_a_one_step_run_has_a_plan(tiny_model: Path, tiny_data: Path, tmp_path: Path) -> None:
    plan = make_plan(tiny_model, tiny_data, tmp_path / "run", {"--num-train-steps": 1})
    assert facts(plan)["exports"] == [0]


def test_label_list_names_every_label() -> None:
    assert label_list([100, 200, 250], 100) == "3: step-100 step-200, step-250"
    many = [*range(100, 2000, 100), 1999]
    assert label_list(many, 100) == "20: step-100 step-200 ... step-1900 (every 100), step-1999"
    assert label_list([0], 100) == "1: step-0"


def test_notes_say_what_idles_and_which_exports_have_no_checkpoint(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    changes = {"--steps-per-hf-export": 3, "--steps-per-checkpoint": 6, "--allow-idle": True}
    plan = make_plan(tiny_model, tiny_data, tmp_path / "run", changes, world_size=3)
    notes = "\n".join(plan.notes)
    assert "4 of 12 slots of a step idle (33%)" in notes
    assert "2 exports have no native checkpoint of the same label (first: step-3)" in notes


def test_data_of_the_first_trainer_is_planned_with_a_note(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    old = first_trainers_data(tiny_data, tmp_path / "old")
    plan = make_plan(tiny_model, old, tmp_path / "run")
    assert any("does not say which tokenizer made it" in note for note in plan.notes)


def first_trainers_data(data: Path, to: Path) -> Path:
    """The same arrays with the manifest that the first trainer's prepare step wrote."""
    to.mkdir()
    for file in data.glob("*.npy"):
        (to / file.name).write_bytes(file.read_bytes())
    (to / "manifest.json").write_text('{"max_seq_len": 64}')
    return to


def test_data_without_tokenizer_needs_one_for_the_exports(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "model"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        (bare / name).write_bytes((tiny_model / name).read_bytes())
    old = first_trainers_data(tiny_data, tmp_path / "old")
    with pytest.raises(ConfigError, match="exports would have no tokenizer"):
        make_plan(bare, old, tmp_path / "run")
    assert make_plan(bare, old, tmp_path / "run", {"--tokenizer": tiny_model}).model is not None


def test_padding_tokens_of_an_export_are_no_other_tokenizer(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    export = harness.copy_tiny_model(tmp_path / "export")
    path = export / "tokenizer.json"
    content = json.loads(path.read_text())
    top = max(content["model"]["vocab"].values())
    top = max([top, *(token["id"] for token in content["added_tokens"])])
    content["added_tokens"].append(
        {**content["added_tokens"][0], "id": top + 1, "content": "<|padding_0|>", "special": False}
    )
    path.write_text(json.dumps(content))
    assert make_plan(export, tiny_data, tmp_path / "run").model is not None


def test_a_model_that_is_not_here_is_noted_unless_offline(
    tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.delenv("TRANSFORMERS_OFFLINE", raising=False)
    plan = make_plan(Path("org/name"), tiny_data, tmp_path / "run")
    assert plan.model is None
    assert any("its checks" in note for note in plan.notes)
    assert facts(plan)["disk"]["needed"] is None
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="HF_HUB_OFFLINE forbids"):
        make_plan(Path("org/name"), tiny_data, tmp_path / "run")


def test_a_run_goes_on_from_its_newest_checkpoint(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    write_checkpoint(make_plan(tiny_model, tiny_data, tmp_path / "run"), label=4)
    plan = make_plan(tiny_model, tiny_data, tmp_path / "run")
    assert plan.resume_from is not None
    assert plan.resume_from.completed == 5
    assert any("5 of 12 steps are done" in note for note in plan.notes)


def write_checkpoint(plan: Plan, label: int, world_size: int = 2) -> Path:
    """The meta.json of a native checkpoint, all that a plan reads of it."""
    import dataclasses

    assert plan.run.out is not None
    assert plan.model is not None
    path = plan.run.out / "checkpoints" / f"step-{label}"
    path.mkdir(parents=True)
    meta = {
        "format": 1, "label": label, "completed": label + 1, "world_size": world_size,
        "compute_dtype": plan.recipe.compute_dtype, "recipe": dataclasses.asdict(plan.recipe),
        "data_manifest_sha256": plan.data.manifest_sha256,
        "model": {"config.json": plan.model.config},
    }  # fmt: skip
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def test_token_range_sees_an_id_in_any_pack(tmp_path: Path) -> None:
    from ds_sft.plan_data import token_range

    with PackedWriter(tmp_path / "data", max_seq_len=8) as writer:
        for last in (3, 900, 4):
            writer.add_pack(np.array([1, 2, last]), np.array([0, 1, 1]), [3])
        writer.commit({})
    assert token_range(PackedDataset.open(tmp_path / "data")) == (0, 900, True)


def test_json_and_tables_say_the_same(golden: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    plan_view.show(golden, as_json=True)
    said = json.loads(capsys.readouterr().out)
    plan_view.show(golden)
    text = capsys.readouterr().out
    assert said["exports"] == [11]
    assert f"{said['model']['parameters']:,} parameters" in text
    assert f"{said['batch']['tokens_per_step']:,} tokens a step" in text
    assert all(f"note: {note}" in text for note in said["notes"])
    for entry in said["learning_rate"]:
        assert f"{entry['lr']:.6g}" in text


def test_the_recipe_in_the_json_makes_the_same_recipe_again(
    golden: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_view.show(golden, as_json=True)
    assert Recipe(**json.loads(capsys.readouterr().out)["recipe"]) == golden.recipe


def test_plot_draws_a_picture(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = harness.flags(tiny_model, tiny_data, tmp_path / "run")
    picture = tmp_path / "lr.png"
    plan_view.main([*map(str, words), "--world-size", "2", "--plot", str(picture)])
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert "Learning rate" in capsys.readouterr().out


def test_plot_without_matplotlib_names_the_extra(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    words = harness.flags(tiny_model, tiny_data, tmp_path / "run")
    with pytest.raises(ConfigError, match=r"pip install 'ds-sft\[plot\]'"):
        plan_view.main([*map(str, words), "--plot", str(tmp_path / "lr.png")])


def test_a_plan_leaves_nothing_behind(golden: Plan) -> None:
    assert golden.run.out is not None
    assert not golden.run.out.exists()


def test_a_group_without_targets_is_found_before_the_run(tiny_model: Path, tmp_path: Path) -> None:
    with PackedWriter(tmp_path / "data", max_seq_len=8) as writer:
        for trained in (1, 1, 1, 1, 0, 0, 0, 0):
            writer.add_pack(np.array([1, 2, 3]), np.array([0, trained, trained]), [3])
        writer.commit({})
    changes = {"--tokenizer": tiny_model, "--num-train-steps": 1}
    with pytest.raises(DataError, match="loss group 1 of step 0"):
        make_plan(tiny_model, tmp_path / "data", tmp_path / "run", changes)


def test_plan_answers_in_a_second_without_torch(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    code = (
        "import sys; from ds_sft.cli import main; main(sys.argv[1:]); "
        "sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    )
    words = [str(word) for word in harness.flags(tiny_model, tiny_data, tmp_path / "run")]
    before = children_seconds()
    subprocess.run(
        [sys.executable, "-c", code, "plan", *words],
        check=True, capture_output=True, env={**os.environ, "RANK": "0"},
    )  # fmt: skip
    assert children_seconds() - before < 1.0


def children_seconds() -> float:
    """CPU time of finished child processes: the wall clock of a busy machine says little."""
    spent = os.times()
    return spent.children_user + spent.children_system


def test_prepared_data_knows_its_tokenizer_and_template(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    from ds_sft.data.template import read_template
    from ds_sft.data.tokenizer import tokenizer_hash

    data = first_trainers_data(tiny_data, tmp_path / "data")
    manifest = {
        "max_seq_len": 64,
        "tokenizer_hash": tokenizer_hash(tiny_model),
        "chat_template_sha256": hashlib.sha256(read_template("qwen3").encode()).hexdigest(),
    }
    (data / "manifest.json").write_text(json.dumps(manifest))
    assert make_plan(tiny_model, data, tmp_path / "run").notes == []
    (data / "manifest.json").write_text(json.dumps({**manifest, "chat_template_sha256": "0"}))
    notes = make_plan(tiny_model, data, tmp_path / "run").notes
    assert len(notes) == 1
    assert "prepare with --chat-template qwen3" in notes[0]
    (data / "manifest.json").write_text(json.dumps({**manifest, "tokenizer_hash": "0"}))
    with pytest.raises(DataError, match="prepared with another tokenizer"):
        make_plan(tiny_model, data, tmp_path / "run")


def test_a_save_that_outlasts_the_launchers_patience_is_noted(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def notes() -> list[str]:
        plan = make_plan(tiny_model, tiny_data, tmp_path / "run")
        return [note for note in plan.notes if "launcher waits" in note]

    assert notes() == []
    monkeypatch.setattr(planning, "ASSUMED_GB_PER_SECOND", 1e-6)
    assert len(notes()) == 1


def with_validation(
    data: Path, to: Path, packs: int = 3, max_seq_len: int = 64, **mask: int
) -> Path:
    """The data with a validation set of small packs."""
    shutil.copytree(data, to)
    with PackedWriter(to / "validation", max_seq_len=max_seq_len) as writer:
        for _ in range(packs):
            tokens = np.arange(10, dtype=np.int32)
            writer.add_pack(tokens, np.full(10, mask.get("mask", 1), np.uint8), [4, 6])
        shutil.copytree(data / "tokenizer", writer.tokenizer_dir)
        writer.commit({"packing": "next-fit"})
    return to


def test_the_plan_says_what_evaluations_cost(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = with_validation(tiny_data, tmp_path / "data")
    plan = make_plan(tiny_model, data, tmp_path / "run", {"--eval-every": 5})
    said = facts(plan)["validation"]
    assert said["labels"] == [5, 10, 11]
    assert (said["num_packs"], said["assistant_tokens"], said["document_tokens"]) == (3, 27, 30)
    assert said["microbatches"] == 2  # 3 packs on 2 ranks
    assert said["microbatches_whole_run"] == 6
    assert said["training_microbatches"] == 12 * 4
    plan_view.show(plan)
    text = capsys.readouterr().out
    assert "3 with 27 trained of 30 tokens" in text
    assert "3: step-5 step-10, step-11" in text


def test_validation_is_evaluated_every_500_steps_where_there_is_one(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    data = with_validation(tiny_data, tmp_path / "data")
    plan = make_plan(tiny_model, data, tmp_path / "run")
    assert plan.validation is not None
    assert plan.validation.every == 500
    assert make_plan(tiny_model, data, tmp_path / "run", {"--eval-every": 0}).validation is None
    assert make_plan(tiny_model, tiny_data, tmp_path / "run").validation is None
    assert (
        make_plan(tiny_model, tiny_data, tmp_path / "run", {"--eval-every": 0}).validation is None
    )


def test_ranks_with_another_validation_have_other_data(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    three = with_validation(tiny_data, tmp_path / "three")
    two = with_validation(tiny_data, tmp_path / "two", packs=2)
    hashes = {
        make_plan(tiny_model, data, tmp_path / "run").data_sha256
        for data in (three, two, tiny_data)
    }
    assert len(hashes) == 3


def test_evaluations_without_validation_are_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"--eval-every 100, but .*validation does not exist"):
        make_plan(tiny_model, tiny_data, tmp_path / "run", {"--eval-every": 100})
    with pytest.raises(ConfigError, match="--eval-every=-1 must be from 0"):
        make_plan(tiny_model, tiny_data, tmp_path / "run", {"--eval-every": -1})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"max_seq_len": 32}, "has rows of 32 tokens and .* of 64: prepare both together"),
        ({"packs": 0}, "has no trained token in its 0 packs"),
        ({"mask": 0}, "has no trained token in its 3 packs"),
    ],
)
def test_a_validation_set_that_does_not_fit_is_refused(
    changes: dict[str, int], said: str, tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    data = with_validation(tiny_data, tmp_path / "data", **changes)
    with pytest.raises(DataError, match=said):
        make_plan(tiny_model, data, tmp_path / "run")


def test_a_damaged_or_foreign_validation_set_is_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    for key, name in (("tokenizer_hash", "tokenizer"), ("chat_template_sha256", "chat_template")):
        data = with_validation(tiny_data, tmp_path / key)
        for path in (data, data / "validation"):
            manifest = json.loads((path / "manifest.json").read_text())
            known = tokenizer_hash(path / "tokenizer")
            manifest[key] = known if path == data else "other"
            (path / "manifest.json").write_text(json.dumps(manifest))
        with pytest.raises(DataError, match=f"prepared with another {name} than"):
            make_plan(tiny_model, data, tmp_path / "run")
    data = with_validation(tiny_data, tmp_path / "tokens")
    tokens = np.load(data / "validation/tokens.npy")
    tokens[1, 2] = 512
    np.save(data / "validation/tokens.npy", tokens)
    with pytest.raises(DataError, match=r"holds token id 512, but the model has 512"):
        make_plan(tiny_model, data, tmp_path / "run")
    manifest = json.loads((data / "manifest.json").read_text())
    (data / "manifest.json").write_text(json.dumps({**manifest, "validation": {"packs": 3}}))
    shutil.move(data / "validation", tmp_path / "elsewhere")
    with pytest.raises(DataError, match="prepared with a validation set, but"):
        make_plan(tiny_model, data, tmp_path / "run")
    shutil.move(tmp_path / "elsewhere", data / "validation")
    (data / "validation/manifest.json").unlink()
    with pytest.raises(DataError, match=r"has no manifest\.json"):
        make_plan(tiny_model, data, tmp_path / "run")


APOLLO = {"--optimizer": "apollo", "--apollo-rank": 8}


def test_a_plan_with_apollo_says_who_goes_which_way_and_what_it_takes(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = make_plan(tiny_model, tiny_data, tmp_path / "run", APOLLO)
    said = facts(plan)
    assert "NOT LEVANTER'S CURVE: the optimizer is apollo" in said["notes"]
    assert (said["recipe"]["apollo_rank"], said["recipe"]["apollo_update_proj_gap"]) == (8, 200)
    assert said["routes"][0] == "low-rank moments: 14 tensors, 110,592 parameters"
    assert plan.model is not None
    dense = plan.model.num_parameters - 110_592
    lengths = [max(s) for n, s in plan.model.shapes.items() if "proj" in n]
    moments = dense + 8 * sum(lengths)
    assert said["disk"]["checkpoint"] == 4 * plan.model.num_parameters + 8 * moments
    plan_view.show(plan)
    out = capsys.readouterr().out
    assert "rank 8, scale 1, one factor a channel, a new projection every 200 updates" in out
    assert "plain AdamW: 11 tensors" in out


def test_a_rank_too_large_for_the_model_is_refused_before_anything_starts(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="use at most --apollo-rank 63"):
        make_plan(tiny_model, tiny_data, tmp_path / "run", {**APOLLO, "--apollo-rank": 256})


def test_apollos_flags_without_apollo_are_refused(
    tiny_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="means nothing to optimizer=adamw"):
        make_plan(tiny_model, tiny_data, tmp_path / "run", {"--apollo-rank": 8})

"""Presets: flags over preset over recipe over defaults, and what is said about each."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from harness import ROOT

from ds_sft import presets
from ds_sft.data.prepare import PrepareFlags
from ds_sft.engine.config import engine_config, read_json
from ds_sft.errors import ConfigError
from ds_sft.flags import parse_train, parse_with_preset, preset_words
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe
from ds_sft.run_config import RunConfig

DATA = ["--data", "d"]
RECIPE = 'base = "qwen3-4b"\ntrain_batch_size = 32\nlearning_rate = 1e-4\n'


@pytest.fixture
def recipe_file(tmp_path: Path) -> str:
    path = tmp_path / "my.toml"
    path.write_text(RECIPE)
    return str(path)


def test_every_field_of_a_preset_is_a_flag_of_training_or_of_prepare() -> None:
    known = {f.name for cls in (RunConfig, Recipe) for f in dataclasses.fields(cls)}
    for name, fields in presets.PRESETS.items():
        assert set(presets.of_training(name)) <= known
        assert set(presets.of_prepare(name)) == set(fields) - set(presets.of_training(name))
        run, recipe = parse_train([*DATA, "--preset", name])
        values = {**dataclasses.asdict(run), **dataclasses.asdict(recipe)}
        assert {k: values[k] for k in presets.of_training(name)} == presets.of_training(name)


@pytest.mark.parametrize("name", presets.PRESETS)
def test_the_json_of_a_preset_is_one_that_a_run_takes(name: str) -> None:
    file = presets.PRESETS[name]["deepspeed_config"]
    assert isinstance(file, Path)
    values = read_json(ROOT / file)
    recipe = RECIPES["qwen3-8b"]
    config = engine_config(values, file, recipe, world_size=1, per_device_batch=1)
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"


def test_the_smoke_run_is_the_one_people_know() -> None:
    assert presets.of_prepare("smoke-12gb") == {"max_seq_len": 2048, "max_samples": 1000}
    run, recipe = parse_train([*DATA, "--preset", "smoke-12gb"])
    assert (run.per_device_batch, run.epochs, run.memory_budget_gb) == (1, 1.0, 11.5)
    assert recipe.train_batch_size == 16


def test_a_tenth_above_each_budget_is_still_on_the_card() -> None:
    for name, fields in presets.PRESETS.items():
        card = int(name.rpartition("-")[2].removesuffix("gb")) * 2**30 / 1e9
        budget = fields["memory_budget_gb"]
        assert isinstance(budget, float)
        assert 0.85 * card < 1.1 * budget < card, name


def test_preset_wins_over_recipe_and_recipe_over_defaults(recipe_file: str) -> None:
    _, recipe = parse_train([*DATA, "--recipe", recipe_file, "--preset", "smoke-12gb"])
    assert recipe.train_batch_size == 16  # preset
    assert recipe.learning_rate == 1e-4  # recipe
    assert recipe.min_lr_ratio == 0.1  # default
    _, recipe = parse_train([*DATA, "--recipe", recipe_file, "--preset", "24gb"])
    assert recipe.train_batch_size == 32  # which that preset leaves alone


@pytest.mark.parametrize("place", ["before", "after"])
@pytest.mark.parametrize("spelling", ["--train-batch-size=32", "--train_batch_size=32"])
def test_a_flag_wins_over_the_preset_whatever_its_place(place: str, spelling: str) -> None:
    words = ["--preset", "smoke-12gb"]
    argv = [spelling, *words] if place == "before" else [*words, spelling]
    _, recipe = parse_train([*argv, *DATA])
    assert recipe.train_batch_size == 32


def test_a_flag_that_says_the_default_still_wins() -> None:
    defaults = RunConfig(data=Path("d"))
    argv = [*DATA, "--preset", "smoke-12gb", "--epochs", "0", "--memory-budget-gb", "0",
            "--deepspeed-config", "ds_configs/zero3.json"]  # fmt: skip
    run, _ = parse_train(argv)
    for field in ("epochs", "memory_budget_gb", "deepspeed_config"):
        assert getattr(run, field) == getattr(defaults, field)
        assert f"{field.replace('_', '-')}={getattr(run, field)} (from flag)" in run.preset_origins


def test_steps_that_were_asked_for_replace_the_epochs_of_the_preset() -> None:
    run, recipe = parse_train([*DATA, "--preset", "smoke-12gb", "--num-train-steps", "7"])
    assert (run.epochs, recipe.num_train_steps) == (0.0, 7)
    assert "epochs=0.0 (from default)" in run.preset_origins


def test_where_each_value_is_from_is_said(recipe_file: str) -> None:
    argv = [*DATA, "--recipe", recipe_file, "--preset", "24gb", "--per-device-batch", "1"]
    run, _ = parse_train(argv)
    assert set(run.preset_origins) >= {
        "epochs=0.0 (from default)", "train-batch-size=32 (from recipe)",
        "per-device-batch=1 (from flag)", "memory-budget-gb=22.5 (from preset)",
        "deepspeed-config=ds_configs/zero3_offload_optimizer.json (from preset)",
    }  # fmt: skip
    (line,) = presets.describe("24gb", run.preset_origins)
    assert line.startswith("preset 24gb: epochs=0.0 (from default), ")
    assert presets.describe("", ()) == []


def test_without_a_preset_nothing_changes() -> None:
    run, recipe = parse_train(DATA)
    assert run == RunConfig(data=Path("d"))
    assert recipe == RECIPES["qwen3-8b"]


def test_the_smoke_run_is_marked_and_the_others_are_not() -> None:
    assert [name for name in presets.PRESETS if len(presets.describe(name, ())) == 2] == [
        "smoke-12gb"
    ]
    assert presets.describe("smoke-12gb", ())[1].startswith("NOT FOR PUBLISHING: ")


def prepare_flags(*words: str) -> PrepareFlags:
    argv = ["--input", "a.jsonl", "--tokenizer", "t", "--out", "o", *words]
    return parse_with_preset(PrepareFlags, argv, "ds-sft prepare")


def test_prepare_takes_the_length_and_the_rows_of_the_preset() -> None:
    flags = prepare_flags("--preset", "smoke-12gb")
    assert (flags.max_seq_len, flags.max_samples) == (2048, 1000)
    assert flags.preset_origins == (
        "max-seq-len=2048 (from preset)", "max-samples=1000 (from preset)"
    )  # fmt: skip
    flags = prepare_flags("--max-samples", "0", "--preset", "smoke-12gb", "--max-seq-len=64")
    assert (flags.max_seq_len, flags.max_samples) == (64, 0)
    assert "max-samples=0 (from flag)" in flags.preset_origins
    assert prepare_flags("--preset", "24gb").max_samples == 0
    assert prepare_flags().preset_origins == ()
    with pytest.raises(ConfigError, match="--preset 1gb is not known"):
        prepare_flags("--preset", "1gb")


@pytest.mark.parametrize("word", ["2gb", "12gb", "SMOKE-12GB", "24gb "])
def test_an_unknown_preset_is_refused_with_the_known_ones(word: str) -> None:
    with pytest.raises(ConfigError, match=f"--preset {word} is not known: use smoke-12gb, 16gb"):
        parse_train([*DATA, "--preset", word])


def test_where_values_are_from_cannot_be_given() -> None:
    with pytest.raises(ConfigError, match="preset-origins"):
        parse_train([*DATA, "--preset-origins", "x"])


def test_a_true_of_a_preset_is_a_bare_flag() -> None:
    fields = {"allow_idle": True, "loss_chunk_size": 8, "left": 1}
    words = preset_words(["--preset", "x"], lambda name: fields, without={"left"})
    assert words == ["--allow-idle", "--loss-chunk-size", "8"]
    assert parse_train([*DATA, *words])[0].allow_idle


def test_a_preset_longer_than_the_data_is_ignored_with_a_line() -> None:
    note = presets.check_length("24gb", 4096, Path("d"), {})
    assert "packs of 8,192 tokens" in note
    assert "packs of 4,096: its length is ignored" in note
    assert presets.check_length("24gb", 8192, Path("d"), {}) == ""
    assert presets.check_length("", 8192, Path("d"), {}) == ""


@pytest.mark.parametrize(
    ("manifest", "words"),
    [
        ({}, "--input chats.jsonl --tokenizer ID "),
        (
            {"sources": [{"path": "a b.jsonl"}, {"path": "c"}, 3], "tokenizer": "Qwen/Qwen3-8B"},
            "--input 'a b.jsonl' c --tokenizer Qwen/Qwen3-8B ",
        ),
        ({"sources": None, "tokenizer": None}, "--input chats.jsonl --tokenizer ID "),
    ],
)
def test_packs_longer_than_the_preset_are_refused_with_the_command_to_run(
    manifest: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        presets.check_length("smoke-12gb", 32768, Path("data/x"), manifest)
    message = str(caught.value)
    assert f"`ds-sft prepare --preset smoke-12gb {words}--out data/x-2048`" in message
    assert "leave the preset out" in message


def test_plan_says_the_preset_and_stops_at_longer_packs(
    tiny_model: Path, tiny_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from ds_sft import plan_view

    monkeypatch.chdir(ROOT)
    argv = ["--data", str(tiny_data), "--model-id", str(tiny_model), "--preset", "smoke-12gb"]
    plan_view.main([*argv, "--json"])
    notes = json.loads(capsys.readouterr().out)["notes"]
    assert notes[0].startswith("preset smoke-12gb: epochs=1.0 (from preset), ")
    assert notes[1].startswith("NOT FOR PUBLISHING")
    assert any("its length is ignored" in note for note in notes)
    short = {**presets.PRESETS["16gb"], "max_seq_len": 32}
    monkeypatch.setitem(presets.PRESETS, "short", short)
    with pytest.raises(ConfigError, match="is for packs of up to 32 tokens"):
        plan_view.main([*argv[:-1], "short"])

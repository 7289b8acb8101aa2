"""The command line is a contract: the first trainer's flags and defaults are frozen here."""

import dataclasses
from pathlib import Path

import pytest

from ds_sft.errors import ConfigError
from ds_sft.flags import _one_line, accept_old_spellings, load_recipe, parse_train
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe
from ds_sft.run_config import RunConfig

# Flags and defaults that people's scripts rely on; None where the recipe decides the default.
RUN_FLAGS = {
    "out": None, "recipe": "qwen3-8b", "deepspeed_config": Path("ds_configs/zero3.json"),
    "tokenizer": "", "epochs": 0.0, "per_device_batch": 1, "loss_chunk_size": 2048,
    "no_loss_checkpoint": False, "attn_impl": "auto", "temp_checkpoint_minutes": 10.0,
    "keep_checkpoints": 2, "hf_export_dtype": "bfloat16", "keep_generation_config": False,
    "resume": "auto", "log_every": 1, "skip_checks": False, "wandb_project": "",
    "wandb_name": "", "wandb_id": "", "dry_run": False,
}  # fmt: skip
RECIPE_FLAGS = (
    "model_id", "num_train_steps", "train_batch_size", "loss_groups", "learning_rate",
    "weight_decay", "warmup", "decay", "min_lr_ratio", "lr_schedule", "max_grad_norm", "beta1",
    "beta2", "eps", "compute_dtype", "grad_reduce_dtype", "steps_per_checkpoint",
    "steps_per_hf_export", "trainer_seed", "data_seed", "order",
)  # fmt: skip
NUMBERS = {
    "--num-train-steps": "7", "--train-batch-size": "6", "--loss-groups": "3",
    "--learning-rate": "0.5", "--weight-decay": "0.25", "--warmup": "0.5", "--decay": "0.25",
    "--min-lr-ratio": "0.5", "--max-grad-norm": "0", "--beta1": "0.5", "--beta2": "0.25",
    "--eps": "0.125", "--steps-per-checkpoint": "3", "--steps-per-hf-export": "9",
    "--trainer-seed": "5", "--data-seed": "6",
}  # fmt: skip


def test_run_flags_and_their_defaults_are_frozen() -> None:
    run, _ = parse_train(["--data", "d"])
    for name, default in RUN_FLAGS.items():
        assert getattr(run, name) == default, name


def test_without_flags_the_recipe_is_the_named_one() -> None:
    for name, recipe in RECIPES.items():
        assert parse_train(["--data", "d", "--recipe", name])[1] == recipe


def test_every_number_of_the_recipe_can_be_set_by_its_flag() -> None:
    _, recipe = parse_train(["--data", "d", *(w for pair in NUMBERS.items() for w in pair)])
    for flag, value in NUMBERS.items():
        assert getattr(recipe, flag[2:].replace("-", "_")) == float(value), flag
    assert set(RECIPE_FLAGS) <= {field.name for field in dataclasses.fields(Recipe)}


def test_flags_override_the_recipe_whatever_their_place() -> None:
    _, recipe = parse_train(["--learning-rate", "1e-3", "--data", "d", "--recipe", "qwen3-4b"])
    assert recipe == RECIPES["qwen3-4b"].replace(learning_rate=1e-3)


def test_no_field_of_run_and_recipe_has_the_same_name() -> None:
    run = {field.name for field in dataclasses.fields(RunConfig)}
    assert not run & {field.name for field in dataclasses.fields(Recipe)}


@pytest.mark.parametrize(
    "words",
    [
        ["--deepspeed_config", "x.json"],
        ["--deepspeed_config=x.json"],
        ["--deepspeed-config", "x.json"],
    ],
)
def test_deepspeeds_spelling_of_its_flag_is_accepted(words: list[str]) -> None:
    assert parse_train(["--data", "d", *words])[0].deepspeed_config == Path("x.json")


@pytest.mark.parametrize("words", [["--local_rank=3"], ["--local_rank", "3"], ["--local-rank=3"]])
def test_the_launchers_rank_is_taken_away(words: list[str]) -> None:
    assert accept_old_spellings([*words, "--data", "d"]) == ["--data", "d"]
    assert parse_train([*words, "--data", "d"])[0].data == Path("d")


def test_shuffle_is_an_alias_of_order_shuffle() -> None:
    assert parse_train(["--data", "d", "--shuffle"])[1].order == "shuffle"


@pytest.mark.parametrize(
    "word", ["--init-mode", "--init_mode=meta", "--wrap-embeddings", "--fused-adam"]
)
def test_flags_of_fsdp_are_refused_with_what_replaces_them(word: str) -> None:
    with pytest.raises(ConfigError, match=r"is a flag of the FSDP trainer: .*drop the flag"):
        parse_train(["--data", "d", word])


@pytest.mark.parametrize("words", [["--num-train-steps", "5"], ["--num_train_steps=5"]])
def test_epochs_and_steps_exclude_each_other(words: list[str]) -> None:
    with pytest.raises(ConfigError, match="exclude each other"):
        parse_train(["--data", "d", "--epochs", "2", *words])


def test_epochs_go_with_a_recipe_that_fixes_its_steps() -> None:
    run, recipe = parse_train(["--data", "d", "--recipe", "qwen3-8b", "--epochs", "2"])
    assert run.epochs == 2.0
    assert recipe.num_train_steps == 2000  # replaced when the plan knows the data


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--resum", "x"], "--resum"),
        (["--per-device-batch", "a"], "invalid literal"),
        (["--attn-impl", "eager"], "eager"),
        (["--loss-chunk-size", "0"], "--allow-full-logits"),
        (["--keep-checkpoints", "-1"], "must be from 0"),
        (["--temp-checkpoint-minutes", "nan"], "must be from 0"),
        (["--learning-rate", "nan"], "learning_rate=nan"),
    ],
)
def test_a_wrong_word_is_one_line_without_a_frame(words: list[str], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_train(["--data", "d", *words])
    message = str(caught.value)
    assert said in message
    assert "\n" not in message
    assert "---" not in message
    assert not set(message) & set("│╭╰─╮╯")


@pytest.mark.parametrize(
    "box",
    [
        "╭─ Value error ──╮\n│ bad --flag:    │\n│ 'a'            │\n│ ────────────── │\n"
        "│ Argument helptext: │\n╰────────────────╯\n",
        " Value error     \n -------------- \n  bad --flag:   \n  'a'           \n"
        "  --------------\n  For full helptext, run x --help\n",
    ],
    ids=["utf-8", "ascii"],
)
def test_the_frame_of_the_message_is_taken_off(box: str) -> None:
    assert _one_line(box, "x") == "bad --flag: 'a' (see x --help)"


def test_missing_data_is_named() -> None:
    with pytest.raises(ConfigError, match="Missing: --data PATH"):
        parse_train([])


def test_a_run_without_out_says_what_to_write() -> None:
    run, _ = parse_train(["--data", "d"])
    with pytest.raises(ConfigError, match="--out is missing"):
        _ = run.run_dir


def test_a_recipe_file_starts_from_its_base(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('base = "qwen3-4b"\nlearning_rate = 1e-4\nnum_train_steps = 30\n')
    expected = RECIPES["qwen3-4b"].replace(learning_rate=1e-4, num_train_steps=30)
    assert load_recipe(str(path)) == expected
    _, recipe = parse_train(["--data", "d", "--recipe", str(path), "--warmup", "3"])
    assert recipe == expected.replace(warmup=3.0)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("learning_rate = = 1", "cannot be read"),
        ('base = "qwen3-4b"\nlr = 1', "unknown key `lr`"),
        ('base = "qwen3-4b"\nlearning_rate = "x"', "must be of type float"),
        ('base = "qwen9"', "recipe 'qwen9' is not known"),
        ("learning_rate = 1.0", "model_id, train_batch_size missing"),
    ],
)
def test_a_recipe_file_that_is_wrong_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=said):
        load_recipe(str(path))

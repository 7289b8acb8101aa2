"""`ds-sft recipes`, and which of flag, preset, entry and default decides."""

from __future__ import annotations

import dataclasses
import json
import sys
from pathlib import Path

import pytest

from ds_sft import cli
from ds_sft.data.prepare_flags import PrepareFlags
from ds_sft.errors import ConfigError
from ds_sft.flags import parse_train, parse_with_preset
from ds_sft.recipe import entries
from ds_sft.recipe.entries import ENTRIES
from ds_sft.recipe.named import RECIPES

DATA = ["--data", "d"]
UNVERIFIED = "gemma4-31b"


def test_the_list_has_a_line_for_every_name(capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["recipes"])
    head, *rows = capsys.readouterr().out.splitlines()
    assert head.split("\t") == [
        "id", "model", "tier", "length", "optimizer", "budget", "verified"
    ]  # fmt: skip
    assert [row.split("\t")[0] for row in rows] == [*RECIPES, *ENTRIES]
    assert "gemma4-12b\tgoogle/gemma-4-12B\teliza-1-9b\t16,384\tapollo\t\tyes" in rows
    assert "qwen3-8b\tQwen/Qwen3-8B\t\t\tadamw\t\tyes" in rows
    assert rows[-1].endswith("\tno")


def test_the_table_fits_a_terminal_and_explains_what_is_unverified(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "dumb")
    cli.main(["recipes"])
    out = capsys.readouterr().out
    assert "google/gemma-4-E2B eliza-1-2b  8,192  apollo" in out
    assert f"{UNVERIFIED} is unverified (" in out


def test_json_holds_every_field_and_null_for_what_is_not_known(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cli.main(["recipes", "--json"])
    said = json.loads(capsys.readouterr().out)
    assert list(said) == [*RECIPES, *ENTRIES]
    assert said["qwen3-8b"]["recipe"] == dataclasses.asdict(RECIPES["qwen3-8b"])
    assert said["qwen3-8b"]["max_seq_len"] is None
    assert [name for name, s in said.items() if s["memory_budget_gb"] is not None] == []
    assert [name for name, s in said.items() if not s["verified"]] == [UNVERIFIED]


def test_an_entry_gives_the_recipe_and_its_own_flags() -> None:
    run, recipe = parse_train([*DATA, "--recipe", "gemma4-e2b"])
    assert recipe == ENTRIES["gemma4-e2b"].recipe
    assert run.epochs == 3.0
    assert run.memory_budget_gb == 0.0  # the default, since no budget is known


def test_flags_win_over_preset_and_preset_over_entry_and_entry_over_defaults(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    known = dataclasses.replace(ENTRIES["gemma4-e2b"], memory_budget_gb=38.5)
    monkeypatch.setitem(entries.ENTRIES, "gemma4-e2b", known)
    entry = [*DATA, "--recipe", "gemma4-e2b"]
    run, recipe = parse_train(entry)
    assert (run.epochs, run.memory_budget_gb, recipe.train_batch_size) == (3.0, 38.5, 32)
    run, recipe = parse_train([*entry, "--preset", "smoke-12gb"])
    assert (run.epochs, run.memory_budget_gb, recipe.train_batch_size) == (1.0, 11.5, 16)
    assert recipe.learning_rate == 2e-4  # which no preset decides
    assert "epochs=1.0 (from preset)" in run.preset_origins
    words = ["--epochs", "2", "--memory-budget-gb", "0", "--train-batch-size", "8"]
    for argv in ([*words, *entry, "--preset", "smoke-12gb"], [*entry, *words]):
        run, recipe = parse_train(argv)
        assert (run.epochs, run.memory_budget_gb, recipe.train_batch_size) == (2.0, 0.0, 8)
    run, _ = parse_train([*entry, "--preset", "24gb"])
    assert "epochs=3.0 (from recipe)" in run.preset_origins


def test_steps_that_were_asked_for_replace_the_epochs_of_the_entry() -> None:
    run, recipe = parse_train([*DATA, "--recipe", "gemma4-e2b", "--num-train-steps", "7"])
    assert (run.epochs, recipe.num_train_steps) == (0.0, 7)


@pytest.mark.parametrize(
    "words", [["--allow-unverified"], ["--model-id", "a/b"], ["--model_id=a/b"]], ids=str
)
def test_an_unverified_entry_needs_a_flag_or_a_model_of_ones_own(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=f"{UNVERIFIED} is unverified"):
        parse_train([*DATA, "--recipe", UNVERIFIED])
    _, recipe = parse_train([*DATA, "--recipe", UNVERIFIED, *words])
    assert recipe.learning_rate == 2e-4


def test_an_empty_name_is_no_name() -> None:
    """What a shell makes of `--recipe "$RECIPE"` must not train the default in silence."""
    for words in (["--recipe", ""], ["--recipe="]):
        with pytest.raises(ConfigError, match="recipe '' is not known"):
            parse_train([*DATA, *words])


def prepared(*words: str) -> PrepareFlags:
    argv = ["--input", "a.jsonl", "--tokenizer", "t", "--out", "o", *words]
    return parse_with_preset(PrepareFlags, argv, "ds-sft prepare")


def test_prepare_takes_length_and_template_from_a_name_and_a_preset_wins() -> None:
    assert prepared("--recipe", "gemma4-12b").max_seq_len == 16384
    assert prepared("--recipe", UNVERIFIED).max_seq_len == 65536  # data needs no checkpoint
    assert prepared("--recipe", "gemma4-12b", "--preset", "24gb").max_seq_len == 8192
    assert prepared("--preset", "24gb", "--recipe", "gemma4-12b").max_seq_len == 8192
    assert prepared("--max-seq-len", "64", "--recipe", "gemma4-12b").max_seq_len == 64
    flags = prepared("--recipe", "qwen3-8b")
    assert (flags.chat_template, flags.max_seq_len) == ("qwen3", 32768)
    assert prepared("--recipe", "qwen3-8b", "--chat-template", "x").chat_template == "x"
    assert prepared().chat_template == ""
    with pytest.raises(ConfigError, match="'nothing' is not known"):
        prepared("--recipe", "nothing")


def test_prepare_reads_a_recipe_file(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text('base = "qwen3-4b"\n')
    assert prepared("--recipe", str(file)).chat_template == "qwen3"

"""FP8 is out of scope: whoever asks for it, in whatever words, is told so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ds_sft.engine.config import check_keys
from ds_sft.errors import ConfigError
from ds_sft.flags import parse_train
from ds_sft.recipe.recipe import asks_for_fp8

SAID = "out of scope for now: use bfloat16"


@pytest.mark.parametrize(
    "config",
    [
        {"fp8": {"enabled": True}},
        {"transformer_engine": True},
        {"data_types": {"grad_accum_dtype": "fp8"}},
        {"zero_optimization": {"stage": 3, "use_fp8_weights": True}},
        {"communication_data_type": "float8_e4m3fn"},
    ],
    ids=str,
)
def test_a_key_or_value_of_the_json_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=SAID):
        check_keys(config, "c.json")


@pytest.mark.parametrize(
    "words",
    [
        ["--compute-dtype", "fp8"],
        ["--compute-dtype=float8"],
        ["--hf-export-dtype", "float8_e4m3fn"],
        ["--grad_reduce_dtype", "e5m2"],
        ["--fp8"],
        ["--use-fp8", "on"],
        ["--transformer-engine"],
    ],
    ids=str,
)
def test_a_flag_is_refused(words: list[str]) -> None:
    with pytest.raises(ConfigError, match=SAID):
        parse_train(["--data", "d", *words])


def test_a_recipe_file_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "r.toml"
    file.write_text('base = "qwen3-8b"\ncompute_dtype = "fp8"\n')
    with pytest.raises(ConfigError, match=f"compute_dtype='fp8'.*{SAID}"):
        parse_train(["--data", "d", "--recipe", str(file)])


def test_nothing_else_is_taken_for_it() -> None:
    for word in ("bfloat16", "float32", "fp16", "8bit", "runs/fp", "te", "qwen3-8b"):
        assert not asks_for_fp8(word)
    run, _ = parse_train(["--data", "d", "--out", "runs/fp8-comparison"])
    assert run.out == Path("runs/fp8-comparison")
    check_keys({"tensorboard": {"enabled": True, "output_path": "logs/fp8"}}, "c.json")

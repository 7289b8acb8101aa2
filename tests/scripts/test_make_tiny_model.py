"""The tiny model: Qwen3's special tokens, reversible text, and weights that start at chance."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
pytestmark = pytest.mark.slow


def run(script: str, *args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPTS / script), *args], capture_output=True, text=True
    )


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with chats.jsonl and a model of the quickstart's size."""
    folder = tmp_path_factory.mktemp("tiny")
    chats = folder / "chats.jsonl"
    assert run("make_chats.py", "--out", str(chats), "--count", "200").returncode == 0
    done = run("make_tiny_model.py", "--chats", str(chats), "--out", str(folder / "model"))
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture(scope="module")
def tokenizer(made: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(made / "model")


def test_special_tokens_are_qwen3s_and_single(tokenizer: Any) -> None:
    assert (tokenizer.eos_token, tokenizer.pad_token) == ("<|im_end|>", "<|endoftext|>")
    for token in ("<|im_start|>", "<|im_end|>", "<tool_call>", "</think>", "<tool_response>"):
        assert tokenizer.tokenize(f"a{token}b") == ["a", token, "b"]
    assert tokenizer.decode(tokenizer.encode("<|im_end|>"), skip_special_tokens=True) == ""
    assert tokenizer.decode(tokenizer.encode("<think>"), skip_special_tokens=True) == "<think>"


def test_any_text_survives_the_round_trip(made: Path, tokenizer: Any) -> None:
    texts = ["Zażółć gęślą jaźń 日本語 🙂", "  two  blanks\n\n\ttab\r\n", "\x00\x7f"]
    texts += (made / "chats.jsonl").read_text(encoding="utf-8").splitlines()[:20]
    for text in texts:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_digits_are_single_tokens_as_in_qwen3(tokenizer: Any) -> None:
    assert tokenizer.tokenize("1234") == ["1", "2", "3", "4"]


def test_the_model_has_about_five_million_parameters_and_starts_at_chance(
    made: Path, tokenizer: Any
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(made / "model", dtype=torch.float32)
    assert 4e6 < model.num_parameters() < 6e6
    assert model.config.vocab_size >= len(tokenizer)
    ids = torch.tensor([tokenizer.encode("What is the capital of Peru? The capital is Lima.")])
    loss = model(input_ids=ids, labels=ids).loss.item()
    assert abs(loss - math.log(model.config.vocab_size)) < 0.7
    config = json.loads((made / "model" / "config.json").read_text())
    assert (config["model_type"], config["dtype"]) == ("qwen3", "bfloat16")
    assert config["eos_token_id"] == tokenizer.eos_token_id


def test_the_same_chats_and_seed_give_the_same_files(made: Path) -> None:
    again = made / "again"
    chats = made / "chats.jsonl"
    assert run("make_tiny_model.py", "--chats", str(chats), "--out", str(again)).returncode == 0
    for name in ("tokenizer.json", "model.safetensors", "config.json"):
        assert (again / name).read_bytes() == (made / "model" / name).read_bytes()


def test_an_existing_directory_is_refused_in_one_line(made: Path) -> None:
    done = run(
        "make_tiny_model.py", "--chats", str(made / "chats.jsonl"), "--out", str(made / "model")
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].endswith("exists: remove it or name another directory")

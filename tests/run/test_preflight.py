"""`--dry-run` refuses what a run would refuse once it looks into the files."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import harness
import numpy as np
import pytest

from ds_sft import cli


@pytest.fixture
def place(tmp_path: Path, tiny_model: Path, tiny_data: Path) -> Path:
    shutil.copytree(tiny_model, tmp_path / "model")
    harness.with_validation(tiny_data, tmp_path / "data", [0, 1])
    return tmp_path


def dry_run(place: Path, **changes: object) -> None:
    words = {f"--{name.replace('_', '-')}": value for name, value in changes.items()}
    flags = harness.flags(place / "model", place / "data", place / "run", words)
    cli.main(["train", *map(str, flags), "--dry-run"])


def change_a_token(place: Path) -> None:
    tokens = np.load(place / "data/tokens.npy", mmap_mode="r+")
    tokens[3, 2] += 1
    tokens.flush()


def change_the_validation(place: Path) -> None:
    harness.flip_a_bit(place / "data/validation/assistant_mask.npy")


def gaps_in_the_tokenizer(place: Path) -> None:
    for path in (place / "model/tokenizer.json", place / "data/tokenizer/tokenizer.json"):
        value = json.loads(path.read_text())
        value["added_tokens"][-1]["id"] += 50
        path.write_text(json.dumps(value))
    manifest = place / "data/manifest.json"
    manifest.write_text('{"max_seq_len": 64}')  # as the first trainer wrote it: no hashes
    shutil.rmtree(place / "data/validation")


def test_what_can_be_trained_passes_with_a_line_for_each_look(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(place)
    out = capsys.readouterr().out
    assert f"[preflight] {place / 'data'}: sha256 of " in out
    assert "token ids of all 28 packs\n" in out
    assert f"[preflight] {place / 'data/validation'}: sha256 of " in out
    assert "[preflight] exports: tokenizer and template" in out
    assert "[preflight] not checked: kernels" in out
    assert out.endswith("[preflight] passed\n")
    assert not (place / "run").exists()


@pytest.mark.parametrize(
    ("spoil", "flags", "message"),
    [
        (change_a_token, {}, "tokens.npy is not the file that prepare wrote"),
        (change_the_validation, {}, "assistant_mask.npy"),
        (gaps_in_the_tokenizer, {}, "has gaps in its ids"),
        (lambda place: None, {"out": None}, "--out is missing"),
    ],
)
def test_what_a_run_would_refuse_is_one_line_and_exit_code_2(
    spoil: Callable[[Path], None],
    flags: dict[str, object],
    message: str,
    place: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    spoil(place)
    with pytest.raises(SystemExit) as ended:
        dry_run(place, **flags)
    assert ended.value.code == 2
    said = capsys.readouterr()
    assert message in said.err
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert "passed" not in said.out

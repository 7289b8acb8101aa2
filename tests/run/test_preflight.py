"""`--dry-run` refuses what a run would refuse once it looks into the files."""

from __future__ import annotations

import json
import os
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


def hand_made(name: str, row: int, column: int, value: int) -> Callable[[Path], None]:
    """Data of a tool that wrote no hashes, with one value changed."""

    def spoil(place: Path) -> None:
        array = np.load(place / f"data/{name}.npy", mmap_mode="r+")
        array.reshape(len(array), -1)[row, column] = value
        array.flush()
        (place / "data/manifest.json").write_text('{"max_seq_len": 64}')
        shutil.rmtree(place / "data/validation")

    return spoil


def not_a_tokenizer(text: str) -> Callable[[Path], None]:
    def spoil(place: Path) -> None:
        for directory in ("model", "data/tokenizer"):
            (place / directory / "tokenizer.json").write_text(text)

    return spoil


def listing(place: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.stat().st_mtime_ns) for path in place.rglob("*"))


def test_nothing_changes_where_a_run_is_already(place: Path) -> None:
    (place / "run/checkpoints").mkdir(parents=True)
    (place / "run/metrics.jsonl").write_text('{"label": 0}\n')
    before = listing(place)
    dry_run(place)
    assert listing(place) == before


def test_documents_that_train_nothing_are_counted(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lengths = np.load(place / "data/doc_lens.npy")
    mask = np.load(place / "data/assistant_mask.npy", mmap_mode="r+")
    counts = np.load(place / "data/assistant_counts.npy", mmap_mode="r+")
    mask[0, : lengths[0]] = 0
    counts[0] = np.count_nonzero(mask[0, 1:])
    for array in (mask, counts):
        array.flush()
    (place / "data/manifest.json").write_text('{"max_seq_len": 64}')
    shutil.rmtree(place / "data/validation")
    rows = zip(mask, np.split(lengths, np.load(place / "data/pack_offsets.npy")[1:-1]), strict=True)
    documents = [d for row, own in rows for d in np.split(row, np.cumsum(own))[:-1]]
    untrained = sum(not document.any() for document in documents)
    assert untrained == 7
    dry_run(place)
    assert f"{untrained} of 58 documents have no trained token" in capsys.readouterr().out


def test_what_can_be_trained_passes_with_a_line_for_each_look(
    place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dry_run(place)
    out = capsys.readouterr().out
    assert f"[preflight] {place / 'data'}: sha256 of " in out
    assert "token ids, masks and counts of all 28 packs; 6 of 58 documents have no" in out
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
        (hand_made("assistant_mask", 3, 2, 7), {}, "values other than 0 and 1"),
        (hand_made("assistant_counts", 4, 0, 99), {}, "assistant_counts.npy says 99"),
        (hand_made("tokens", 5, 1, 512), {}, "token id 512"),
        (hand_made("tokens", 5, 1, -1), {}, "token id -1"),
        (hand_made("tokens", 2, 63, 9), {}, "has tokens after its"),
        (hand_made("doc_lens", 0, 0, -3), {}, "a document of -3 tokens"),
        (hand_made("pack_offsets", 1, 0, 99), {}, "does not run from 0"),
        (not_a_tokenizer("{}"), {}, "tokenizer.json is not a tokenizer"),
        (not_a_tokenizer('{"model": 3}'), {}, "tokenizer.json is not a tokenizer"),
        (
            lambda place: os.truncate(place / "data/tokens.npy", 900),
            {},
            "tokens.npy cannot be read",
        ),
        (
            lambda place: os.truncate(place / "model/model.safetensors", 50_000),
            {},
            "has 50000 bytes",
        ),
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

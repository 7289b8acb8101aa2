"""What run.json says a run was made from."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import harness
import pytest

from ds_sft.data.model_files import ModelFiles, read_model
from ds_sft.data.packed import PackedDataset
from ds_sft.run import provenance, seal
from ds_sft.run.provenance import base_checkpoint, record


@pytest.fixture
def model(tiny_model: Path, tmp_path: Path) -> ModelFiles:
    return read_model(Path(shutil.copytree(tiny_model, tmp_path / "model")))


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_every_file_that_a_run_is_made_from_has_its_hash(
    model: ModelFiles, tiny_data: Path, tmp_path: Path
) -> None:
    data = harness.with_validation(tiny_data, tmp_path / "data", [0])
    tokenizer = data / "tokenizer"
    said = record(PackedDataset.open(data), model, tokenizer, {})
    assert json.loads(json.dumps(said)) == said
    for name in ("tokens.npy", "assistant_mask.npy", "doc_lens.npy", "pack_offsets.npy"):
        assert said["data"]["files_sha256"][name] == digest(data / name)
        assert name in said["validation"]["files_sha256"]
    assert said["data"]["manifest_sha256"] == PackedDataset.open(data).manifest_sha256
    names = {p.name for p in tokenizer.iterdir()}
    assert said["tokenizer"]["files_sha256"] == {n: digest(tokenizer / n) for n in names}
    template = digest(tokenizer / "chat_template.jinja")
    assert said["tokenizer"]["chat_template_sha256"] == template
    base = said["base_checkpoint"]
    assert base["how"] == "sha256 of every file"
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert base["files_sha256"][name] == digest(model.directory / name)
        assert base["files"][name]["bytes"] == (model.directory / name).stat().st_size


def test_data_without_hashes_is_hashed(model: ModelFiles, tiny_data: Path, tmp_path: Path) -> None:
    data = Path(shutil.copytree(tiny_data, tmp_path / "data"))
    (data / "manifest.json").write_text('{"max_seq_len": 64}')
    said = record(PackedDataset.open(data), model, data / "tokenizer", {})
    assert said["data"]["files_sha256"]["tokens.npy"] == digest(data / "tokens.npy")
    assert said["validation"] is None


def test_of_a_large_checkpoint_the_weights_are_named_by_size(model: ModelFiles) -> None:
    said = base_checkpoint(model, largest=10)
    assert said["how"] == "sha256 of the small files, sizes of all"
    assert "model.safetensors" not in said["files_sha256"]
    assert "model.safetensors" in said["files"]
    assert "config.json" in said["files_sha256"]


def test_a_restart_reads_only_what_changed(
    model: ModelFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = json.loads(json.dumps(base_checkpoint(model)))
    read: list[Path] = []
    real = seal.sha256

    def spy(path: Path) -> str:
        read.append(path)
        return real(path)

    monkeypatch.setattr(provenance.seal, "sha256", spy)
    assert base_checkpoint(model, first) == first
    assert read == []
    harness.flip_a_bit(model.directory / "model.safetensors")
    second = base_checkpoint(model, first)
    assert second["files_sha256"]["model.safetensors"] != first["files_sha256"]["model.safetensors"]


@pytest.mark.parametrize("before", [None, {}, [], "x", {"path": 3}])
def test_a_record_that_says_nothing_is_no_reason_to_fail(model: ModelFiles, before: Any) -> None:
    assert base_checkpoint(model, before)["files_sha256"]

"""Each test takes something whole, spoils one thing, and expects to read which."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.data.sealed import KEY, sealed_json
from ds_sft.errors import CheckpointError, DataError
from ds_sft.run.export import seal_export
from ds_sft.run.hf_format import write_tokenizer
from ds_sft.run.seal import names_in, seal
from ds_sft.run.verify import verify

TOKENIZER = Path(__file__).resolve().parents[1] / "golden" / "tiny_tokenizer"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 261,
    "hidden_size": 8,
    "intermediate_size": 12,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 4,
}
NORM = "model.norm.weight"


# ---- exports: written by Transformers itself, not by the code under test elsewhere -------------


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> dict[bool, Path]:
    """{sharded?: a directory as save_pretrained writes it}; one untied in one file, one tied."""
    made = {}
    for sharded in (False, True):
        folder = tmp_path_factory.mktemp("export") / "step-3"
        config = AutoConfig.for_model("qwen3", **CONFIG, tie_word_embeddings=sharded)
        model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
        model.save_pretrained(folder, max_shard_size="2KB" if sharded else "1GB")
        (folder / "generation_config.json").unlink(missing_ok=True)
        write_tokenizer(TOKENIZER, folder, CONFIG["vocab_size"])
        made[sharded] = folder
    return made


@pytest.fixture
def export(exports: dict[bool, Path], tmp_path: Path) -> Path:
    return shutil.copytree(exports[False], tmp_path / "step-3")


@pytest.fixture
def sharded(exports: dict[bool, Path], tmp_path: Path) -> Path:
    return shutil.copytree(exports[True], tmp_path / "sharded")


def edit_json(file: Path, **changes: object) -> None:
    """Change members, and hide that from the hash that the file carries of itself."""
    value = json.loads(file.read_text())
    value.pop(KEY, None)
    file.write_text(json.dumps(value | changes))


def edit_weights(folder: Path, change, metadata: dict[str, str] | None = None) -> None:
    file = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file, metadata=metadata or {"format": "pt"})


def test_what_transformers_saves_is_whole(export: Path, sharded: Path) -> None:
    assert "tie_word_embeddings=false is true" in verify(export)
    lines = verify(sharded)
    assert "tie_word_embeddings=true is true" in lines
    assert any(line.startswith("index of") for line in lines)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(NORM), rf"lacks {NORM} \(1 tensors"),
        (lambda t: t.update(extra=torch.zeros(2)), "holds extra, which the model has not"),
        (lambda t: t.update({NORM: torch.ones(9).bfloat16()}), r"is \(9,\), the model needs"),
        (lambda t: t.update({NORM: torch.ones(0).bfloat16()}), r"is \(0,\), the model needs"),
        (lambda t: t.update({NORM: torch.ones(8)}), r"is torch\.float32, config\.json says bf"),
        (lambda t: t[NORM].fill_(torch.nan), f"{NORM} holds values that are not finite"),
        (lambda t: t[NORM][3:4].fill_(-torch.inf), f"{NORM} holds values that are not finite"),
        (lambda t: t.pop("lm_head.weight"), r"holds no lm_head\.weight but tie_word_.*=false"),
    ],
)
def test_a_spoilt_tensor_is_named(export: Path, change, message: str) -> None:
    edit_weights(export, change)
    with pytest.raises(CheckpointError, match=message):
        verify(export)


def test_a_tie_flag_that_is_wrong_is_found(export: Path) -> None:
    edit_json(export / "config.json", tie_word_embeddings=True)
    with pytest.raises(CheckpointError, match=r"holds an lm_head\.weight but .*=true"):
        verify(export)


def test_weights_without_the_pt_mark_are_refused(export: Path) -> None:
    edit_weights(export, lambda t: None, metadata={"made": "by hand"})
    with pytest.raises(CheckpointError, match="format=pt"):
        verify(export)


@pytest.mark.parametrize("special", [True, False])
def test_only_a_special_token_may_have_no_row(export: Path, special: bool) -> None:
    path = export / "tokenizer.json"
    content = json.loads(path.read_text())
    last = content["added_tokens"][-1]
    content["added_tokens"].append({**last, "id": 261, "content": "<image>", "special": special})
    path.write_text(json.dumps(content))
    if special:
        assert verify(export)
    else:
        with pytest.raises(CheckpointError, match="has 262 tokens, the model has 261 rows"):
            verify(export)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda e: (e / "config.json").unlink(), r"config\.json is missing"),
        (lambda e: (e / "config.json").write_text("{"), "cannot be read as JSON"),
        (lambda e: edit_json(e / "config.json", model_type="no_such"), "makes no model"),
        (lambda e: edit_json(e / "config.json", dtype="float32"), r"float16, config\.json says"),
        (
            lambda e: edit_json(e / "config.json", torch_dtype="float32"),
            "dtype=bfloat16 and torch_dtype=float32",
        ),
        (lambda e: edit_json(e / "config.json", dtype=None), "states no dtype"),
        (lambda e: (e / "model.safetensors").unlink(), r"has no \*\.safetensors"),
        (lambda e: (e / "pytorch_model.bin").write_bytes(b"x"), "pytorch_model.bin is a weight"),
        (
            lambda e: shutil.copy(e / "model.safetensors", e / "old.safetensors"),
            r"index\.json is missing for 2",
        ),
        (lambda e: (e / "tokenizer.json").write_text("{}"), "tokenizer in .* cannot be loaded"),
        (lambda e: (e / "tokenizer.json").unlink(), r"tokenizer\.json is missing"),
        (lambda e: (e / "chat_template.jinja").unlink(), "no chat template"),
        (
            lambda e: shutil.copy(TOKENIZER / "tokenizer.json", e / "tokenizer.json"),
            "has 259 tokens, the model has 261 rows",
        ),
        (lambda e: (e / "generation_config.json").write_text(""), "generation_config.json cannot"),
    ],
)
def test_a_spoilt_file_is_named(export: Path, spoil, message: str) -> None:
    spoil(export)
    with pytest.raises(CheckpointError, match=message):
        verify(export)


def test_weights_cut_short_are_found(export: Path) -> None:
    file = export / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(CheckpointError, match=r"model\.safetensors cannot be read"):
        verify(export)


def test_a_wrong_total_in_the_index_is_found(sharded: Path) -> None:
    edit_json(sharded / "model.safetensors.index.json", metadata={"total_size": 5})
    with pytest.raises(CheckpointError, match="says total_size=5, the tensors have"):
        verify(sharded)


def test_an_index_that_points_elsewhere_is_found(sharded: Path) -> None:
    file = sharded / "model.safetensors.index.json"
    places = json.loads(file.read_text())["weight_map"]
    names = list(places)
    places[names[0]], places[names[-1]] = places[names[-1]], places[names[0]]
    edit_json(file, weight_map=places)
    with pytest.raises(CheckpointError, match="places tensors where they are not"):
        verify(sharded)


@pytest.mark.parametrize("missing", [True, False])
def test_a_file_that_the_index_does_not_match_is_named(sharded: Path, missing: bool) -> None:
    if missing:
        sorted(sharded.glob("*.safetensors"))[1].unlink()
    else:
        shutil.copy(next(sharded.glob("*.safetensors")), sharded / "model-x.safetensors")
    name = "model-00002" if missing else "model-x"
    with pytest.raises(CheckpointError, match=f"{name}.*differ about this file"):
        verify(sharded)


# ---- packed data ------------------------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    out = tmp_path / "data"
    with PackedWriter(out, max_seq_len=8) as writer:
        for lengths in ([3, 4], [5]):
            used = sum(lengths)
            tokens = np.arange(1, used + 1, dtype=np.int32)
            writer.add_pack(tokens, (tokens % 2).astype(np.uint8), lengths)
        shutil.copytree(TOKENIZER, writer.tokenizer_dir)
        writer.commit({})
    return out


def edit_array(folder: Path, name: str, index: object, value: int, rehash: bool = True) -> None:
    """Change one element; with `rehash`, hide it from the hashes."""
    array = np.load(folder / f"{name}.npy")
    array[index] = value
    np.save(folder / f"{name}.npy", array)
    if rehash:
        edit_json(folder / "manifest.json", sha256={})


def test_a_fresh_data_set_is_whole(data: Path) -> None:
    lines = verify(data)
    assert f"sha256 of {5 + len(list((data / 'tokenizer').iterdir()))} files" in lines
    assert "manifest.json is as it was written" in lines
    assert any("trained targets counted again: 5 " in line for line in lines)


def test_a_data_set_of_the_first_trainer_is_whole_with_notes(data: Path) -> None:
    (data / "manifest.json").write_text('{"max_seq_len": 8}')
    shutil.rmtree(data / "tokenizer")
    notes = [line for line in verify(data) if line.startswith("note:")]
    assert len(notes) == 3
    assert "manifest.json carries no sha256 of itself" in notes[0]


def test_one_changed_token_is_found_by_its_hash(data: Path) -> None:
    edit_array(data, "tokens", (1, 2), 7, rehash=False)
    with pytest.raises(DataError, match=r"tokens\.npy is not the file that prepare wrote"):
        verify(data)


@pytest.mark.parametrize(
    ("name", "index", "value", "message"),
    [
        ("tokens", (1, 6), 9, "pack 1 has tokens after its 5 tokens"),
        ("assistant_mask", (1, 7), 1, "pack 1 has tokens after its 5 tokens"),
        ("tokens", (0, 1), -4, "pack 0 holds a negative token id"),
        ("tokens", (0, 1), 259, "token id 259 but its tokenizer has 259 tokens"),
        ("assistant_mask", (0, 1), 2, "values other than 0 and 1"),
        ("assistant_mask", (0, 1), 1, r"pack 0 has 4 trained targets, .* says 3"),
        ("assistant_counts", 1, 3, r"pack 1 has 2 trained targets, .* says 3"),
        ("pack_offsets", 1, 3, "doc_lens.npy puts 12 tokens into a pack of 8"),
    ],
)
def test_arrays_that_contradict_each_other_are_found(
    data: Path, name: str, index: object, value: int, message: str
) -> None:
    edit_array(data, name, index, value)
    with pytest.raises(DataError, match=message):
        verify(data)


@pytest.mark.parametrize("hidden", [False, True])
def test_a_broken_tokenizer_of_the_data_is_found(data: Path, hidden: bool) -> None:
    (data / "tokenizer" / "tokenizer.json").write_text("{}")
    if hidden:
        edit_json(data / "manifest.json", sha256={})
    words = "cannot be read" if hidden else "is not the file that prepare wrote"
    with pytest.raises(DataError, match=rf"tokenizer\.json {words}"):
        verify(data)


# ---- native checkpoints -----------------------------------------------------------------------


@pytest.fixture
def native(tmp_path: Path) -> Path:
    """A checkpoint of two ranks and one parameter of 7 values."""
    path = tmp_path / "step-4"
    (path / "model").mkdir(parents=True)
    for rank in range(2):
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        flat = [torch.arange(4.0) + 4 * rank]
        optim = {"optimizer_state_dict": {"fp32_flat_groups": flat}}
        torch.save(optim, path / f"bf16_{prefix}_optim_states.pt")
        model = {"param_shapes": [{"w": torch.Size([7])}], "module": {}, "buffer_names": []}
        torch.save(model, path / f"{prefix}_model_states.pt")
    shutil.copytree(TOKENIZER, path / "model" / "tokenizer")
    (path / "model" / "config.json").write_text(json.dumps(CONFIG))
    meta = {"format": 1, "label": 4, "completed": 5, "world_size": 2}
    (path / "meta.json").write_text(json.dumps(meta))
    return path


def test_a_checkpoint_with_every_rank_is_whole(native: Path) -> None:
    lines = verify(native)
    assert lines[0] == "native checkpoint of label 4, 5 completed steps"
    assert "files of 2 ranks: all there, all readable" in lines


def test_what_the_marker_does_not_vouch_for_is_said(native: Path) -> None:
    lines = verify(native)
    assert "note: meta.json carries no sha256 of itself: it cannot be checked" in lines
    [note] = [line for line in lines if "not listed in meta.json, so they cannot be" in line]
    assert "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt" in note
    meta = json.loads((native / "meta.json").read_text())
    files = seal(native, [name for name in names_in(native) if name != "meta.json"])
    (native / "meta.json").write_text(sealed_json({**meta, "files": files}))
    lines = verify(native)
    assert not any(line.startswith("note:") for line in lines)
    assert f"{len(files)} files have the size and the sha256 that were written" in lines
    (native / "model/extra").write_text("")
    assert "note: not listed in meta.json, so they cannot be checked: model/extra" in verify(native)


def optim_file(native: Path) -> Path:
    return native / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"


def test_the_padding_of_the_last_rank_may_hold_anything(native: Path) -> None:
    """DeepSpeed never writes it: it holds what the memory held before, at times a NaN."""
    flat = [torch.tensor([4.0, 5.0, 6.0, torch.nan])]  # 7 values on 2 ranks
    torch.save({"optimizer_state_dict": {"fp32_flat_groups": flat}}, optim_file(native))
    assert any("7 fp32 master values" in line for line in verify(native))


def poison(native: Path) -> None:
    flat = [torch.tensor([1.0, torch.nan, 2.0, 3.0])]
    torch.save({"optimizer_state_dict": {"fp32_flat_groups": flat}}, optim_file(native))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda n: optim_file(n).unlink(), r"ranks \[0\] .*world_size=2"),
        (lambda n: optim_file(n).write_bytes(b"PK"), "rank_1.*cannot be read"),
        (poison, "the master of w is not finite"),
        (lambda n: (n / "meta.json").unlink(), "not written to its end"),
        (lambda n: edit_json(n / "meta.json", world_size=1), r"ranks \[0, 1\] .*world_size=1"),
        (lambda n: edit_json(n / "meta.json", completed=4), "completed must be label"),
        (
            lambda n: (n / "zero_pp_rank_1_mp_rank_00_model_states.pt").write_bytes(b""),
            "rank_1_mp_rank_00_model_states.pt cannot be read",
        ),
        (lambda n: (n / "model" / "config.json").unlink(), r"config\.json is missing"),
        (lambda n: shutil.rmtree(n / "model" / "tokenizer"), r"tokenizer\.json is missing"),
    ],
)
def test_a_spoilt_checkpoint_is_named(native: Path, spoil, message: str) -> None:
    spoil(native)
    with pytest.raises(CheckpointError, match=message):
        verify(native)


# ---- what a path is ---------------------------------------------------------------------------


def test_a_partial_is_refused_as_such(export: Path) -> None:
    partial = export.rename(export.with_name("step-3.partial"))
    with pytest.raises(CheckpointError, match="rest of a write that did not end"):
        verify(partial)


def test_a_run_directory_is_checked_with_its_parts(
    tmp_path: Path, export: Path, native: Path
) -> None:
    run = tmp_path / "run"
    (run / "hf").mkdir(parents=True)
    (run / "checkpoints").mkdir()
    seal_export(export)
    export.rename(run / "hf/step-3")
    native.rename(run / "checkpoints/step-4")
    with pytest.raises(CheckpointError, match=r"run\.json is missing"):
        verify(run)
    (run / "run.json").write_text(sealed_json({"world_size": 2}))
    lines = verify(run)
    assert lines[0] == "run.json is as it was written"
    assert "checkpoints/step-4: native checkpoint of label 4, 5 completed steps" in lines
    assert "hf/step-3: tie_word_embeddings=false is true" in lines
    (run / "hf/step-3/tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match=r"hf/step-3/tokenizer\.json is missing"):
        verify(run)


@pytest.mark.parametrize("name", ["empty", "absent"])
def test_anything_else_is_refused_with_what_is_known(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match=r"neither a packed|is not a directory"):
        verify(tmp_path / name)


def test_verifying_data_leaves_it_openable(data: Path) -> None:
    verify(data)
    assert PackedDataset.open(data).num_packs == 2

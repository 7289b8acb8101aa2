"""Exports by real launches, against DeepSpeed's own consolidation and plain Transformers.

The tests of the native reader at the top need no launch: they cut known tensors by hand.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from export_worker import ROOT, TINY, TOKENIZER, AnonymousPeak, launch
from safetensors.torch import load_file

from ds_sft.errors import CheckpointError
from ds_sft.run.export import export_offline
from ds_sft.run.native import NativeCheckpoint
from ds_sft.run.verify import verify

DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32, "float16": torch.float16}
SHARD_BYTES = 20_000


def same_files(one: Path, two: Path) -> bool:
    names = [sorted(p.name for p in folder.iterdir()) for folder in (one, two)]
    return names[0] == names[1] and all(
        (one / name).read_bytes() == (two / name).read_bytes() for name in names[0]
    )


def weights(folder: Path) -> dict[str, torch.Tensor]:
    read: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        read |= load_file(file)
    return read


# ---- the native reader, on checkpoints cut by hand --------------------------------------------


def cut_by_hand(
    path: Path, tensors: dict[str, torch.Tensor], world_size: int, groups: list[list[str]]
) -> None:
    """Write what DeepSpeed would write for `tensors` in these sub-groups."""
    path.mkdir()
    for rank in range(world_size):
        flat = []
        for names in groups:
            parts = []
            for name in names:
                part = math.ceil(tensors[name].numel() / world_size)
                padded = torch.full((part * world_size,), 7.0)
                padded[: tensors[name].numel()] = tensors[name].reshape(-1)
                parts.append(padded[rank * part : (rank + 1) * part])
            flat.append(torch.cat(parts))
        prefix = f"zero_pp_rank_{rank}_mp_rank_00"
        optim = {"optimizer_state_dict": {"fp32_flat_groups": flat}}
        torch.save(optim, path / f"bf16_{prefix}_optim_states.pt")
        shapes = [{name: tensors[name].shape for name in names} for names in groups]
        model = {"param_shapes": shapes, "module": {}, "buffer_names": []}
        torch.save(model, path / f"{prefix}_model_states.pt")
    meta = {"format": 1, "label": 4, "completed": 5, "world_size": world_size}
    (path / "meta.json").write_text(json.dumps(meta))


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    shapes = {"a": (7, 3), "b": (1,), "c": (2,), "d": (5, 5), "e": (12,)}
    generator = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 11])
def test_parameters_come_back_from_any_number_of_ranks_and_groups(
    tmp_path: Path, tensors: dict[str, torch.Tensor], world_size: int
) -> None:
    for i, groups in enumerate([[["d", "a"], ["b"], ["c", "e"]], [["a", "b", "c", "d", "e"]]]):
        cut_by_hand(tmp_path / str(i), tensors, world_size, groups)
        native = NativeCheckpoint.open(tmp_path / str(i))
        assert native.world_size == world_size
        for name, value in tensors.items():
            assert torch.equal(torch.cat(list(native.pieces(name))), value.reshape(-1)), name


def test_a_rank_that_is_missing_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    cut_by_hand(tmp_path / "c", tensors, 3, [list(tensors)])
    (tmp_path / "c" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt").unlink()
    with pytest.raises(CheckpointError, match=r"ranks \[0, 2\] .*world_size=3"):
        NativeCheckpoint.open(tmp_path / "c")


def test_a_file_cut_short_is_named(tmp_path: Path, tensors: dict[str, torch.Tensor]) -> None:
    cut_by_hand(tmp_path / "c", tensors, 2, [list(tensors)])
    file = tmp_path / "c" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    file.write_bytes(file.read_bytes()[:-200])
    with pytest.raises(CheckpointError, match=r"rank_1_mp_rank_00_optim_states\.pt cannot be read"):
        NativeCheckpoint.open(tmp_path / "c")


def test_masters_of_another_model_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    cut_by_hand(tmp_path / "c", tensors, 2, [list(tensors)])
    model = tmp_path / "c" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    states = torch.load(model, weights_only=True)
    states["param_shapes"][0]["a"] = torch.Size([7, 4])
    torch.save(states, model)
    with pytest.raises(CheckpointError, match="holds 32 master values of rank 0, the parameters"):
        NativeCheckpoint.open(tmp_path / "c")


def test_a_checkpoint_from_elsewhere_cannot_run_code(
    tmp_path: Path, tensors: dict[str, torch.Tensor]
) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return os.mkdir, (str(tmp_path / "ran"),)

    cut_by_hand(tmp_path / "c", tensors, 1, [list(tensors)])
    file = tmp_path / "c" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    torch.save({"optimizer_state_dict": Trap()}, file)
    with pytest.raises(CheckpointError, match="which could run code: it is not opened"):
        NativeCheckpoint.open(tmp_path / "c")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda c: (c / "meta.json").unlink(), "not written to its end"),
        (lambda c: (c / "meta.json").write_text('{"format": 9}'), "has format 9"),
        (
            lambda c: (c / "meta.json").write_text('{"format": 1, "completed": 1}'),
            "no valid world_size",
        ),
    ],
)
def test_a_bad_marker_is_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], spoil, message: str
) -> None:
    cut_by_hand(tmp_path / "c", tensors, 1, [list(tensors)])
    spoil(tmp_path / "c")
    with pytest.raises(CheckpointError, match=message):
        export_offline(
            tmp_path / "c", tmp_path / "out", dtype="float32", keep_generation_config=False
        )
    assert not (tmp_path / "out").exists()


def test_an_output_that_exists_is_left_alone(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="exists: remove it or name another --out"):
        export_offline(tmp_path / "c", tmp_path, dtype="float32", keep_generation_config=False)


def test_help_of_the_script_needs_no_torch() -> None:
    code = (
        "import sys; sys.argv = ['export_hf.py', '--help']\n"
        "import runpy\n"
        "try: runpy.run_path('scripts/export_hf.py', run_name='__main__')\n"
        "except SystemExit: pass\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--keep-generation-config" in done.stdout


@pytest.mark.slow
def test_the_script_reports_an_error_as_one_line_and_exits_2(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/export_hf.py", "--checkpoint", str(tmp_path / "step-9")]
    command += ["--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path}/step-9 is not a directory")
    assert "Traceback" not in done.stderr


# ---- real launches ----------------------------------------------------------------------------

CASES = {
    "1 rank, tied, bf16": {"world": 1, "tied": True, "compute": "bfloat16"},
    "2 ranks, untied, bf16, offload": {
        "world": 2,
        "tied": False,
        "compute": "bfloat16",
        "offload": True,
    },
    "2 ranks, untied, fp32": {"world": 2, "tied": False, "compute": "float32"},
    "3 ranks, tied, bf16": {"world": 3, "tied": True, "compute": "bfloat16", "persistence": 0},
}


@pytest.fixture(scope="module", params=list(CASES))
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict:
    """Launch training with exports; return its directory and how it was made."""
    case = dict(CASES[request.param])
    out = tmp_path_factory.mktemp("run") / "out"
    case["config"] = TINY | {"tie_word_embeddings": case.pop("tied")}
    case |= {"tokenizer": TOKENIZER, "max_shard_bytes": SHARD_BYTES, "out": out}
    launch("roundtrip", case.pop("world"), **case)
    return case


@pytest.mark.slow
def test_live_offline_and_deepspeeds_consolidation_are_the_same(run: dict) -> None:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    native = run["out"] / "native"
    reference = get_fp32_state_dict_from_zero_checkpoint(str(native), tag="step-1")
    if run["config"]["tie_word_embeddings"]:
        assert torch.equal(reference["lm_head.weight"], reference["model.embed_tokens.weight"])
        reference = {k: v for k, v in reference.items() if k != "lm_head.weight"}
    for name, dtype in DTYPES.items():
        live, offline = run["out"] / f"live-{name}", run["out"] / f"offline-{name}"
        export_offline(
            native / "step-1",
            offline,
            dtype=name,
            keep_generation_config=False,
            max_shard_bytes=SHARD_BYTES,
        )
        assert same_files(live, offline)
        read = weights(live)
        assert read.keys() == reference.keys()
        for key, value in reference.items():
            assert torch.equal(read[key], value.to(dtype)), (name, key)


@pytest.mark.slow
def test_transformers_loads_it_and_computes_the_engines_logits(run: dict) -> None:
    from transformers import AutoModelForCausalLM

    dtype = run["compute"]
    model, info = AutoModelForCausalLM.from_pretrained(
        run["out"] / f"live-{dtype}", dtype="auto", output_loading_info=True
    )
    assert not any(info.values()), info
    assert model.dtype == DTYPES[dtype]
    tied = run["config"]["tie_word_embeddings"]
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    with torch.no_grad():
        logits = model(torch.arange(40).view(1, -1)).logits.float()
    engine = torch.load(run["out"] / "engine.pt")
    assert torch.equal(logits, engine["logits"])


@pytest.mark.slow
def test_verify_finds_exports_and_checkpoint_whole(run: dict) -> None:
    for name in DTYPES:
        assert any("finite" in line for line in verify(run["out"] / f"live-{name}"))
    assert any("label 1" in line for line in verify(run["out"] / "native" / "step-1"))


@pytest.mark.slow
def test_the_source_config_is_kept_but_for_its_dtype(run: dict) -> None:
    config = json.loads((run["out"] / "live-float16" / "config.json").read_text())
    assert config == run["config"] | {"dtype": "float16", "torch_dtype": "float16"}


@pytest.mark.slow
@pytest.mark.parametrize("run", ["2 ranks, untied, bf16, offload"], indirect=True)
def test_exports_do_not_change_what_training_computes(run: dict, tmp_path: Path) -> None:
    launch("roundtrip", 2, **run | {"out": tmp_path, "no_export": True})
    without, with_exports = (torch.load(p / "engine.pt") for p in (tmp_path, run["out"]))
    assert without["losses"] == with_exports["losses"]
    assert torch.equal(without["logits"], with_exports["logits"])


@pytest.mark.slow
def test_a_failure_of_rank_zero_is_the_same_error_on_all_ranks(tmp_path: Path) -> None:
    launch(
        "failures",
        2,
        out=tmp_path,
        config=TINY | {"tie_word_embeddings": False},
        compute="bfloat16",
        tokenizer=TOKENIZER,
        huge="model.layers.1.mlp.up_proj.weight",
    )
    seen = [json.loads((tmp_path / f"seen-{rank}.json").read_text()) for rank in (0, 1)]
    assert seen[0][::2] == seen[1][::2]
    overflow, full, late, good = seen[0][::2]
    assert "model.layers.1.mlp.up_proj.weight holds" in overflow
    assert "float16 can hold" in overflow
    assert "No space left on device" in full
    assert "No space left on device" in late
    assert good == "written"
    # Rank 0 has cleaned up by the time it goes on; the other rank may look a little earlier.
    assert seen[0][1::2] == [[], [], [], ["good"]]
    verify(tmp_path / "good")


@pytest.mark.slow
def test_writing_longer_than_the_groups_timeout_does_not_kill_the_job(tmp_path: Path) -> None:
    spec = {
        "config": TINY | {"tie_word_embeddings": True},
        "compute": "bfloat16",
        "tokenizer": TOKENIZER,
    }
    launch("slow_writer", 2, out=tmp_path / "a", **spec)
    verify(tmp_path / "a" / "slow")
    with pytest.raises(AssertionError, match=r"(?i)timed? ?out"):  # or this test proves nothing
        launch("slow_writer", 2, out=tmp_path / "b", no_barrier=True, **spec)


def grown_tokenizer(path: Path, size: int) -> Path:
    """Copy the tiny tokenizer with a vocabulary as large as a real one's."""
    shutil.copytree(TOKENIZER, path)
    content = json.loads((path / "tokenizer.json").read_text())
    vocabulary = content["model"]["vocab"]
    taken = {token["id"] for token in content["added_tokens"]} | set(vocabulary.values())
    vocabulary |= {f"filler{i}": i for i in range(size) if i not in taken}
    (path / "tokenizer.json").write_text(json.dumps(content))
    return path


@pytest.mark.slow
def test_memory_stays_within_the_bounds_for_a_model_of_half_a_gigabyte(tmp_path: Path) -> None:
    config = TINY | {
        "tie_word_embeddings": True,
        "vocab_size": 90001,
        "hidden_size": 768,
        "intermediate_size": 4096,
        "num_hidden_layers": 18,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 64,
    }
    launch(
        "memory",
        2,
        timeout_s=500,
        out=tmp_path,
        config=config,
        compute="bfloat16",
        tokenizer=grown_tokenizer(tmp_path / "tokenizer", 90001 - 267),
        max_shard_bytes=200_000_000,
        sub_group_size=100_000_000,
        persistence=10_000,
        zero_init=True,
    )
    size = sum(f.stat().st_size for f in (tmp_path / "live-bfloat16").glob("*.safetensors"))
    assert size >= 500_000_000
    twice_the_largest = 2 * 90001 * 768 * 4 / 1e6
    peaks = [json.loads((tmp_path / f"peak-{rank}.json").read_text()) for rank in (0, 1)]
    print(peaks)
    for dtype in ("float32", "bfloat16"):
        # No shard is held; the rest is what padding the tokenizer leaves with the allocator.
        assert peaks[0][dtype]["mb"] < twice_the_largest + 60
        assert peaks[1][dtype]["mb"] < twice_the_largest + 10
    with AnonymousPeak() as peak:
        export_offline(
            tmp_path / "native" / "step-1",
            tmp_path / "offline",
            dtype="bfloat16",
            keep_generation_config=False,
            max_shard_bytes=200_000_000,
        )
    print(f"offline: {peak.over_start / 1e6} MB in {peak.seconds} s")
    assert peak.over_start / 1e6 < 110
    assert same_files(tmp_path / "live-bfloat16", tmp_path / "offline")

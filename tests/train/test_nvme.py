"""Optimizer state and parameters on NVMe: another JSON, the same curve, nothing lost on resume.

DeepSpeed swaps only tensors of 1 MiB and more, so the model here has a large vocabulary; each rank
swaps two embeddings and a sub-group of the rest, and keeps the norms in memory.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import harness
import numpy as np
import pytest
from harness import Result, Running, Training, launch_many

from ds_sft.run.export import export_offline
from ds_sft.run.native import MASTERS, MOMENTS, NativeCheckpoint
from ds_sft.run.verify import verify

CONFIGS = harness.ROOT / "ds_configs"
VOCABULARY = 16384
KEPT = {"--hf-export-dtype": "float32", "--keep-checkpoints": 0}


@pytest.fixture(scope="module")
def wide_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden tiny Qwen3 with rows for tokens that no data has."""
    import torch
    from safetensors.torch import load_file, save_file

    path = harness.copy_tiny_model(tmp_path_factory.mktemp("wide") / "model")
    tensors = load_file(path / "model.safetensors")
    torch.manual_seed(0)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        old = tensors[name]
        more = torch.randn(VOCABULARY - len(old), old.shape[1]) * 0.02
        tensors[name] = torch.cat([old, more])
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, "vocab_size": VOCABULARY}))
    return path


def small(name: str, to: Path, **changes: Any) -> Path:
    """A shipped JSON with sub-groups and buffers of this model's size, `changes` in its offload."""
    config = json.loads((CONFIGS / name).read_text())
    zero = config["zero_optimization"]
    zero["sub_group_size"] = 500_000
    zero["offload_optimizer"] |= changes
    if "offload_param" in zero:
        zero["offload_param"]["buffer_size"] = 600_000
    path = to / ("".join(changes) + name)
    path.write_text(json.dumps(config))
    return path


@pytest.fixture(scope="module")
def swap(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where all runs of this file swap to: they must not meet."""
    return tmp_path_factory.mktemp("swap")


@pytest.fixture(scope="module")
def runs(
    wide_model: Path, tiny_data: Path, swap: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Result]:
    work = tmp_path_factory.mktemp("runs")
    zero3 = CONFIGS / "zero3.json"
    cpu = small("zero3_offload_optimizer.json", work)
    optimizer = small("zero3_offload_optimizer_nvme.json", work)
    pipelined = small(
        optimizer.name, work, pipeline_read=True, pipeline_write=True, buffer_count=12
    )
    both = small("zero3_offload_nvme.json", work)
    bf16 = {"--compute-dtype": "bfloat16", "--hf-export-dtype": "bfloat16"}
    of_masters = {**bf16, "--hf-export-dtype": "float32"}
    wanted: dict[str, tuple[Path, dict[str, Any]]] = {
        "zero3": (zero3, {}),
        "cpu": (cpu, {}),
        "nvme": (optimizer, {}),
        "nvme, resumed": (pipelined, {"--resume": "nvme"}),
        "nvme, then zero3": (zero3, {"--resume": "nvme"}),
        "zero3, then nvme": (optimizer, {"--resume": "zero3"}),
        "bf16 cpu": (cpu, bf16),
        "bf16 both": (both, of_masters),
        "bf16 both, resumed": (both, {**bf16, "--resume": "bf16 both"}),
    }
    trainings = []
    for name, (config, changes) in wanted.items():
        if "--resume" in changes:
            changes["--resume"] = work / str(changes["--resume"]) / "checkpoints/step-1"
        if "nvme" in config.name:
            changes["--nvme-path"] = swap
        words = {
            **KEPT, "--num-train-steps": 3, "--steps-per-checkpoint": 1,
            "--deepspeed-config": config, **changes,
        }  # fmt: skip
        trainings.append(Training(harness.flags(wide_model, tiny_data, work / name, words)))
    results = dict(zip(wanted, launch_many(2, trainings, work), strict=True))
    for name, result in results.items():
        assert result.codes == [0, 0], f"{name}: {result.text[-3000:]}"
    return results


def state(run: Result, label: int = 2) -> NativeCheckpoint:
    return NativeCheckpoint.open(run.out / f"checkpoints/step-{label}")


def same_state(one: NativeCheckpoint, two: NativeCheckpoint) -> None:
    """Masters and both moments of every parameter, bit for bit."""
    import torch

    assert (one.adam_step, one.shapes) == (two.adam_step, two.shapes)
    for kind in (MASTERS, *MOMENTS):
        for name in one.shapes:
            got, want = (torch.cat(list(c.pieces(name, kind))) for c in (one, two))
            assert torch.equal(got, want), f"{kind} of {name}"


def same_tail(resumed: Result, straight: Result) -> None:
    for column in ("label", "loss", "lr", "grad_norm"):
        assert resumed.column(column) == straight.column(column)[-1:]


@pytest.mark.slow
def test_moments_really_are_in_swap_files(runs: dict[str, Result], swap: Path) -> None:
    """Those of the last run, whose ranks end here without their exit handlers."""
    for rank in (0, 1):
        found = [p for d in swap.glob(f"ds-sft-swap-rank{rank}-*") for p in d.rglob("*.swp")]
        sizes = {p.name: p.stat().st_size for p in found}
        part = VOCABULARY * 64 // 2
        for kind in ("exp_avg", "exp_avg_sq"):
            swapped = [size for name, size in sizes.items() if name.startswith(f"{kind}-")]
            assert sum(swapped) >= 2 * part * 4, sizes
        assert [size for name, size in sizes.items() if name.endswith("_param.tensor.swp")] == [
            part * 2,
            part * 2,
        ]


@pytest.mark.slow
def test_nvme_has_the_very_curve_of_host_memory_and_that_of_zero3(runs: dict[str, Result]) -> None:
    assert "[init] optimizer cpu_adam" in runs["nvme"].text
    for column in ("loss", "lr", "grad_norm"):
        assert runs["nvme"].column(column) == runs["cpu"].column(column)
    same_state(state(runs["nvme"]), state(runs["cpu"]))
    np.testing.assert_allclose(
        runs["nvme"].column("loss"), runs["zero3"].column("loss"), rtol=0, atol=1e-5
    )


@pytest.mark.slow
def test_parameters_on_nvme_change_nothing_either(runs: dict[str, Result]) -> None:
    """In bf16, from float32 files: the masters keep the low bits that the weights lose."""
    assert runs["bf16 both"].column("loss") == runs["bf16 cpu"].column("loss")
    same_state(state(runs["bf16 both"]), state(runs["bf16 cpu"]))
    assert "tensors of the model are float32" in runs["bf16 both"].text


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nvme", "bf16 both"])
def test_a_resume_from_swapped_state_is_bit_identical(name: str, runs: dict[str, Result]) -> None:
    resumed, straight = runs[f"{name}, resumed"], runs[name]
    assert "resumed from" in resumed.text
    same_tail(resumed, straight)
    same_state(state(resumed), state(straight))


@pytest.mark.slow
def test_a_run_moves_on_to_nvme_and_off_it(runs: dict[str, Result]) -> None:
    """Up to what the two Adams differ by; without the moments the losses would part at once."""
    for name in ("nvme, then zero3", "zero3, then nvme"):
        got, want = runs[name].column("loss"), runs["zero3"].column("loss")[-1:]
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)
        assert state(runs[name]).adam_step == 3


@pytest.mark.slow
def test_a_checkpoint_of_swapped_state_is_like_any_other(runs: dict[str, Result]) -> None:
    one, two = (runs[name].out / "checkpoints/step-2" for name in ("nvme", "cpu"))
    sizes = [{p.name: p.stat().st_size for p in d.rglob("*") if p.is_file()} for d in (one, two)]
    assert sizes[0].keys() == sizes[1].keys()
    assert all(abs(sizes[0][n] - sizes[1][n]) <= 2048 for n in sizes[0] if n != "meta.json")
    verify(one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("nvme", "float32"),
        ("nvme, resumed", "float32"),
        ("bf16 both", "float32"),
        ("bf16 both, resumed", "bfloat16"),
    ],
)
def test_live_and_offline_exports_of_swapped_state_are_the_same_bytes(
    name: str, dtype: str, runs: dict[str, Result], tmp_path: Path
) -> None:
    run = runs[name].out
    checkpoint, out = run / "checkpoints/step-2", tmp_path / "hf"
    export_offline(checkpoint, out, dtype=dtype, keep_generation_config=False)
    assert harness.same_files(out, run / "hf/step-2")


@pytest.mark.slow
def test_a_killed_run_leaves_files_that_the_next_start_removes_and_resumes_without(
    wide_model: Path, tiny_data: Path, runs: dict[str, Result], tmp_path: Path
) -> None:
    swap, out = tmp_path / "swap", tmp_path / "run"
    swap.mkdir()
    changes = {
        **KEPT, "--num-train-steps": 3, "--steps-per-checkpoint": 1, "--nvme-path": swap,
        "--deepspeed-config": small("zero3_offload_optimizer_nvme.json", tmp_path),
    }  # fmt: skip
    words = harness.flags(wide_model, tiny_data, out, changes)
    with Running(2, *words) as run:
        run.wait_for("step-1 in")
    left = {p.name for p in swap.iterdir()}
    assert len(left) == 2
    done = harness.launch(2, *words)
    assert done.returncode == 0, done.stdout[-3000:]
    assert "at step 2" in done.stdout
    assert list(swap.iterdir()) == []
    straight = runs["nvme"].out
    same_state(*(NativeCheckpoint.open(d / "checkpoints/step-2") for d in (out, straight)))


@pytest.fixture(scope="module")
def deep_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3 whose MLPs are swapped as well: 8,192 x 64 values, 1 MiB of a rank of two."""
    import torch
    from safetensors.torch import save_file

    from ds_sft.data.architectures import expected_shapes

    path = harness.copy_tiny_model(tmp_path_factory.mktemp("deep") / "model")
    config = {**json.loads((path / "config.json").read_text()), "intermediate_size": 8192}
    (path / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    shapes = expected_shapes(config, tied=False)
    tensors = {n: torch.randn(s) * 0.05 + (len(s) == 1) for n, s in shapes.items()}
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2])
def test_weights_of_layers_in_swap_files_have_the_gradients_of_weights_in_memory(
    world_size: int, deep_model: Path, tiny_data: Path, tmp_path: Path
) -> None:
    """One rank gathers nothing: what it computes with must not be a buffer that is used again."""
    trainings = []
    for name in ("zero3_offload_optimizer.json", "zero3_offload_nvme.json"):
        changes = {"--num-train-steps": 2, "--deepspeed-config": small(name, tmp_path)}
        if "nvme" in name:
            changes["--nvme-path"] = tmp_path
        trainings.append(
            Training(harness.flags(deep_model, tiny_data, tmp_path / f"out-{name}", changes))
        )
    cpu, nvme = launch_many(world_size, trainings, tmp_path)
    assert (cpu.codes, nvme.codes) == ([0] * world_size, [0] * world_size), nvme.text[-3000:]
    for column in ("loss", "grad_norm"):
        assert nvme.column(column) == cpu.column(column)

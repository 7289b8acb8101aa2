"""What `fit` predicts is what a real run holds: counted by storage in other code, within 10 %."""

from __future__ import annotations

import json
import math
from pathlib import Path

import harness
import pytest
from harness import Training, launch_many

from ds_sft.data.model_files import read_model
from ds_sft.engine import gathering, memory
from ds_sft.engine.config import engine_config
from ds_sft.engine.setup import Setup
from ds_sft.recipe.named import RECIPES

ZERO = {
    "stage": 3, "reduce_bucket_size": 20_000, "stage3_prefetch_bucket_size": 5_000,
    "stage3_param_persistence_threshold": 200, "stage3_max_live_parameters": 20_000,
    "stage3_max_reuse_distance": 0, "sub_group_size": 30_000,
}  # fmt: skip
CONFIGS = {
    "zero3": ZERO,
    # Fetches ahead and keeps: another half of the coordinator's rules.
    "ahead": {
        **ZERO,
        "stage3_prefetch_bucket_size": 30_000,
        "stage3_max_live_parameters": 80_000,
        "stage3_max_reuse_distance": 150_000,
    },
    "offload": {**ZERO, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
}
# Configuration, ranks, precision.
RUNS = [
    ("zero3", 1, "float32"),
    ("offload", 1, "bfloat16"),
    ("zero3", 2, "bfloat16"),
    ("ahead", 2, "bfloat16"),
]
PACKS, LENGTH = 4, 64


@pytest.fixture(scope="module")
def real(
    tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int, str], list[dict]]:
    """What every rank of the real runs holds, by configuration, ranks and precision."""
    work = tmp_path_factory.mktemp("memory")
    for name, zero in CONFIGS.items():
        (work / f"{name}.json").write_text(json.dumps({"zero_optimization": zero}))
    found = {}
    for world_size in (1, 2):
        names = [(name, dtype) for name, w, dtype in RUNS if w == world_size]
        trainings = [
            Training(
                harness.flags(tiny_model, tiny_data, work / f"{name}-{world_size}-{dtype}", {
                    "--deepspeed-config": work / f"{name}.json", "--compute-dtype": dtype,
                    "--per-device-batch": PACKS, "--train-batch-size": 4 * PACKS,
                    "--skip-checks": True,
                }),
                module="memory_worker",
            )
            for name, dtype in names
        ]  # fmt: skip
        for (name, dtype), run in zip(names, launch_many(world_size, trainings, work), strict=True):
            assert run.codes == [0] * world_size, run.text[-3000:]
            files = [Path(f"{run.out}.rank{rank}.json") for rank in range(world_size)]
            found[name, world_size, dtype] = [json.loads(f.read_text()) for f in files]
    return found


def predicted(model_dir: Path, name: str, world_size: int, dtype: str) -> dict[str, float]:
    import torch

    from ds_sft.model.activations import measure

    model, recipe = read_model(model_dir), RECIPES["qwen3-8b"].replace(compute_dtype=dtype)
    config = engine_config(
        {"zero_optimization": CONFIGS[name]}, name, recipe, world_size=world_size,
        per_device_batch=PACKS,
    )  # fmt: skip
    setup = Setup(
        numels={n: math.prod(shape) for n, (shape, _) in model.tensors.items()}, tied=model.tied,
        world_size=world_size, gpus_per_node=world_size,
        compute_bytes=2 if dtype == "bfloat16" else 4, reduce_bytes=4,
    )  # fmt: skip
    cuts = [
        measure(model.config, n, PACKS * LENGTH, dtype=getattr(torch, dtype), kernel="sdpa")
        for n in (1, 2)
    ]
    activations = memory.extrapolated(*cuts, num_layers=model.config["num_hidden_layers"])
    need = memory.need(setup, config, activations)
    gpu, host = need.gpu, need.host_states // world_size
    on_host = {"gradients": 0.4 * host, "optimizer": 0.6 * host}  # 8 and 12 of 20 bytes
    states = {
        "parameters": gpu.parameters,
        "gradients": gpu.gradients + on_host["gradients"],
        "optimizer": gpu.optimizer + on_host["optimizer"],
    }
    bucket = 4 * ZERO["reduce_bucket_size"]
    uses = gathering.trace(list(setup.numels), setup.tied)
    whole = gathering.peaks(uses, setup.numels, config["zero_optimization"])
    return {
        **states,
        "live": sum(states.values()) + bucket,
        "kept": activations.kept,
        "gathered": setup.compute_bytes * max(whole.values()),
    }


@pytest.mark.slow
@pytest.mark.parametrize(("name", "world_size", "dtype"), RUNS)
def test_predicted_bytes_are_those_of_a_real_run(
    tiny_model: Path, real: dict[tuple[str, int, str], list[dict]], name: str, world_size: int,
    dtype: str,
) -> None:  # fmt: skip
    want = predicted(tiny_model, name, world_size, dtype)
    for rank in real[name, world_size, dtype]:
        for what in want.keys() & rank.keys():
            print(f"{name} {world_size} {dtype} {what}: {want[what] / rank[what] - 1:+.1%}")
    for rank in real[name, world_size, dtype]:
        for what in want.keys() & rank.keys():
            assert want[what] == pytest.approx(rank[what], rel=0.1), what
        assert rank.keys() >= {"parameters", "gradients", "optimizer", "live", "kept"}
        assert world_size == 1 or "gathered" in rank

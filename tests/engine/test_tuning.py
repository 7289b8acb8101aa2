"""What `fit --write` writes is right for the largest tensors, and DeepSpeed takes it."""

from __future__ import annotations

import math
from typing import Any

import pytest
from harness import ROOT

from ds_sft.data.architectures import expected_shapes
from ds_sft.engine import memory, swap_files
from ds_sft.engine.config import engine_config, read_json
from ds_sft.engine.host_memory import device
from ds_sft.engine.memory import Activations
from ds_sft.engine.setup import Setup
from ds_sft.engine.tuning import tuned
from ds_sft.recipe.named import RECIPES

FILES = sorted((ROOT / "ds_configs").glob("*.json"))
SHAPES = {"1.7B": (2048, 28, 16, 6144, True), "8B": (4096, 36, 32, 12288, False),
          "tiny": (64, 2, 4, 160, False)}  # fmt: skip
RECIPE = RECIPES["qwen3-8b"]
NOTHING = Activations(kept=0, forward=0, head=0, layers=0, embedding=0)


def setup(size: str, world_size: int) -> Setup:
    hidden, layers, heads, inner, tied = SHAPES[size]
    config = {
        "architectures": ["Qwen3ForCausalLM"], "vocab_size": 151936 if hidden > 64 else 512,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": heads // 2, "head_dim": 128, "intermediate_size": inner,
    }  # fmt: skip
    numels = {n: math.prod(s) for n, s in expected_shapes(config, tied).items()}
    return Setup(
        numels=numels, tied=tied, world_size=world_size, gpus_per_node=8, compute_bytes=2,
        reduce_bytes=4,
    )  # fmt: skip


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
@pytest.mark.parametrize("size", SHAPES)
@pytest.mark.parametrize("world_size", [1, 3, 8])
def test_sizes_follow_the_largest_tensors_and_pass_our_checks(
    file: Any, size: str, world_size: int
) -> None:
    sizes = setup(size, world_size)
    inside = {n: v for n, v in sizes.numels.items() if ".layers." in n}
    first = sum(v for n, v in inside.items() if ".layers.0." in n)
    totals = []
    for roomy in (True, False):
        value = tuned(read_json(file), sizes, roomy=roomy)
        if "zero_hpz_partition_size" in value["zero_optimization"]:
            value["zero_optimization"]["zero_hpz_partition_size"] = world_size
        config = engine_config(value, file, RECIPE, world_size=world_size, per_device_batch=1)
        zero = config["zero_optimization"]
        assert zero["reduce_bucket_size"] >= (first if roomy else max(inside.values()))
        assert zero["stage3_max_live_parameters"] >= min(10**9, max(sizes.numels.values()))
        if device(zero, "offload_param") == "nvme":
            part = -(-max(sizes.numels.values()) // world_size)
            assert part <= zero["offload_param"]["buffer_size"] <= part + 100_000
        totals.append(memory.need(sizes, config, NOTHING))
    assert totals[1].gpu.total <= totals[0].gpu.total
    assert totals[1].host <= totals[0].host


@pytest.mark.parametrize("file", FILES, ids=lambda f: f.stem)
def test_the_file_it_starts_from_is_left_alone_and_says_where_states_live(file: Any) -> None:
    before = read_json(file)
    value = tuned(before, setup("8B", 1), roomy=True)
    assert before == read_json(file)
    for section in swap_files.OFFLOADS:
        homes = [device(v["zero_optimization"], section) for v in (before, value)]
        assert homes[0] == homes[1]
    assert {k for k in before if k != "zero_optimization"} == {
        k for k in value if k != "zero_optimization"
    }


@pytest.mark.slow
def test_deepspeeds_own_parser_takes_what_is_written_and_has_the_defaults_assumed_here() -> None:
    from deepspeed.runtime.config import DeepSpeedConfig
    from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

    for file in FILES:
        for roomy in (True, False):
            value = tuned(read_json(file), setup("8B", 1), roomy=roomy)
            value["zero_optimization"].pop("zero_hpz_partition_size", None)
            config = engine_config(value, file, RECIPE, world_size=1, per_device_batch=1)
            zero = DeepSpeedConfig(config).zero_config
            assert zero.reduce_bucket_size == value["zero_optimization"]["reduce_bucket_size"]
            assert zero.sub_group_size == value["zero_optimization"]["sub_group_size"]
    plain = DeepSpeedZeroConfig(stage=3)
    assert {
        "reduce_bucket_size": plain.reduce_bucket_size,
        "sub_group_size": plain.sub_group_size,
        "stage3_prefetch_bucket_size": plain.prefetch_bucket_size,
        "stage3_param_persistence_threshold": plain.param_persistence_threshold,
        "stage3_max_live_parameters": plain.max_live_parameters,
        "stage3_max_reuse_distance": plain.max_reuse_distance,
        "zero_hpz_partition_size": plain.zero_hpz_partition_size,
    } == memory.DEFAULTS

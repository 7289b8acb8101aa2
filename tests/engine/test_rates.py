"""Seconds of a step: the slowest stream counts, and faster parts never make it slower."""

from __future__ import annotations

import math
from dataclasses import fields, replace
from pathlib import Path

import pytest

from ds_sft.data.architectures import expected_shapes
from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import rates
from ds_sft.engine.memory import GIB
from ds_sft.engine.rates import Rates, Work, assumed, micro_flops, seconds
from ds_sft.engine.setup import Setup

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "vocab_size": 1000, "hidden_size": 64,
    "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "intermediate_size": 160,
}  # fmt: skip
SHAPES = expected_shapes(CONFIG, tied=False)
NUMELS = {name: math.prod(shape) for name, shape in SHAPES.items()}
RATES = Rates(
    gpu_flops=1e9, gpu_memory=1e8, pcie=1e7, network=1e7, host_memory=1e7, nvme_read=1e6,
    nvme_write=1e6, node_network=1e8,
)  # fmt: skip
CPU = {"offload_optimizer": {"device": "cpu"}}
HPZ = {"zero_hpz_partition_size": 8}
NVME = {"offload_optimizer": {"device": "nvme"}, "offload_param": {"device": "nvme"}}


def setup(world_size: int = 1) -> Setup:
    return Setup(
        numels=NUMELS, tied=False, world_size=world_size, gpus_per_node=8, compute_bytes=2,
        reduce_bytes=4,
    )  # fmt: skip


def of(zero: dict, speeds: Rates = RATES, world_size: int = 1, flops: float = 1e9) -> rates.Seconds:
    work = Work(microbatches=4, micro_flops=flops)
    return seconds(setup(world_size), {"zero_optimization": zero}, speeds, work)


def test_operations_are_those_of_the_mfu_with_every_layer_computed_forward_once_more() -> None:
    from ds_sft.run.flops import flops_per_token

    model = ModelFiles(
        directory=Path(), config=CONFIG, tensors={n: (s, "BF16") for n, s in SHAPES.items()},
        tied=False,
    )  # fmt: skip
    length = 256
    head = 6.0 * 1000 * 64
    norm = 6.0 * 64  # the last one is in no layer, and not worth a term
    layers = flops_per_token(model, [length]) - head - norm
    got = micro_flops(CONFIG, setup(), length, float(length)) / length
    assert got == pytest.approx(layers * 4 / 3 + head)
    once = micro_flops(CONFIG, setup(), length, float(length), again=0.0) / length
    assert once == pytest.approx(layers + head)


def test_a_step_on_the_gpu_is_computing_and_an_update_at_memory_speed() -> None:
    found = of({})
    assert (found.compute, found.exposed, found.bound) == (4.0, 0.0, "compute")
    assert found.update == pytest.approx(32 * sum(NUMELS.values()) / 1e8)
    assert found.total == found.compute + found.update


def test_what_takes_longer_than_computing_is_exposed() -> None:
    slow = of(NVME, flops=1.0)
    assert slow.bound == "nvme"
    assert slow.exposed == pytest.approx(4 * 6 * sum(NUMELS.values()) / 1e6, rel=1e-6)
    assert of({}, world_size=2, flops=1.0).bound == "network"
    assert of(CPU, flops=1.0).bound == "pcie"


def test_hpz_gathers_weights_inside_a_node_and_reduces_over_all() -> None:
    total = sum(NUMELS.values())
    plain, hpz = (of(zero, flops=0.0, world_size=16) for zero in ({}, HPZ))
    assert plain.exposed == pytest.approx(4 * total * (6 + 4) * 15 / 16 / 1e7)
    assert hpz.exposed == pytest.approx(4 * total * (6 * 7 / 8 / 1e8 + 4 * 15 / 16 / 1e7))


def test_cpu_adam_is_bound_by_host_memory_and_nvme_by_the_disk() -> None:
    total = sum(NUMELS.values())
    assert of(CPU).update == pytest.approx(32 * total / 1e7 + 6 * total / 1e7)
    assert of(NVME).update > of(CPU).update > of({}).update


def test_an_update_moves_the_bytes_that_the_optimizer_has() -> None:
    total, bf16 = sum(NUMELS.values()), {"enabled": True, "bf16_master_weights_and_grads": True,
                                         "bf16_optimizer_states": True}  # fmt: skip
    work = Work(microbatches=1, micro_flops=1.0)
    apollo = seconds(replace(setup(), moments=1000), {"zero_optimization": {}}, RATES, work)
    assert apollo.update == pytest.approx((2 * 4 * total + 4 * 4 * 1000 + 8 * total) / 1e8)
    halved = seconds(setup(), {"zero_optimization": {}, "bf16": bf16}, RATES, work)
    assert halved.update == pytest.approx((2 * 6 + 8) * total / 1e8)


@pytest.mark.parametrize("name", [f.name for f in fields(Rates) if f.name != "measured"])
@pytest.mark.parametrize("zero", [{}, CPU, NVME, HPZ])
def test_a_faster_part_never_makes_a_step_slower(name: str, zero: dict) -> None:
    faster = replace(RATES, **{name: 10 * getattr(RATES, name)})
    for world_size in (8, 16) if zero == HPZ else (1, 2, 16):
        assert of(zero, faster, world_size).total <= of(zero, RATES, world_size).total


def test_assumed_rates_grow_with_the_card_and_shrink_between_nodes() -> None:
    cards = [assumed(n * GIB, several_nodes=False) for n in (12, 24, 48, 141)]
    assert [c.gpu_flops for c in cards] == sorted(c.gpu_flops for c in cards)
    assert assumed(141 * GIB, several_nodes=True).network < cards[-1].network
    assert not cards[0].measured

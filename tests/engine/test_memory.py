"""The arithmetic of ZeRO-3's buffers, case by case, and what must be true of all of them."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_sft.engine.host_memory import device
from ds_sft.engine.memory import (
    CONTEXT,
    DEFAULTS,
    NETWORK,
    Activations,
    Need,
    Setup,
    _reduction,
    extrapolated,
    need,
    parked,
)

NUMELS = {
    "model.embed_tokens.weight": 10_000_000,
    "model.layers.0.mlp.up_proj.weight": 3_000_000,
    "model.layers.1.mlp.up_proj.weight": 3_000_000,
    "model.norm.weight": 1_001,
    "lm_head.weight": 10_000_000,
}
TOTAL = sum(NUMELS.values())
NOTHING = Activations(kept=0, forward=0, head=0, layers=0, embedding=0)
SOME = Activations(kept=10**9, forward=2 * 10**9, head=3 * 10**9, layers=4 * 10**9, embedding=10**8)
CPU = {"offload_optimizer": {"device": "cpu", "pin_memory": False}}


def setup(world_size: int = 1, **changes: Any) -> Setup:
    sizes = {"compute_bytes": 2, "reduce_bytes": 4, "gpus_per_node": 8, "tied": False}
    return Setup(numels=NUMELS, world_size=world_size, **{**sizes, **changes})


def of(zero: dict[str, Any], activations: Activations = SOME, **changes: Any) -> Need:
    return need(setup(**changes), {"zero_optimization": {"stage": 3, **zero}}, activations)


def test_everything_on_one_gpu_is_18_bytes_a_parameter() -> None:
    gpu = of({}).gpu
    assert (gpu.parameters, gpu.gradients, gpu.optimizer) == (2 * TOTAL, 4 * TOTAL, 12 * TOTAL)
    assert gpu.gathered == 0  # the only part is the whole
    assert of({}, compute_bytes=4).gpu.parameters == 4 * TOTAL


def test_ranks_share_the_states_and_pad_their_parts() -> None:
    gpu = of({"stage3_param_persistence_threshold": 0}, world_size=3).gpu
    own = 2 * 3_333_334 + 2 * 1_000_000 + 334
    assert (gpu.parameters, gpu.gradients, gpu.optimizer) == (2 * own, 4 * own, 12 * own)


def test_parameters_below_the_threshold_are_whole_on_every_rank() -> None:
    split = of({"stage3_param_persistence_threshold": 0}, world_size=2).gpu.parameters
    assert of({"stage3_param_persistence_threshold": 2_000}, world_size=2).gpu.parameters == (
        split + 2 * 1_001
    )


def test_an_offloaded_optimizer_is_20_bytes_a_parameter_of_host_memory() -> None:
    found = of(CPU)
    assert found.host_states == 20 * TOTAL
    assert (found.gpu.gradients, found.gpu.optimizer) == (0, 0)
    assert found.host_buffers == 0
    assert of(CPU, world_size=4).host_states == pytest.approx(20 * TOTAL, rel=1e-5)  # padding


@pytest.mark.parametrize(
    ("bf16", "state", "offloaded"),
    [
        ({}, 12, 20),
        ({"bf16_master_weights_and_grads": True}, 10, 16),  # the gradient that Adam reads too
        ({"bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}, 6, 12),
    ],
)
def test_masters_and_moments_in_bfloat16_take_half(
    bf16: dict[str, bool], state: int, offloaded: int
) -> None:
    def needed(zero: dict[str, Any]) -> Need:
        return need(setup(), {"bf16": bf16, "zero_optimization": {"stage": 3, **zero}}, NOTHING)

    here, there = needed({}), needed(CPU)
    assert here.gpu.optimizer == state * TOTAL
    assert here.gpu.gradients == 4 * TOTAL
    assert here.checkpoint == there.checkpoint == state * TOTAL
    assert there.host_states == offloaded * TOTAL


def test_the_ranks_of_a_node_share_its_memory_and_disk() -> None:
    nvme = {"offload_optimizer": {"device": "nvme"}}
    eight, four = (of(nvme, world_size=8, gpus_per_node=n) for n in (8, 4))
    for name in ("host_states", "host_buffers", "nvme"):
        assert getattr(eight, name) == 2 * getattr(four, name)


def test_pinned_memory_is_a_power_of_two() -> None:
    pinned = of({"offload_optimizer": {"device": "cpu", "pin_memory": True}})
    up = 2**27 - 4 * TOTAL  # 4 * 26 M bytes
    assert 0 < up < 2**26
    assert pinned.host_buffers == 2 * up


def test_nvme_holds_16_bytes_a_parameter_and_the_host_one_sub_group() -> None:
    found = of({"sub_group_size": 5_000_000, "offload_optimizer": {
        "device": "nvme", "buffer_count": 4, "pin_memory": False}})  # fmt: skip
    assert found.nvme == 16 * TOTAL
    assert found.host_states == 4 * TOTAL
    assert found.host_buffers == 4 * 4 * 15_000_000  # 5 M, and the largest tensor beyond it


def test_parameters_on_nvme_pass_through_their_buffers() -> None:
    param = {"device": "nvme", "buffer_count": 5, "buffer_size": 11_000_000}
    found = of({"offload_param": param, "stage3_max_reuse_distance": 0})
    assert found.nvme == 2 * TOTAL
    assert found.host_buffers == 2 * 5 * 11_000_000
    assert found.gpu.parameters == 2 * 1_001  # the norm stays
    assert found.gpu.gathered >= 2 * 3_000_000


def test_the_peak_is_the_phase_with_most() -> None:
    assert of({}).gpu.phase == "layers"
    assert of(
        {}, Activations(kept=1, forward=1, head=9 * 10**9, layers=1, embedding=1)
    ).gpu.phase == ("head")
    assert of({"reduce_bucket_size": 1}, NOTHING).gpu.phase == "update"
    assert of({"reduce_bucket_size": 1, **CPU}, NOTHING).gpu.phase == "export"
    kept = of({}).gpu
    assert (kept.activations, kept.working) == (10**9, 3 * 10**9)


def test_the_update_copies_one_sub_group_of_gradients() -> None:
    small = of({"reduce_bucket_size": 1, "sub_group_size": 4_000_000}, NOTHING).gpu
    assert small.working == 8 * 10_000_000  # the norm of the largest part, in float64
    assert of({"reduce_bucket_size": 1}, NOTHING).gpu.working == 4 * TOTAL


def test_a_gradient_larger_than_the_bucket_is_cast_whole() -> None:
    bucket = 4_000_000
    zero = {**DEFAULTS, "reduce_bucket_size": bucket}
    assert _reduction(setup(2), zero, layers_only=True) == 4 * bucket
    assert _reduction(setup(2), zero, layers_only=False) == 4 * 10_000_000
    assert _reduction(setup(3), zero, layers_only=False) == 8 * 10_000_000  # laid out too
    assert _reduction(setup(2, reduce_bytes=2), zero, layers_only=False) == 2 * bucket


def test_slack_counts_the_context_and_the_network() -> None:
    assert CONTEXT < of({}).gpu.slack < of({}, world_size=2).gpu.slack
    assert of({}, world_size=2).gpu.slack >= CONTEXT + NETWORK


def test_checkpoint_and_export_are_those_of_the_whole_model() -> None:
    for world_size in (1, 5):
        found = of({}, world_size=world_size)
        assert (found.checkpoint, found.export) == (12 * TOTAL, 2 * TOTAL)


@given(
    world_size=st.integers(1, 64),
    bucket=st.integers(1, 10**8),
    live=st.integers(0, 10**9),
    reuse=st.integers(0, 10**9),
    prefetch=st.integers(0, 10**8),
    home=st.sampled_from(["none", "cpu", "nvme"]),
)
def test_parts_are_never_negative_and_add_up(
    world_size: int, bucket: int, live: int, reuse: int, prefetch: int, home: str
) -> None:
    zero = {
        "reduce_bucket_size": bucket, "stage3_max_live_parameters": live,
        "stage3_max_reuse_distance": reuse, "stage3_prefetch_bucket_size": prefetch,
        "offload_optimizer": {"device": home},
    }  # fmt: skip
    gpu = of(zero, world_size=world_size).gpu
    parts = [getattr(gpu, n) for n in gpu.__slots__ if n != "phase"]
    assert min(parts) >= 0
    assert gpu.total == sum(parts) > CONTEXT
    assert gpu.gathered <= 4 * TOTAL
    moved = of({**zero, "offload_optimizer": {"device": "cpu"}}, world_size=world_size).gpu
    assert moved.total <= of({**zero, "offload_optimizer": {}}, world_size=world_size).gpu.total


def test_extrapolation_is_linear_in_equal_layers() -> None:
    class Cut:
        def __init__(self, num_layers: int) -> None:
            self.num_layers = num_layers
            self.kept, self.forward = 5 + 3 * num_layers, 7 * num_layers
            self.head, self.layers, self.embedding = 11 + num_layers, 2 * num_layers, 13

    got = extrapolated(Cut(2), Cut(4), num_layers=10)
    assert got == Activations(kept=35, forward=70, head=21, layers=20, embedding=13)


def test_a_section_without_a_device_moves_nothing() -> None:
    assert device({"offload_param": {}}, "offload_param") == "none"
    assert device({}, "offload_param") == "none"


def test_inputs_in_host_memory_leave_two_on_the_gpu() -> None:
    size = 2**20 + 1
    moved = parked(SOME, layers=36, size=size)
    assert moved.kept == SOME.kept - 34 * size
    assert moved.layers - moved.kept == SOME.layers - SOME.kept
    assert moved.embedding == SOME.embedding
    assert of({}, moved).host_buffers == 36 * 2**21  # pinned: a power of two
    assert parked(SOME, layers=1, size=size).kept == SOME.kept


def test_apollos_moments_replace_adams_wherever_they_are() -> None:
    few = 1_000
    gpu = of({}, moments=few).gpu
    assert gpu.optimizer == 4 * TOTAL + 8 * few
    assert of(CPU, moments=few).host_states == 12 * TOTAL + 8 * few
    assert of({}, moments=few, world_size=2).checkpoint == 4 * TOTAL + 2 * 8 * few
    quiet = {"reduce_bucket_size": 1, "sub_group_size": 4_000_000}
    update = of(quiet, NOTHING, moments=few).gpu
    assert update.phase == "update"
    assert update.working == 8 * 10_000_000 + 16 * few  # what is projected comes on top

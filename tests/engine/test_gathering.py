"""The replay of DeepSpeed's parameter coordinator, at its limits."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ds_sft.engine.gathering import EMBEDDING, FORWARD, HEAD, LAYERS, peaks, trace

NUMELS = {
    "model.embed_tokens.weight": 100,
    "model.layers.0.q.weight": 7,
    "model.layers.0.up.weight": 20,
    "model.layers.1.q.weight": 7,
    "model.layers.1.up.weight": 20,
    "model.norm.weight": 1,
    "lm_head.weight": 90,
}
TOTAL = sum(NUMELS.values())


def most(
    live: int = 10**9, reuse: int = 0, prefetch: int = 0, threshold: int = 0
) -> dict[str, int]:
    zero = {
        "stage3_max_live_parameters": live, "stage3_max_reuse_distance": reuse,
        "stage3_prefetch_bucket_size": prefetch, "stage3_param_persistence_threshold": threshold,
    }  # fmt: skip
    return peaks(trace(list(NUMELS), tied=False), NUMELS, zero)


def test_a_pass_is_forward_head_and_every_layer_twice_backwards() -> None:
    uses = [(use.name.split(".")[-2], use.phase) for use in trace(list(NUMELS), tied=False)]
    layer = [("q", LAYERS), ("up", LAYERS), ("up", LAYERS), ("q", LAYERS)]
    assert uses == [
        ("embed_tokens", FORWARD), *[("q", FORWARD), ("up", FORWARD)] * 2, ("norm", FORWARD),
        ("lm_head", HEAD), ("lm_head", HEAD), ("norm", LAYERS), *layer, *layer,
        ("embed_tokens", EMBEDDING),
    ]  # fmt: skip
    tied = trace([n for n in NUMELS if n != "lm_head.weight"], tied=True)
    assert [u.name for u in tied if u.phase == HEAD] == ["model.embed_tokens.weight"] * 2


def test_without_prefetch_and_reuse_one_tensor_is_whole_at_a_time() -> None:
    assert most() == {FORWARD: 100, HEAD: 90, LAYERS: 20, EMBEDDING: 100}


def test_with_everything_allowed_the_whole_model_is_gathered() -> None:
    assert max(most(reuse=10**9, prefetch=10**9).values()) == TOTAL


def test_what_is_used_again_within_the_distance_stays() -> None:
    # The last layer's `up` is used again after the norm and the head: 1 + 180 + 1 + 7 elements on.
    assert most(reuse=150)[HEAD] == 90 + 0
    assert most(reuse=200)[HEAD] == 90 + 20 + 1


def test_prefetching_stops_at_the_live_limit() -> None:
    assert most(prefetch=30, live=0) == most()
    assert most(prefetch=30)[FORWARD] >= 100 + 7 + 20 + 7


def test_small_parameters_are_not_counted() -> None:
    assert most(threshold=50) == {FORWARD: 100, HEAD: 90, LAYERS: 0, EMBEDDING: 100}


@given(
    live=st.integers(0, 500), reuse=st.integers(0, 1000), prefetch=st.integers(0, 300),
    more=st.integers(0, 300),
)  # fmt: skip
def test_no_phase_holds_more_than_the_model_or_less_than_what_it_uses(
    live: int, reuse: int, prefetch: int, more: int
) -> None:
    found = most(live, reuse, prefetch)
    assert all(value <= TOTAL for value in found.values())
    assert found[HEAD] >= 90
    assert found[EMBEDDING] == pytest.approx(100, abs=TOTAL - 100)
    assert found[LAYERS] >= 20

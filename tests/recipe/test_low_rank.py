"""Who takes low-rank moments, and what the state takes then."""

from __future__ import annotations

import pytest

from ds_sft.errors import ConfigError
from ds_sft.recipe import low_rank
from ds_sft.recipe.low_rank import LOW_RANK, Tensor
from ds_sft.recipe.named import RECIPES

SHAPES = {
    "model.embed_tokens.weight": (1000, 64),
    "model.embed_tokens_per_layer.weight": (1000, 96),
    "model.layers.0.self_attn.q_proj.weight": (128, 64),
    "model.layers.0.self_attn.q_proj.bias": (128,),
    "model.layers.0.self_attn.k_proj.weight": (8, 64),
    "model.layers.0.self_attn.q_norm.weight": (32,),
    "model.layers.0.mlp.down_proj.weight": (64, 160),
    "model.norm.weight": (64,),
    "lm_head.weight": (1000, 64),
}
TENSORS = low_rank.by_name(SHAPES)


@pytest.mark.parametrize(
    ("name", "rank", "way"),
    [
        ("model.embed_tokens.weight", 4, "embedding"),
        ("model.embed_tokens_per_layer.weight", 4, "embedding"),
        ("lm_head.weight", 4, "head"),
        ("model.norm.weight", 4, "norm"),
        ("model.layers.0.self_attn.q_norm.weight", 4, "norm"),
        ("model.layers.0.self_attn.q_proj.bias", 4, "bias"),
        ("model.layers.0.self_attn.k_proj.weight", 7, LOW_RANK),
        ("model.layers.0.self_attn.k_proj.weight", 8, "matrix with min(m, n) <= 8"),
        ("model.layers.0.mlp.down_proj.weight", 63, LOW_RANK),
        ("model.layers.0.mlp.down_proj.weight", 64, "matrix with min(m, n) <= 64"),
    ],
)
def test_only_large_linear_weights_are_low_rank(name: str, rank: int, way: str) -> None:
    assert low_rank.route(TENSORS[name], rank) == way


def test_a_linear_weight_that_is_no_matrix_is_not_low_rank() -> None:
    assert low_rank.route(Tensor(kind="linear", shape=(64,)), 1) == "vector"
    assert low_rank.route(Tensor(kind="linear", shape=(64, 4, 4)), 1).startswith("tensor of 3")


@pytest.mark.parametrize("world_size", [1, 3])
def test_the_state_is_counted_by_hand(world_size: int) -> None:
    """Two moments of 4 bytes: of rows or columns times rank, or of every element; and a norm."""
    rank = 16
    part = -(-128 // world_size) * rank + -(-160 // world_size) * rank  # q_proj and down_proj
    dense = [64_000, 96_000, 128, 512, 32, 64, 64_000]
    part += sum(-(-n // world_size) for n in dense)
    assert low_rank.state_bytes(TENSORS, rank, world_size) == 8 * part + 4 * 2
    full = sum(-(-t.numel // world_size) for t in TENSORS.values())
    assert low_rank.state_bytes(TENSORS, 0, world_size) == 8 * full


def test_a_checkpoint_holds_masters_and_the_moments_there_are() -> None:
    total = sum(t.numel for t in TENSORS.values())
    adamw, apollo = RECIPES["qwen3-8b"], RECIPES["qwen3-8b"].replace(optimizer="apollo-mini")
    assert low_rank.moments_of(SHAPES, adamw, 1) is None
    assert low_rank.checkpoint_bytes(SHAPES, adamw) == 12 * total
    moments = low_rank.moments_of(SHAPES, apollo, 1)
    assert moments is not None
    assert low_rank.checkpoint_bytes(SHAPES, apollo) == 4 * total + 8 * moments < 12 * total


def test_a_rank_that_leaves_nothing_low_rank_is_refused_with_the_largest_that_would_work() -> None:
    low_rank.check(TENSORS, 63)
    with pytest.raises(ConfigError, match=r"--apollo-rank 64 leaves .* at most --apollo-rank 63$"):
        low_rank.check(TENSORS, 64)
    without = {name: t for name, t in TENSORS.items() if "proj" not in name}
    with pytest.raises(ConfigError, match=r"no linear layer .* use --optimizer adamw"):
        low_rank.check(without, 1)


def test_the_table_adds_up_to_the_model() -> None:
    lines = low_rank.table(TENSORS, 16, 2)
    assert lines[0] == "low-rank moments: 2 tensors, 18,432 parameters"
    assert lines[1] == "plain AdamW: 7 tensors, 224,736 parameters"
    assert lines[2] == "... embedding: 2 tensors, 160,000 parameters"
    assert "... matrix with min(m, n) <= 16: 1 tensors, 512 parameters" in lines
    assert lines[-1].startswith(f"moments of a rank: {low_rank.state_bytes(TENSORS, 16, 2):,} ")

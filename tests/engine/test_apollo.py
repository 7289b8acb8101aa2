"""The kind of a parameter by the class of its module, and what the optimizer refuses."""

from __future__ import annotations

from pathlib import Path

import families
import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from ds_sft.engine.apollo import Apollo, tensors_of
from ds_sft.errors import CheckpointError
from ds_sft.model.sft import arrange
from ds_sft.recipe import low_rank
from ds_sft.recipe.named import RECIPES

RECIPE = RECIPES["qwen3-8b"].replace(optimizer="apollo", apollo_rank=4)


@pytest.mark.parametrize("tied", [False, True])
def test_modules_and_names_say_the_same_of_a_model(tied: bool) -> None:
    config = LlamaConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=1, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=tied,
    )  # fmt: skip
    model = arrange(LlamaForCausalLM(config), loss_chunk_size=8)
    tensors = tensors_of(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert tensors == low_rank.by_name(shapes)
    kinds = {t.kind for t in tensors.values()}
    assert kinds == {"embedding", "norm", "bias", "linear"} | (set() if tied else {"head"})
    ways = {name: low_rank.route(t, 8) for name, t in tensors.items()}
    assert ways["model.layers.0.self_attn.k_proj.weight"] == "matrix with min(m, n) <= 8"
    assert ways["model.layers.0.self_attn.q_proj.weight"] == low_rank.LOW_RANK


def test_a_class_decides_where_a_name_would_be_wrong() -> None:
    """An embedding that is called a projection, and a module that nobody knows."""

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.token_proj = nn.Embedding(64, 16)
            self.mixer = nn.Module()
            self.mixer.weight = nn.Parameter(torch.ones(16, 16))

    tensors = tensors_of(Odd())
    assert low_rank.route(tensors["token_proj.weight"], 4) == "embedding"
    assert low_rank.route(tensors["mixer.weight"], 4) == "other"


@pytest.mark.parametrize("family", families.FAMILIES)
def test_in_every_family_the_layers_weights_are_low_rank_and_no_embedding_is(family: str) -> None:
    model = arrange(families.make(family, None), loss_chunk_size=8)
    tensors = tensors_of(model)
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    assert tensors == low_rank.by_name(shapes)
    low = {n for n, t in tensors.items() if low_rank.route(t, 2) == low_rank.LOW_RANK}
    assert not any("embed" in name or "norm" in name or "lm_head" in name for name in low)
    wanted = {n for n in tensors if "self_attn" in n or ".mlp." in n}
    assert low >= {n for n in wanted if "norm" not in n and not n.endswith("bias")}
    assert all(model.get_parameter(name).ndim == 2 for name in low)


def test_a_checkpoint_with_other_low_rank_moments_is_refused() -> None:
    weight = nn.Parameter(torch.ones(8, 8))
    optimizer = Apollo([{"params": [weight], "weight_decay": 0.0}], {}, RECIPE)
    optimizer.require_same({}, Path("step-9"))
    with pytest.raises(CheckpointError, match=r"step-9 has other low-rank moments than .*rank 4"):
        optimizer.require_same({"a": 4}, Path("step-9"))

"""Decay and routing by the class of a parameter's module."""

import json

import harness
import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3ForCausalLM

from ds_sft.model.kinds import parameter_kinds, summary
from ds_sft.model.load import parameter_groups
from ds_sft.model.sft import SftModel
from ds_sft.recipe.decay import KINDS, kind_decays, kind_of_name

GOLDEN = json.loads((harness.GOLDEN / "wd_mask.json").read_text())
CASES = [(tied, bias) for tied in (False, True) for bias in (False, True)]


def qwen3(tied: bool, bias: bool = False) -> Qwen3ForCausalLM:
    config = Qwen3Config(
        vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=tied, attention_bias=bias,
    )  # fmt: skip
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


@pytest.mark.parametrize(("tied", "bias"), CASES)
def test_the_mask_by_class_is_levanters(tied: bool, bias: bool) -> None:
    model = qwen3(tied, bias)
    kinds = parameter_kinds(model)
    golden = [m for m in GOLDEN.values() if isinstance(m, dict) and "decayed" in m]
    wanted = {n: d == "decayed" for m in golden for d in ("decayed", "not_decayed") for n in m[d]}
    compared = kinds.keys() & wanted.keys()
    assert len(compared) > 20
    assert kinds.keys() == {name for name, _ in model.named_parameters()}
    for name in compared - {"lm_head.weight"}:
        assert kind_decays(kinds[name]) is wanted[name], name
    assert ("lm_head.weight" in kinds) is not tied
    assert kinds.get("lm_head.weight", "head") == "head"


def test_an_untied_head_decays_and_a_tied_one_is_the_embedding() -> None:
    assert kind_decays(parameter_kinds(qwen3(tied=False))["lm_head.weight"])
    assert not kind_decays(parameter_kinds(qwen3(tied=True))["model.embed_tokens.weight"])


@pytest.mark.parametrize("order", [("table", "out"), ("out", "table")])
def test_a_tensor_shared_with_an_embedding_is_the_embedding_whoever_comes_first(
    order: tuple[str, str],
) -> None:
    modules = {"table": torch.nn.Embedding(6, 4), "out": torch.nn.Linear(4, 6, bias=False)}
    modules["out"].weight = modules["table"].weight
    model = torch.nn.Module()
    for name in order:
        model.add_module(name, modules[name])
    model.get_output_embeddings = lambda: modules["out"]
    assert parameter_kinds(model) == {f"{order[0]}.weight": "embedding"}
    assert [group["weight_decay"] for group in parameter_groups(model, 0.1)] == [0.0]


def test_linear_layers_that_share_a_weight_are_linear_once() -> None:
    one, two = (torch.nn.Linear(4, 4, bias=False) for _ in range(2))
    two.weight = one.weight
    assert parameter_kinds(torch.nn.ModuleList([one, two])) == {"0.weight": "linear"}


@pytest.mark.parametrize(("tied", "bias"), CASES)
def test_the_trained_model_and_the_names_say_the_same(tied: bool, bias: bool) -> None:
    causal_lm = qwen3(tied, bias)
    kinds = parameter_kinds(causal_lm)
    assert parameter_kinds(SftModel(causal_lm, 64)) == kinds
    assert {name: kind_of_name(name) for name in kinds} == kinds


def test_the_class_decides_whatever_the_name_and_the_shape_are() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm_proj = torch.nn.Linear(4, 4)
            self.table = torch.nn.Embedding(4, 4)
            self.scaling = torch.nn.LayerNorm(4)
            self.alpha = torch.nn.Parameter(torch.ones(1))
            self.norm_proj.weight.data = torch.empty(0)  # what ZeRO-3 leaves of it

    kinds = parameter_kinds(Odd())
    assert kinds == {
        "alpha": "other", "norm_proj.weight": "linear", "norm_proj.bias": "bias",
        "table.weight": "embedding", "scaling.weight": "norm", "scaling.bias": "bias",
    }  # fmt: skip
    assert set(kinds.values()) <= set(KINDS)
    assert summary(kinds) == "2 bias, 1 other, 1 linear, 1 embedding, 1 norm"
    decayed, rest = parameter_groups(Odd(), 0.1)
    assert [len(group["params"]) for group in (decayed, rest)] == [2, 4]
    assert [group["weight_decay"] for group in (decayed, rest)] == [0.1, 0.0]

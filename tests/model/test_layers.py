"""What layers keep and how they run changes memory, and no gradient."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from ds_sft.data.collate import collate
from ds_sft.data.packed import PackedDataset
from ds_sft.errors import ConfigError
from ds_sft.flags import parse_train
from ds_sft.model import attention, layers
from ds_sft.model.layers import LayerChoices
from ds_sft.model.sft import DeviceBatch, SftModel

CPU = torch.device("cpu")
Gradients = dict[str, torch.Tensor]


def build(directory: Path, num_layers: int = 2, **choices: Any) -> SftModel:
    """The tiny model with `num_layers` layers, the golden two over and over."""
    attention.register("sdpa")
    causal_lm = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attention.NAME, dtype=torch.float32
    )
    for _ in range(num_layers - 2):
        causal_lm.model.layers.append(type(causal_lm.model.layers[0])(causal_lm.config, 0))
    for layer in causal_lm.model.layers[2:]:
        layer.load_state_dict(causal_lm.model.layers[1].state_dict())
    causal_lm.config.num_hidden_layers = num_layers
    causal_lm.config.layer_types = ["full_attention"] * num_layers
    layers.apply(causal_lm, LayerChoices(**choices), CPU)
    return SftModel(causal_lm, loss_chunk_size=50).train()


def batch(data: Path, packs: list[int]) -> DeviceBatch:
    return DeviceBatch.from_host(collate(PackedDataset.open(data), packs, len(packs)), CPU)


def trained(model: SftModel, data: Path) -> tuple[torch.Tensor, Gradients]:
    """Loss and gradients of two microbatches, as an optimizer step has them."""
    total = torch.zeros(())
    for packs in ([0, 1], [2, 3]):
        loss = model(batch(data, packs))
        (loss * 0.37).backward()
        total += loss.detach()
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def layer_forwards(model: SftModel) -> list[int]:
    """Counts of each layer's attention computations, filled as the model runs."""
    counts = [0] * len(model.model.layers)

    def counter(index: int) -> Callable[..., None]:
        def count(*_: Any) -> None:
            counts[index] += 1

        return count

    for index, layer in enumerate(model.model.layers):
        layer.self_attn.register_forward_pre_hook(counter(index))
    return counts


@pytest.mark.parametrize(
    "choices",
    [
        {"recompute_every": 0},
        {"recompute_every": 2},
        {"recompute_every": 9},
        {"offload_activations": True},
        {"recompute_every": 2, "offload_activations": True},
    ],
    ids=str,
)
def test_gradients_are_bit_equal_to_those_of_recomputing_every_layer(
    choices: dict[str, Any], tiny_model: Path, tiny_data: Path
) -> None:
    want_loss, want = trained(build(tiny_model, 5), tiny_data)
    loss, got = trained(build(tiny_model, 5, **choices), tiny_data)
    assert torch.equal(loss, want_loss)
    assert got.keys() == want.keys()
    assert all(torch.equal(got[name], want[name]) for name in want)


@pytest.mark.parametrize(
    ("every", "offload", "wanted"),
    [
        (1, False, [2, 2, 2, 2, 2]),
        (2, False, [2, 1, 2, 1, 2]),
        (2, True, [2, 1, 2, 1, 2]),
        (0, False, [1, 1, 1, 1, 1]),
    ],
)
def test_every_nth_layer_is_computed_twice(
    every: int, offload: bool, wanted: list[int], tiny_model: Path, tiny_data: Path
) -> None:
    model = build(tiny_model, 5, recompute_every=every, offload_activations=offload)
    counts = layer_forwards(model)
    model(batch(tiny_data, [0])).backward()
    assert counts == wanted
    assert LayerChoices(recompute_every=every).recomputed(5) == sum(wanted) - 5


def test_the_choices_are_said_in_numbers() -> None:
    lines = [*LayerChoices(recompute_every=2, mlp_tiles="auto").lines(5, 4096)]
    assert lines == [
        "recomputing 3 of 5 layers (--recompute-every 2), their inputs wait on the device",
        "MLP in tiles of up to 4,096 tokens (--mlp-tiles auto, hidden 4096)",
    ]
    assert [*LayerChoices(recompute_every=0).lines(5, 64)] == [
        "recomputing 0 of 5 layers (--recompute-every 0)"
    ]
    assert "in host memory" in next(LayerChoices(offload_activations=True).lines(5, 64))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--recompute-every", "-1"], "--recompute-every=-1 must be from 0"),
        (["--mlp-tiles", "-2"], "--mlp-tiles=-2 must be from 0"),
        (["--mlp-tiles", "some"], "--mlp-tiles"),
        (["--recompute-every", "0", "--offload-activations"], "drop one of the two"),
        (["--liger", "maybe"], "--liger"),
    ],
)
def test_a_choice_that_cannot_be_is_refused(words: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_train(["--data", "d", *words])


def test_tiles_are_a_number_or_auto() -> None:
    assert parse_train(["--data", "d", "--mlp-tiles", "auto"])[0].mlp_tiles == "auto"
    assert parse_train(["--data", "d", "--mlp-tiles", "3"])[0].mlp_tiles == 3

"""What fake tensors say is what real ones hold."""

from __future__ import annotations

import gc
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from ds_sft.data.model_files import read_model
from ds_sft.engine import memory
from ds_sft.model import activations, attention
from ds_sft.model.activations import measure, of_choices
from ds_sft.model.layers import LayerChoices
from ds_sft.model.sft import SftModel, arrange

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 1000,
    "hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 32, "intermediate_size": 160, "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}  # fmt: skip


PHASES = ("kept", "forward", "head", "layers", "embedding")


def plain(causal_lm: Any, loss_chunk_size: int) -> SftModel:
    return SftModel(causal_lm, loss_chunk_size)


@pytest.mark.parametrize("arranged", [arrange, plain])
@pytest.mark.parametrize("kernel", ["varlen", "sdpa"])
def test_two_cut_models_say_what_the_whole_one_holds(kernel: str, arranged: Any) -> None:
    one, two, whole = (measure(CONFIG, n, 512, kernel=kernel, arranged=arranged) for n in (1, 2, 5))
    got = memory.extrapolated(one, two, num_layers=5)
    assert all(getattr(got, name) == getattr(whole, name) for name in PHASES)


CHOICES = [
    LayerChoices(recompute_every=0), LayerChoices(recompute_every=2),
    LayerChoices(recompute_every=3), LayerChoices(mlp_tiles=4),
]  # fmt: skip


@pytest.mark.parametrize("choices", CHOICES, ids=str)
def test_it_follows_how_the_layers_run(choices: LayerChoices) -> None:
    """Also when the layers repeat after several: 5 are no whole number of periods."""
    got = memory.extrapolated(*of_choices(CONFIG, 512, choices), num_layers=5)
    whole = measure(CONFIG, 5, 512, arranged=lambda m, chunk: arrange(m, chunk, choices))
    assert (got.kept, got.head) == (whole.kept, whole.head)
    every = measure(CONFIG, 5, 512)
    if choices.recompute_every == 1:
        assert whole.kept == every.kept
        assert whole.layers < every.layers
    else:
        assert whole.kept > every.kept


def test_the_same_is_true_of_a_tied_model_and_of_llama() -> None:
    for change in ({"tie_word_embeddings": True}, {"model_type": "llama"}):
        one, two, whole = (measure({**CONFIG, **change}, n, 256) for n in (1, 2, 5))
        got = memory.extrapolated(one, two, num_layers=5)
        assert all(getattr(got, name) == getattr(whole, name) for name in PHASES)


def test_a_recomputed_layer_keeps_its_input_and_nothing_else() -> None:
    one, two = (measure(CONFIG, n, 512) for n in (1, 2))
    assert two.kept - one.kept == 512 * CONFIG["hidden_size"] * 2
    without = [measure(CONFIG, n, 512, arranged=plain).kept for n in (1, 2)]
    assert without[1] - without[0] > 10 * (two.kept - one.kept)


def test_the_head_holds_a_chunk_of_logits_and_its_weights_gradient_in_float32() -> None:
    vocab, hidden = CONFIG["vocab_size"], CONFIG["hidden_size"]
    small = measure(CONFIG, 1, 512, loss_chunk_size=64)
    large = measure(CONFIG, 1, 512, loss_chunk_size=512)
    assert small.head - small.kept > 4 * vocab * hidden
    assert large.head - small.head > 448 * vocab * 4


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_layers_keep_is_what_a_real_model_keeps(tiny_model: Path, dtype: torch.dtype) -> None:
    """The truth: storages that came alive before the head, found by the garbage collector."""
    model, batch = real_model(tiny_model, dtype), activations._batch(64, 64)
    known = {t.untyped_storage().data_ptr() for t in live([*model.parameters()])}
    saved: list[torch.Tensor] = []
    found: dict[int, int] = {}

    def at_head(*_: object) -> None:
        for tensor in live(saved):
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in known:
                found[storage.data_ptr()] = storage.nbytes()

    model.lm_head.register_forward_pre_hook(at_head)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        model(batch)
    inputs = (batch.input_ids, batch.position_ids, batch.positions, batch.labels, batch.cu_seq_lens)
    # A recomputed layer also keeps the state of the random generator, in host memory everywhere.
    random = 2 * torch.get_rng_state().nbytes
    want = sum(found.values()) - random + sum(t.nbytes for t in inputs)
    assert measure(read_model(tiny_model).config, 2, 64, dtype=dtype, kernel="sdpa").kept == want


@pytest.mark.parametrize(("vocab_size", "phase"), [(512, "layers"), (4096, "head")])
def test_the_peak_is_that_of_the_allocator(tiny_model: Path, vocab_size: int, phase: str) -> None:
    """The truth: every allocation of a real pass on the CPU, as torch's profiler records them.

    In float32: to add bfloat16 to float32 a CPU makes a copy, which a GPU does not.
    """
    config = {**read_model(tiny_model).config, "vocab_size": vocab_size}
    model = real_model(tiny_model, torch.float32, vocab_size=vocab_size)
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    model(activations._batch(64, 64)).backward()
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profile:
        model(activations._batch(64, 64)).backward()
    events = profile.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    want = max(itertools.accumulate(size for _, size in changes))
    got = measure(config, 2, 64, dtype=torch.float32, kernel="sdpa")
    assert getattr(got, phase) == max(got.forward, got.head, got.layers, got.embedding)
    assert getattr(got, phase) == pytest.approx(want, rel=0.02)


def live(also: list[torch.Tensor]) -> list[torch.Tensor]:
    gc.collect()
    return [*(x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)), *also]


def real_model(directory: Path, dtype: torch.dtype, vocab_size: int = 512) -> SftModel:
    attention.register("sdpa")
    config = AutoConfig.from_pretrained(directory, vocab_size=vocab_size)
    config.use_cache = False
    causal_lm = AutoModelForCausalLM.from_config(
        config, attn_implementation=attention.NAME, dtype=dtype
    )
    return arrange(causal_lm, 2048).train()

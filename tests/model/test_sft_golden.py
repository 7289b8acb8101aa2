"""The trained module against numbers that Levanter produced: per-token loss, loss, gradients."""

import harness
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from ds_sft.data.collate import collate
from ds_sft.data.packed import PackedDataset
from ds_sft.model import attention
from ds_sft.model.sft import DeviceBatch, SftModel

CPU = torch.device("cpu")
PACKS = [0, 1, 2, 3, 4, 5]


def build(kind: str, directory) -> SftModel:
    attention.register("sdpa")
    causal_lm = AutoModelForCausalLM.from_pretrained(
        directory, attn_implementation=attention.NAME, dtype=torch.float32
    )
    return SftModel(causal_lm, loss_chunk_size=50)


@pytest.fixture(params=["untied", "tied"])
def kind(request):
    return request.param


@pytest.fixture
def model(kind, tiny_model, tiny_tied_model):
    return build(kind, tiny_model if kind == "untied" else tiny_tied_model)


@pytest.fixture
def batch(tiny_data):
    return DeviceBatch.from_host(collate(PackedDataset.open(tiny_data), PACKS, len(PACKS)), CPU)


def golden(kind: str, name: str):
    return np.load(harness.GOLDEN / "tiny_qwen3" / kind / "batch_and_losses.npz")[name]


def test_loss_of_every_trained_token_is_levanters(kind, model, batch):
    with torch.no_grad():
        hidden = model.hidden_states(batch)
        losses = [
            model.lm_head(hidden, batch.positions[i : i + 1], batch.labels[i : i + 1]).item()
            for i in range(len(batch.labels))
        ]
    trained = golden(kind, "loss_mask").reshape(-1).nonzero()[0]
    assert batch.positions.tolist() == trained.tolist()
    wanted = golden(kind, "per_token_nll_all").reshape(-1)[trained]
    assert np.abs(np.array(losses) - wanted).max() <= 1e-4


def test_gradients_of_the_mean_loss_are_levanters(kind, model, batch):
    (model(batch) / len(batch.labels)).backward()
    wanted = load_file(harness.GOLDEN / "tiny_qwen3" / kind / "grads.safetensors")
    got = {name: p.grad for name, p in model.named_parameters()}
    assert got.keys() == wanted.keys()
    for name, gradient in got.items():
        error = (gradient - wanted[name]).norm() / wanted[name].norm()
        assert error <= 1e-5, (name, error)


def test_parameter_names_are_the_hugging_face_names(kind, model, tiny_model):
    names = [name for name, _ in model.named_parameters()]
    files = harness.GOLDEN / "tiny_qwen3" / kind / "model.safetensors"
    assert sorted(names) == sorted(load_file(files))


def test_positions_run_on_over_the_documents_of_a_pack(batch):
    """A loss test cannot see a restart (RoPE is relative): the numbers are asserted."""
    assert batch.position_ids.tolist() == [list(range(64)) * len(PACKS)]
    assert batch.cu_seq_lens.dtype is torch.int32
    assert isinstance(batch.max_length, int)


def test_segments_reach_the_attention_function(model, batch, monkeypatch):
    seen = []
    real = attention._per_document

    def spy(*args):
        seen.append(args)
        return real(*args)

    monkeypatch.setattr(attention, "_per_document", spy)
    attention.register("sdpa")
    with torch.no_grad():
        model(batch)
    assert len(seen) == 2  # layers
    *_, lengths, bounds, longest = seen[0]
    assert list(lengths) == batch.segment_lengths
    assert bounds.tolist() == [0, *np.cumsum(batch.segment_lengths)]
    assert longest == max(batch.segment_lengths)

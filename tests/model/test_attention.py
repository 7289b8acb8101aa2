"""Document attention against one call with a dense block-diagonal mask."""

import pytest
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from ds_sft.errors import ConfigError
from ds_sft.model import attention

LENGTHS = [5, 1, 17, 9]
CPU = torch.device("cpu")


def qkv(dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    shape = (1, 4, sum(LENGTHS), 8)
    return [
        torch.randn(1, heads, *shape[2:], generator=generator).to(dtype).requires_grad_()
        for heads in (4, 2, 2)
    ]


def run(q, k, v, lengths, **asked):
    attention.register("sdpa")
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    function = AttentionInterface()[attention.NAME]
    out, _ = function(torch.nn.Identity(), q, k, v, None, scaling=0.3, segment_lengths=lengths,
                      cu_seq_lens_q=bounds, max_length_q=max(lengths), **asked)  # fmt: skip
    return out


def dense(q, k, v, lengths, window=None):
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    back = torch.arange(len(segment))[:, None] - torch.arange(len(segment))[None, :]
    mask = (segment[:, None] == segment[None, :]) & (back >= 0) & (back < (window or len(segment)))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True, scale=0.3)
    return out.transpose(1, 2)


def test_output_and_gradients_equal_those_of_a_block_diagonal_mask():
    tensors = qkv()
    out = run(*tensors, LENGTHS)
    want = dense(*tensors, LENGTHS)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(2))
    got_grads = torch.autograd.grad((out * weights).sum(), tensors)
    want_grads = torch.autograd.grad((want * weights).sum(), tensors)
    for got, wanted in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("window", [1, 2, 4, 5, 8, 9, 16, 17, 18, 100])
def test_a_window_is_a_band_of_so_many_tokens_with_ones_own(window):
    tensors = qkv()
    out = run(*tensors, LENGTHS, sliding_window=window)
    want = dense(*tensors, LENGTHS, window)
    torch.testing.assert_close(out, want, rtol=1e-5, atol=1e-6)
    got_grads = torch.autograd.grad(out.square().sum(), tensors)
    want_grads = torch.autograd.grad(want.square().sum(), tensors)
    for got, wanted in zip(got_grads, want_grads, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("window", "largest"), [(5, 5 * 9), (None, 17 * 17)])
def test_a_window_needs_scores_of_a_window_only(window, largest, monkeypatch):
    seen = []
    real = F.scaled_dot_product_attention

    def spy(query, key, value, **how):
        seen.append(query.shape[2] * key.shape[2])
        return real(query, key, value, **how)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    run(*qkv(), LENGTHS, sliding_window=window)
    assert max(seen) == largest


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"softcap": 50.0}, "Identity asks its attention for softcap"),
        ({"s_aux": torch.zeros(4)}, "asks its attention for s_aux"),
        ({"dropout": 0.1}, "attention_dropout=0.1 is not supported"),
    ],
)
def test_what_no_kernel_does_is_refused_and_never_left_out(asked, message):
    with pytest.raises(ConfigError, match=message):
        run(*qkv(), LENGTHS, **asked)
    run(*qkv(), LENGTHS, softcap=None, position_ids=torch.zeros(1))


def test_a_model_that_does_not_hand_the_documents_on_is_refused():
    attention.register("sdpa")
    with pytest.raises(ConfigError, match="does not hand on to its attention where documents end"):
        AttentionInterface()[attention.NAME](torch.nn.Identity(), *qkv(), None, scaling=1.0)


@pytest.mark.parametrize("kernel", ["varlen", "flash_attention_2"])
def test_a_head_that_a_kernel_cannot_take_goes_to_the_loop(kernel, monkeypatch):
    """Gemma 4's global layers have heads of 512, its others of 256."""
    seen = []
    monkeypatch.setattr(attention, "_flash", lambda q, *_: seen.append(q.shape[-1]) or q)
    monkeypatch.setattr(attention, "_torch_varlen", lambda q, *_: seen.append(q.shape[-1]) or q)
    real = attention._per_document
    monkeypatch.setattr(attention, "_per_document", lambda *a: seen.append("loop") or real(*a))
    attention.register(kernel)
    for size in (256, 512):
        q = torch.randn(1, 2, 6, size)
        AttentionInterface()[attention.NAME](
            torch.nn.Identity(), q, q, q, None, scaling=1.0, segment_lengths=[6],
            cu_seq_lens_q=torch.tensor([0, 6]), max_length_q=6,
        )  # fmt: skip
    assert seen == [256, "loop"]


@pytest.mark.parametrize("asked", ["flash_attention_2", "varlen"])
def test_heads_that_are_too_large_are_refused_where_the_kernel_was_asked_for(asked):
    with pytest.raises(ConfigError, match=r"takes heads of up to 256.* of 512: use --attn-impl"):
        attention.choose(asked, torch.device("cuda", 0), torch.bfloat16, [256, 512])
    assert attention.choose("sdpa", CPU, torch.float32, [512]) == ("sdpa", "asked for")


def test_the_replacement_for_large_heads_is_said(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    gpu = torch.device("cuda", 0)
    kernel, why = attention.choose("auto", gpu, torch.bfloat16, [256, 512])
    assert (kernel, why) == (
        "flash_attention_2", "installed; sdpa where a head has 512, more than its 256"
    )  # fmt: skip
    assert attention.choose("auto", gpu, torch.bfloat16, [128])[1] == "installed"


def test_ignoring_the_segments_would_be_seen():
    tensors = qkv()
    assert not torch.allclose(run(*tensors, LENGTHS), dense(*tensors, [sum(LENGTHS)]), atol=1e-3)


@pytest.mark.parametrize("asked", ["flash_attention_2", "varlen"])
def test_a_kernel_that_cannot_run_here_is_refused_and_never_replaced(asked):
    with pytest.raises(ConfigError, match=f"--attn-impl {asked}"):
        attention.choose(asked, CPU, torch.bfloat16)


def test_auto_takes_the_loop_on_a_cpu_and_varlen_on_a_gpu_without_flash_attn(monkeypatch):
    assert attention.choose("auto", CPU, torch.bfloat16)[0] == "sdpa"
    gpu = torch.device("cuda", 0)
    assert attention.choose("auto", gpu, torch.float32)[0] == "sdpa"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert attention.choose("auto", gpu, torch.bfloat16)[0] == "varlen"
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    assert attention.choose("auto", gpu, torch.bfloat16)[0] == "flash_attention_2"

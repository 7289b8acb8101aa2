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


def run(q, k, v, lengths):
    attention.register("sdpa")
    bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
    function = AttentionInterface()[attention.NAME]
    out, _ = function(torch.nn.Identity(), q, k, v, None, scaling=0.3, segment_lengths=lengths,
                      cu_seq_lens_q=bounds, max_length_q=max(lengths))  # fmt: skip
    return out


def dense(q, k, v, lengths):
    segment = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    causal = torch.ones(len(segment), len(segment), dtype=torch.bool).tril()
    mask = (segment[:, None] == segment[None, :]) & causal
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

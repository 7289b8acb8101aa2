"""What only a CUDA device can show, in one file of at most eight minutes.

python -m pytest tests/gpu -m gpu
"""

import harness
import pytest
import torch
from transformers import AttentionInterface

from ds_sft.model import attention
from ds_sft.model.loss import LossHead

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]
LENGTHS = [37, 1, 300, 174]


def attend(kernel: str, tensors: list[torch.Tensor]) -> torch.Tensor:
    attention.register(kernel)
    bounds = torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)], dtype=torch.int32, device="cuda")
    function = AttentionInterface()[attention.NAME]
    out, _ = function(torch.nn.Identity(), *tensors, None, scaling=0.125, segment_lengths=LENGTHS,
                      cu_seq_lens_q=bounds, max_length_q=max(LENGTHS))  # fmt: skip
    return out


def qkv() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = [(1, heads, sum(LENGTHS), 64) for heads in (8, 2, 2)]
    return [torch.randn(s, device="cuda", dtype=torch.bfloat16, requires_grad=True) for s in shapes]


@pytest.mark.parametrize("kernel", ["varlen", "flash_attention_2"])
def test_varlen_kernels_equal_one_call_per_document(kernel):
    if kernel == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="flash-attn is an optional extra")
    tensors = qkv()
    got, want = attend(kernel, tensors), attend("sdpa", tensors)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    weights = torch.randn_like(got)
    ours = torch.autograd.grad((got * weights).sum(), tensors)
    theirs = torch.autograd.grad((want * weights).sum(), tensors)
    for a, b in zip(ours, theirs, strict=True):
        assert ((a - b).float().norm() / b.float().norm()).item() < 2e-2


@pytest.mark.parametrize("kernel", ["varlen", "flash_attention_2"])
def test_varlen_kernels_isolate_documents_bit_for_bit(kernel):
    if kernel == "flash_attention_2":
        pytest.importorskip("flash_attn", reason="flash-attn is an optional extra")
    tensors = [t.detach() for t in qkv()]
    base = attend(kernel, tensors)
    changed = [t.clone() for t in tensors]
    for tensor in changed:
        tensor[:, :, : LENGTHS[0]] += 1
    moved = attend(kernel, changed)
    assert not torch.equal(moved[:, : LENGTHS[0]], base[:, : LENGTHS[0]])
    assert torch.equal(moved[:, LENGTHS[0] :], base[:, LENGTHS[0] :])


def test_head_holds_a_chunk_of_logits_and_no_more():
    tokens, hidden_size, vocab, chunk = 8192, 1024, 151_936, 1024
    hidden = torch.randn(tokens, hidden_size, device="cuda", dtype=torch.bfloat16).requires_grad_()
    weight = torch.nn.Parameter(
        torch.randn(vocab, hidden_size, device="cuda", dtype=torch.bfloat16) * 0.02
    )
    labels = torch.randint(0, vocab, (tokens,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    LossHead(weight, chunk)(hidden, torch.arange(tokens, device="cuda"), labels).backward()
    peak = torch.cuda.max_memory_allocated() - before
    # Gradient of the weight in fp32, its bf16 copy and one product, and about four chunk arrays.
    assert peak < 8 * vocab * hidden_size + 4 * 4 * chunk * vocab
    assert peak < 4 * tokens * vocab  # less than the logits of the row in fp32


@pytest.mark.parametrize("config", ["zero3", "zero3_offload_optimizer"])
def test_training_on_one_gpu_follows_levanters_curve(config, tiny_model, tiny_data, tmp_path):
    changes = {
        "--compute-dtype": "bfloat16",
        "--deepspeed-config": harness.ROOT / f"ds_configs/{config}.json",
        "--attn-impl": "sdpa",
    }
    words = harness.flags(tiny_model, tiny_data, tmp_path / "run", changes)
    done = harness.launch(1, *words, timeout=400, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stdout[-4000:]
    golden = harness.golden_trajectory("untied")
    losses = [row["loss"] for row in harness.metrics(tmp_path / "run")]
    assert max(abs(a - b["loss"]) for a, b in zip(losses, golden, strict=True)) < 2e-2

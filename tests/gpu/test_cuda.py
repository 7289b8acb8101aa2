"""What only a CUDA device can show, in one file of at most eight minutes.

python -m pytest tests/gpu -m gpu
"""

from typing import Any

import harness
import pytest
import torch
from transformers import (
    AttentionInterface,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ds_sft.model import attention, layers, liger
from ds_sft.model.layers import LayerChoices
from ds_sft.model.loss import LossHead
from ds_sft.model.offload import HostParking
from ds_sft.model.sft import DeviceBatch, SftModel
from ds_sft.model.tiled_mlp import Tiles, tile

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


GPU = torch.device("cuda")
CHOICES: dict[str, dict[str, Any]] = {
    "all kept": {"recompute_every": 0},
    "every second": {"recompute_every": 2},
    "offloaded": {"offload_activations": True},
    "tiles": {"mlp_tiles": 5},
    "liger": {"liger": True},
    "all": {"mlp_tiles": 5, "offload_activations": True, "liger": True},
}


def small_model(name: str, dtype: torch.dtype, **choices: Any) -> SftModel:
    """A model of 6 layers with random weights, norms that are not ones, and documents."""
    config_class, model_class = {
        "qwen3": (Qwen3Config, Qwen3ForCausalLM),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM),
        "llama": (LlamaConfig, LlamaForCausalLM),
    }[name]
    attention.register("sdpa")
    torch.manual_seed(0)
    config = config_class(
        hidden_size=256, intermediate_size=768, num_hidden_layers=6, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, vocab_size=1000, attn_implementation=attention.NAME,
    )  # fmt: skip
    causal_lm = model_class(config)
    with torch.no_grad():
        for parameter in causal_lm.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.05 + (parameter.ndim == 1))
    causal_lm = causal_lm.to(GPU, dtype)
    layers.apply(causal_lm, LayerChoices(**choices), GPU)
    return SftModel(causal_lm, loss_chunk_size=100).train()


def trained(model: SftModel) -> dict[str, torch.Tensor]:
    """Loss and gradients of one microbatch."""
    total = sum(LENGTHS)
    generator = torch.Generator().manual_seed(1)
    batch = DeviceBatch(
        input_ids=torch.randint(0, 1000, (1, total), generator=generator).cuda(),
        position_ids=torch.arange(total, device=GPU)[None],
        positions=torch.arange(total, device=GPU),
        labels=torch.randint(0, 1000, (total,), generator=generator).cuda(),
        cu_seq_lens=torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0)]).int().cuda(),
        segment_lengths=LENGTHS,
        max_length=max(LENGTHS),
    )
    loss = model(batch)
    (loss * 0.37).backward()
    return {"loss": loss.detach()} | {n: p.grad for n, p in model.named_parameters()}


def apart(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
    return max(
        ((got[n].double() - want[n].double()).norm() / want[n].double().norm()).item() for n in want
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("model_type", liger.ARCHITECTURES)
def test_compiled_liger_kernels_compute_what_the_plain_modules_do(model_type, dtype):
    pytest.importorskip("liger_kernel", reason="liger-kernel is an optional extra")
    assert liger.obstacle({"model_type": model_type, "hidden_act": "silu"}, GPU) is None
    exact = trained(small_model(model_type, torch.float32))
    plain = trained(small_model(model_type, dtype))
    patched = trained(small_model(model_type, dtype, liger=True))  # rotation for good: comes last
    if dtype is torch.float32:
        assert apart(patched, plain) <= 1e-5
    else:
        assert apart(patched, exact) <= 1.5 * apart(plain, exact)


@pytest.mark.parametrize("name", CHOICES)
def test_a_choice_for_layers_gives_the_gradients_of_recomputing_all(name):
    if CHOICES[name].get("liger"):
        pytest.importorskip("liger_kernel", reason="liger-kernel is an optional extra")
    want = trained(small_model("qwen3", torch.float32))
    got = trained(small_model("qwen3", torch.float32, **CHOICES[name]))
    if "mlp_tiles" in CHOICES[name] or "liger" in CHOICES[name]:
        assert apart(got, want) <= 1e-5
    else:
        assert all(torch.equal(got[n], want[n]) for n in want)


class Stack:
    """Checkpointed layers wide enough that a copy takes longer than a layer computes."""

    def __init__(self, count: int, width: int) -> None:
        self.parking = HostParking(GPU)
        self.weights = [torch.randn(width, device=GPU, requires_grad=True) for _ in range(count)]

    def __call__(self, hidden: torch.Tensor, offload: bool) -> torch.Tensor:
        for weight in self.weights:

            def layer(x: torch.Tensor, weight: torch.Tensor = weight) -> torch.Tensor:
                return x + (x * weight).tanh()

            if offload:
                hidden = self.parking.checkpoint(layer, hidden)
            else:
                hidden = torch.utils.checkpoint.checkpoint(layer, hidden, use_reentrant=False)
        return hidden.square().sum()


def test_copies_beside_the_computation_never_race_with_it():
    """Memory that is freed early, read late or used twice shows as a changed bit."""
    stack = Stack(12, 4096)
    for seed in range(20):
        torch.manual_seed(seed)
        hidden = torch.randn(4096, 4096, device=GPU)
        want = torch.autograd.grad(stack(hidden, offload=False), stack.weights)
        got = torch.autograd.grad(stack(hidden, offload=True), stack.weights)
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True)), seed
    buffers = [b for kind in stack.parking.free.values() for b in kind]
    assert len(buffers) == 12
    assert all(b.is_pinned() for b in buffers)


def test_offloaded_inputs_leave_the_device():
    stack, hidden = Stack(12, 4096), torch.randn(4096, 4096, device=GPU)
    held = {}
    for offload in (False, True):
        before = torch.cuda.memory_allocated()
        loss = stack(hidden, offload)
        torch.cuda.synchronize()
        held[offload] = torch.cuda.memory_allocated() - before
        del loss
    size = hidden.numel() * 4
    assert held[False] >= 11 * size
    assert held[True] <= 3 * size


@pytest.mark.parametrize("tiles", [0, "auto"])
def test_tiles_bound_what_an_mlp_holds(tiles: Tiles):
    width, inner = 1024, 4096
    peaks = []
    for tokens in (8192, 32768):
        module = Qwen3MLP(Qwen3Config(hidden_size=width, intermediate_size=inner))
        module = module.to(GPU, torch.bfloat16)
        if tiles:
            tile(module, tiles)
        hidden = torch.randn(1, tokens, width, device=GPU, dtype=torch.bfloat16).requires_grad_()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        module(hidden).sum().backward()
        peaks.append(torch.cuda.max_memory_allocated() - before)
    growth = (peaks[1] - peaks[0]) / (32768 - 8192) / 2  # values a token of the row adds
    assert growth <= 6 * width if tiles else growth >= 4 * inner


def test_training_with_every_saving_of_memory_follows_levanters_curve(
    tiny_model, tiny_data, tmp_path
):
    changes = {
        "--compute-dtype": "bfloat16", "--attn-impl": "sdpa", "--offload-activations": True,
        "--mlp-tiles": 3, "--deepspeed-config": harness.ROOT / "ds_configs/zero3.json",
    }  # fmt: skip
    words = harness.flags(tiny_model, tiny_data, tmp_path / "run", changes)
    done = harness.launch(1, *words, timeout=400, DS_ACCELERATOR="cuda")
    assert done.returncode == 0, done.stdout[-4000:]
    golden = harness.golden_trajectory("untied")
    losses = [row["loss"] for row in harness.metrics(tmp_path / "run")]
    assert max(abs(a - b["loss"]) for a, b in zip(losses, golden, strict=True)) < 2e-2


def test_apollo_on_a_gpu_and_in_host_memory_is_apollo_on_a_cpu(tiny_model, tiny_data, tmp_path):
    """Projections are made on the CPU; an offloaded state has a group of its own to reduce in."""
    losses = {}
    for name, device, config in (
        ("cpu", "cpu", "zero3"),
        ("gpu", "cuda", "zero3"),
        ("offloaded", "cuda", "zero3_offload_optimizer"),
    ):
        changes = {
            "--optimizer": "apollo", "--apollo-rank": 8, "--apollo-update-proj-gap": 5,
            "--attn-impl": "sdpa", "--deepspeed-config": harness.ROOT / f"ds_configs/{config}.json",
        }  # fmt: skip
        words = harness.flags(tiny_model, tiny_data, tmp_path / name, changes)
        done = harness.launch(1, *words, timeout=400, DS_ACCELERATOR=device)
        assert done.returncode == 0, done.stdout[-4000:]
        losses[name] = [row["loss"] for row in harness.metrics(tmp_path / name)]
    for name in ("gpu", "offloaded"):
        assert max(abs(a - b) for a, b in zip(losses[name], losses["cpu"], strict=True)) < 1e-3

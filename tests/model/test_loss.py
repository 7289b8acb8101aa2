"""The head against torch's own cross-entropy."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from ds_sft.model.loss import LossHead

T, H, V = 37, 16, 101


def inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.nn.Parameter, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(T, H, generator=generator).to(dtype).requires_grad_()
    weight = torch.nn.Parameter(torch.randn(V, H, generator=generator).to(dtype))
    targets = torch.randint(0, V, (T,), generator=generator)
    targets[torch.rand(T, generator=generator) < 0.4] = -100
    return hidden, weight, targets


def ours(hidden, weight, targets, chunk):
    positions = torch.nonzero(targets != -100).flatten()
    return LossHead(weight, chunk)(hidden, positions, targets[positions])


@pytest.mark.parametrize("chunk", [0, 1, 5, 1000])
def test_sum_and_gradients_equal_torchs_in_float32(chunk):
    hidden, weight, targets = inputs(torch.float32)
    factor = 0.37  # the loss scale arrives after the sum
    got = ours(hidden, weight, targets, chunk) * factor
    got.backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    want = (
        F.cross_entropy(hidden @ weight.t(), targets, ignore_index=-100, reduction="sum") * factor
    )
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grads[0], hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[1], weight.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("chunk", [0, 5])
@pytest.mark.parametrize("softcap", [0.5, 3.0, 30.0])
def test_capped_logits_and_their_gradients_equal_torchs(chunk: int, softcap: float) -> None:
    hidden, weight, targets = inputs(torch.float32)
    positions = torch.nonzero(targets != -100).flatten()
    got = LossHead(weight, chunk, softcap)(hidden, positions, targets[positions]) * 0.37
    got.backward()
    grads = hidden.grad.clone(), weight.grad.clone()
    hidden.grad = weight.grad = None
    logits = softcap * torch.tanh(hidden @ weight.t() / softcap)
    assert (logits - hidden @ weight.t()).abs().max() > 1e-2  # the cap is felt
    want = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum") * 0.37
    want.backward()
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(grads[0], hidden.grad, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(grads[1], weight.grad, rtol=1e-5, atol=1e-6)


def test_bfloat16_gradients_are_those_of_float32_within_bfloat16_rounding():
    hidden, weight, targets = inputs(torch.bfloat16)
    ours(hidden, weight, targets, 5).backward()
    exact_hidden = hidden.detach().float().requires_grad_()
    exact_weight = weight.detach().float().requires_grad_()
    F.cross_entropy(
        exact_hidden @ exact_weight.t(), targets, ignore_index=-100, reduction="sum"
    ).backward()
    for got, want in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert got.dtype is torch.bfloat16
        assert ((got.float() - want).norm() / want.norm()).item() < 1e-2


def test_without_targets_the_loss_is_zero_and_every_gradient_exists_and_is_zero():
    hidden, weight, _ = inputs(torch.float32)
    loss = ours(hidden, weight, torch.full((T,), -100), 5)
    assert loss.item() == 0.0
    assert loss.requires_grad
    loss.backward()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_no_tensor_of_tokens_times_vocabulary_is_made():
    class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
        numel = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for tensor in torch.utils._pytree.tree_leaves(out):
                if isinstance(tensor, torch.Tensor):
                    self.numel = max(self.numel, tensor.numel())
            return out

    hidden, weight, targets = inputs(torch.float32)
    with LargestTensor() as seen:
        ours(hidden, weight, targets, 4).backward()
    assert seen.numel == V * H  # the weight's own gradient
    with LargestTensor() as seen:
        ours(hidden, weight, targets, 0).backward()
    assert seen.numel > V * H  # the probe can see a row of logits


def test_evaluation_computes_no_gradient():
    hidden, weight, targets = inputs(torch.float32)
    with torch.no_grad():
        loss = ours(hidden, weight, targets, 5)
    assert not loss.requires_grad
    torch.testing.assert_close(loss, ours(hidden, weight, targets, 5).detach())


def test_the_weight_is_used_once_whatever_the_number_of_targets():
    """Under ZeRO-3 a use is a gather: ranks with few and many targets must do the same number."""
    for count in (0, 1, T):
        hidden, weight, targets = inputs(torch.float32)
        targets = torch.where(torch.arange(T) < count, targets.clamp(min=0), -100)
        head = LossHead(weight, 5)
        uses = []
        head.register_forward_pre_hook(lambda *_, uses=uses: uses.append(1))
        positions = torch.nonzero(targets != -100).flatten()
        loss = head(hidden, positions, targets[positions])
        assert len(uses) == 1
        assert [fn for fn, _ in loss.grad_fn.next_functions if fn] != []
        assert sum("AccumulateGrad" in str(fn) for fn, _ in loss.grad_fn.next_functions) == 2


class CountMatmuls(TorchDispatchMode):
    """Counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.mm.default
        return func(*args, **(kwargs or {}))


def test_without_autograd_the_head_computes_the_same_loss_and_no_gradient() -> None:
    torch.manual_seed(0)
    head = LossHead(torch.nn.Parameter(torch.randn(17, 8)), chunk_size=4)
    hidden, positions = torch.randn(12, 8, requires_grad=True), torch.arange(12)
    labels = torch.randint(0, 17, (12,))
    with CountMatmuls() as with_gradient:
        trained = head(hidden, positions, labels)
    with torch.no_grad(), CountMatmuls() as without:
        evaluated = head(hidden, positions, labels)
    assert evaluated.item() == trained.item()
    assert not evaluated.requires_grad
    assert (with_gradient.count, without.count) == (9, 3)

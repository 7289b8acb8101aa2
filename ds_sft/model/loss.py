"""The head: cross-entropy over chunks of trained positions, never all logits at once.

Owns the loss sum and its gradient. Invariants: the weight is used once per microbatch, so under
ZeRO-3 the number of gathers does not depend on the data and ranks with few targets cannot
deadlock; a microbatch without targets gives 0 with zero gradients; logits, softmax and the
gradient of the weight are float32 whatever the compute dtype.

The gradients of a chunk are computed right after its loss, while its logits exist (the idea of
Liger's fused linear cross-entropy, arXiv:2410.10989), so no logits are kept and none are computed
twice. The factor that the caller puts on the sum arrives in backward and is applied there.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable


class LossHead(nn.Module):
    """The language-model head as a loss: owns `weight` [vocabulary, hidden].

    `softcap` bounds the logits to softcap * tanh(logits / softcap), as Gemma's heads do.
    """

    def __init__(self, weight: nn.Parameter, chunk_size: int, softcap: float | None = None) -> None:
        super().__init__()
        self.weight = weight
        self.chunk_size = chunk_size
        self.softcap = softcap

    def forward(
        self, hidden: torch.Tensor, positions: torch.Tensor, labels: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the cross-entropy over the trained positions, a float32 scalar.

        hidden [T, H]; positions [N] int64 into T; labels [N] int64, the token to predict there.
        """
        chunk = self.chunk_size or max(1, positions.numel())
        # Inside a Function autograd is off, and a parameter asks for a gradient even under no_grad:
        # asked here, so that an evaluation does not pay for gradients that nobody wants.
        wanted = torch.is_grad_enabled()
        return _ChunkedCrossEntropy.apply(
            hidden, self.weight, positions, labels, chunk, wanted, self.softcap
        )


class _ChunkedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        weight: torch.Tensor,
        positions: torch.Tensor,
        labels: torch.Tensor,
        chunk_size: int,
        wanted: bool,
        softcap: float | None,
    ) -> torch.Tensor:
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        with_grad = wanted and any(ctx.needs_input_grad[:2])
        if with_grad:
            grad_hidden = torch.zeros_like(hidden)
            grad_weight = torch.zeros_like(weight, dtype=torch.float32)
        for pos, label in zip(positions.split(chunk_size), labels.split(chunk_size), strict=True):
            inputs = hidden[pos]  # [C, H]
            logits = (inputs @ weight.t()).float()  # [C, V]
            slope = _cap(logits, softcap, with_grad) if softcap else None
            lse = logits.logsumexp(dim=1, keepdim=True)  # [C, 1]
            total += (lse - logits.gather(1, label[:, None])).sum()
            if with_grad:
                probs = logits.sub_(lse).exp_()
                probs[torch.arange(len(label), device=label.device), label] -= 1.0
                if slope is not None:
                    probs *= slope
                grad_logits = probs.to(hidden.dtype)
                grad_hidden[pos] = grad_logits @ weight
                grad_weight += grad_logits.t() @ inputs
        if with_grad:
            ctx.save_for_backward(grad_hidden, grad_weight)
            ctx.weight_dtype = weight.dtype
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_total: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return (
            (grad_hidden * grad_total).to(grad_hidden.dtype),
            grad_weight.mul_(grad_total).to(ctx.weight_dtype),
            None,
            None,
            None,
            None,
            None,
        )


def _cap(logits: torch.Tensor, softcap: float, with_slope: bool) -> torch.Tensor | None:
    """Cap float32 `logits` in place; returns the derivative of the capped ones if asked."""
    logits.div_(softcap).tanh_()
    slope = torch.addcmul(logits.new_ones(()), logits, logits, value=-1.0) if with_slope else None
    logits.mul_(softcap)
    return slope

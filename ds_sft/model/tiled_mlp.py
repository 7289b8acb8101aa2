"""The MLP of a layer over tiles of tokens: its inner activations do not grow with the row.

Owns forward and backward of down(act(gate x) * up x), computed tile by tile and once more in
backward. Invariants: one use of each weight per layer, so ZeRO-3 gathers it once and its gradient
is reduced once, whatever the number of tiles; gradients of weights are summed in float32 whatever
the compute dtype; the result is the untiled one up to the order of that sum.

The input is kept by a step of its own before anything is computed. A recomputed layer stops there:
its second forward skips the MLP, which computes what it needs again by tiles.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import deepspeed
import torch
from torch.autograd.function import once_differentiable

from ds_sft.errors import ConfigError

AUTO_LEAST_TOKENS = 1024

# gate [T, I], up [T, I] -> [T, I]
Multiply = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
Tiles = int | Literal["auto"]


def rows_of_tile(tiles: Tiles, tokens: int, hidden_size: int) -> int:
    """Tokens of one tile for a row of `tokens`.

    "auto" takes as many as the model is wide: then the inner activations of a tile, about 7 in
    bfloat16, weigh about what the float32 gradients of the three weights do, and smaller tiles
    would save little.
    """
    if tiles == "auto":
        return max(hidden_size, AUTO_LEAST_TOKENS)
    return -(-tokens // max(1, tiles))


def tile(mlp: Any, tiles: Tiles, multiply: Multiply | None = None) -> None:
    """Make `mlp`, a module with gate_proj, up_proj, down_proj and act_fn, work by tiles.

    `multiply` replaces act_fn(gate) * up. Raises ConfigError for projections with a bias.
    """
    names = ("gate_proj", "up_proj", "down_proj")
    if not all(hasattr(mlp, name) for name in (*names, "act_fn")):
        raise ConfigError(
            f"--mlp-tiles {tiles}: {type(mlp).__name__} is not made of {', '.join(names)}: use "
            "--mlp-tiles 0"
        )
    projections = [getattr(mlp, name) for name in names]
    if any(projection.bias is not None for projection in projections):
        raise ConfigError(f"--mlp-tiles {tiles}: this model's MLP has a bias: use --mlp-tiles 0")
    for projection in projections:
        # Gathered for and released after the MLP itself, as the projections are never called.
        deepspeed.zero.register_external_parameter(mlp, projection.weight)

    def plain(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        return mlp.act_fn(gate) * up

    def forward(hidden: torch.Tensor) -> torch.Tensor:
        flat = hidden.reshape(-1, hidden.shape[-1])  # [T, H]
        kept: list[Any] = []
        flat = _Keep.apply(flat, kept)
        weights = [projection.weight for projection in projections]
        rows = rows_of_tile(tiles, *flat.shape)
        out = _TiledMlp.apply(flat, *weights, kept[0], multiply or plain, rows)
        return out.view(hidden.shape)

    mlp.forward = forward


class _Keep(torch.autograd.Function):
    """Saves its input for a later step's backward and hands it on."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, kept: list[Any]) -> torch.Tensor:
        ctx.save_for_backward(hidden)
        kept.append(ctx)
        return hidden.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


class _TiledMlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        gate: torch.Tensor,
        up: torch.Tensor,
        down: torch.Tensor,
        kept: Any,
        multiply: Multiply,
        rows: int,
    ) -> torch.Tensor:
        # Not saved tensors: those would make a recomputed layer run to their end, and ZeRO-3 puts
        # the values of a parameter back into the same object.
        ctx.weights = (gate, up, down)
        ctx.kept, ctx.multiply, ctx.rows = kept, multiply, rows
        out = torch.empty_like(hidden)
        for part, into in zip(hidden.split(rows), out.split(rows), strict=True):
            torch.mm(multiply(part @ gate.t(), part @ up.t()), down.t(), out=into)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_out: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (hidden,) = ctx.kept.saved_tensors
        gate, up, down = ctx.weights
        grad_hidden = torch.empty_like(hidden)
        grads = [torch.zeros_like(weight, dtype=torch.float32) for weight in ctx.weights]
        parts = (tensor.split(ctx.rows) for tensor in (hidden, grad_out, grad_hidden))
        for part, grad_part, into in zip(*parts, strict=True):
            gated, upped = (part @ gate.t()).requires_grad_(), (part @ up.t()).requires_grad_()
            with torch.enable_grad():
                inner = ctx.multiply(gated, upped)  # [tile, I]
            grad_gated, grad_upped = torch.autograd.grad(inner, (gated, upped), grad_part @ down)
            grads[0] += grad_gated.t() @ part
            grads[1] += grad_upped.t() @ part
            grads[2] += grad_part.t() @ inner.detach()
            torch.mm(grad_gated, gate, out=into).addmm_(grad_upped, up)
        for i, weight in enumerate(ctx.weights):
            grads[i] = grads[i].to(weight.dtype)
        return grad_hidden, *grads, None, None, None

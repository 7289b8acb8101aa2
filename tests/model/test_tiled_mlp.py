"""The tiled MLP against the plain one of transformers, and what it holds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from memory_peak import MemoryPeak
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP

from ds_sft.errors import ConfigError
from ds_sft.model.tiled_mlp import Tiles, rows_of_tile, tile

H, I, T = 16, 48, 37  # noqa: E741


def mlp(tiles: Tiles = 0, dtype: torch.dtype = torch.float32) -> Qwen3MLP:
    torch.manual_seed(0)
    made = Qwen3MLP(Qwen3Config(hidden_size=H, intermediate_size=I)).to(dtype)
    if tiles:
        tile(made, tiles)
    return made


def row(tokens: int = T, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(1, tokens, H, generator=generator).to(dtype).requires_grad_()


def results(module: Qwen3MLP, hidden: torch.Tensor) -> list[torch.Tensor]:
    """Output and the gradients of input and weights."""
    out = module(hidden)
    weights = torch.linspace(-1, 1, out.numel()).view_as(out)
    wanted = [hidden, *(p for _, p in sorted(module.named_parameters()))]
    return [out, *torch.autograd.grad((out * weights).sum(), wanted)]


def relative(got: torch.Tensor, want: torch.Tensor) -> float:
    return ((got.double() - want.double()).norm() / want.double().norm()).item()


@pytest.mark.parametrize("tiles", [2, 5, T, 1000, "auto"])
def test_output_and_gradients_are_the_plain_ones(tiles: Tiles) -> None:
    for got, want in zip(results(mlp(tiles), row()), results(mlp(), row()), strict=True):
        assert got.shape == want.shape
        assert relative(got, want) <= 1e-6


def test_in_bfloat16_the_gradients_are_nearer_to_exact_than_the_plain_ones() -> None:
    """Sums over tiles are float32; each plain product rounds once, each tile's own too."""
    exact = results(mlp(dtype=torch.bfloat16).double(), row(400, torch.bfloat16).double())
    plain = results(mlp(dtype=torch.bfloat16), row(400, torch.bfloat16))
    tiled = results(mlp(7, torch.bfloat16), row(400, torch.bfloat16))
    for got, reference, want in zip(tiled, plain, exact, strict=True):
        assert got.dtype is torch.bfloat16
        assert relative(got, want) <= max(1.2 * relative(reference, want), 5e-3)


def test_without_gradients_the_output_is_the_same() -> None:
    with torch.no_grad():
        out = mlp(5)(row())
    assert not out.requires_grad
    torch.testing.assert_close(out, mlp()(row()))


def recomputed(module: Qwen3MLP, hidden: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda x: x * 2 + module(x.tanh()), hidden, use_reentrant=False)


def test_recomputing_a_layer_gives_the_same_gradients() -> None:
    def grads(module: Qwen3MLP) -> tuple[torch.Tensor, ...]:
        hidden = row()
        loss = recomputed(module, hidden).square().sum()
        return torch.autograd.grad(loss, [hidden, *module.parameters()])

    for got, want in zip(grads(mlp(4)), grads(mlp()), strict=True):
        assert relative(got, want) <= 1e-6


def test_recomputing_a_layer_does_not_compute_the_tiles_a_third_time() -> None:
    module, rows = mlp(4), []
    module.act_fn.register_forward_hook(lambda *call: rows.append(len(call[2])))
    loss = recomputed(module, row()).sum()
    assert sum(rows) == T
    loss.backward()
    assert sum(rows) == 2 * T


def test_each_weight_is_used_once_whatever_the_tiles() -> None:
    """Under ZeRO-3 a use is a gather and a reduction."""
    for tiles in (2, 9):
        out = mlp(tiles)(row())
        uses = [fn for fn, _ in out.grad_fn.next_functions[0][0].next_functions if fn]
        assert sum("AccumulateGrad" in str(fn) for fn in uses) == 3


def inner_peak(tiles: Tiles, tokens: int, run: Callable[..., torch.Tensor]) -> int:
    """Bytes at the peak of forward and backward, less what [T, H] tensors make of it."""
    module, hidden = mlp(tiles), row(tokens)
    with MemoryPeak() as memory:
        run(module, hidden).sum().backward()
    return memory.peak


@pytest.mark.parametrize("run", [lambda m, x: m(x), recomputed], ids=["kept", "recomputed"])
def test_a_longer_row_adds_rows_as_wide_as_the_model_and_none_as_wide_as_the_mlp(
    run: Callable[..., torch.Tensor],
) -> None:
    def growth(tiles_short: Tiles, tiles_long: Tiles) -> float:
        """Floats a token of a longer row adds to the peak."""
        short, long = inner_peak(tiles_short, 256, run), inner_peak(tiles_long, 1024, run)
        return (long - short) / (1024 - 256) / 4

    tiled, plain = growth(8, 32), growth(0, 0)
    assert tiled <= 6 * H
    assert plain >= 5 * I
    assert tiled < plain / 2


def test_no_tensor_of_tokens_times_inner_width_is_made() -> None:
    module, hidden = mlp(8), row(256)
    with MemoryPeak() as memory:
        module(hidden).sum().backward()
    assert memory.largest == 4 * max(256 * H, I * H)
    with MemoryPeak() as memory:
        mlp()(hidden).sum().backward()
    assert memory.largest == 4 * 256 * I  # the probe can see one


@pytest.mark.parametrize(
    ("tiles", "tokens", "rows"),
    [(2, 37, 19), (1, 37, 37), (1000, 37, 1), ("auto", 32768, 4096)],
)
def test_rows_of_a_tile(tiles: Tiles, tokens: int, rows: int) -> None:
    assert rows_of_tile(tiles, tokens, 4096) == rows


def test_auto_tiles_of_a_narrow_model_are_long_enough_to_be_worth_it() -> None:
    assert rows_of_tile("auto", 32768, 64) == 1024


def test_an_mlp_with_a_bias_is_refused() -> None:
    biased = mlp()
    biased.up_proj = torch.nn.Linear(H, I, bias=True)
    with pytest.raises(ConfigError, match="--mlp-tiles 0"):
        tile(biased, 2)


def test_an_mlp_of_other_parts_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--mlp-tiles 2: Linear is not made of gate_proj, up_pr"):
        tile(torch.nn.Linear(2, 2), 2)

"""What a layer keeps for backward, where, and which kernels compute it.

Owns the choices that change memory and speed of the decoder layers and no loss beyond rounding, and
their order: kernels first, as tiles use them. Leaves each means to its own module.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from ds_sft.model import liger
from ds_sft.model.offload import HostParking
from ds_sft.model.tiled_mlp import Tiles, rows_of_tile, tile


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoices:
    """How the decoder layers of a model run."""

    recompute_every: int = 1
    """Every so many layers one is computed again in backward; 0 = none."""
    offload_activations: bool = False
    """Whether the inputs of those layers wait in host memory."""
    mlp_tiles: Tiles = 0
    """Tiles of an MLP over the tokens of a microbatch; 0 and 1 = off."""
    liger: bool = False
    """Whether Liger's kernels replace norms, rotation and the inside of the MLP."""

    @property
    def tiled(self) -> bool:
        """Whether MLPs run by tiles."""
        return self.mlp_tiles not in (0, 1)

    def recomputed(self, num_layers: int) -> int:
        """How many of a model's layers are computed again."""
        return -(-num_layers // self.recompute_every) if self.recompute_every else 0

    def lines(self, num_layers: int, hidden_size: int) -> Iterator[str]:
        """What is said once at the start."""
        count = self.recomputed(num_layers)
        where = "in host memory" if self.offload_activations else "on the device"
        inputs = f", their inputs wait {where}" if count else ""
        yield (
            f"recomputing {count} of {num_layers} layers (--recompute-every "
            f"{self.recompute_every}){inputs}"
        )
        if self.mlp_tiles == "auto":
            rows = rows_of_tile("auto", 0, hidden_size)
            yield f"MLP in tiles of up to {rows:,} tokens (--mlp-tiles auto, hidden {hidden_size})"
        elif self.tiled:
            yield f"MLP in {self.mlp_tiles} tiles of a microbatch's tokens (--mlp-tiles)"


def apply(causal_lm: Any, choices: LayerChoices, device: torch.device) -> None:
    """Make the layers of a Hugging Face model run as chosen; before DeepSpeed gets to see it."""
    if choices.liger:
        liger.apply(causal_lm)
    if choices.tiled:
        for layer in causal_lm.model.layers:
            tile(layer.mlp, choices.mlp_tiles, liger.silu_mul if choices.liger else None)
    if choices.recompute_every:
        causal_lm.activation_checkpointing_enable(
            {"use_reentrant": False}, every_n_layers=choices.recompute_every
        )
        if choices.offload_activations:
            parking = HostParking(device)
            for layer in causal_lm.model.layers:
                layer._gradient_checkpointing_func = parking.checkpoint

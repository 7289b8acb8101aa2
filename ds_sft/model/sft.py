"""What is trained: a Hugging Face causal language model whose head returns the loss.

Owns the module tree that DeepSpeed sees and the device form of a microbatch. Invariant: parameter
names are the Hugging Face names, so checkpoints and exports need no renaming. Leaves weights to
`load`, attention and head to their own modules.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from ds_sft.data.collate import IGNORE, HostBatch
from ds_sft.model import layers
from ds_sft.model.kinds import embeddings
from ds_sft.model.layers import LayerChoices
from ds_sft.model.loss import LossHead


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceBatch:
    """One microbatch as the model reads it; T = packs * max_seq_len, N = trained positions."""

    input_ids: torch.Tensor
    """[1, T] int64."""
    position_ids: torch.Tensor
    """[1, T] int64, contiguous over the documents of a pack."""
    positions: torch.Tensor
    """[N] int64: where a token is predicted."""
    labels: torch.Tensor
    """[N] int64: the token to predict there."""
    cu_seq_lens: torch.Tensor
    """[segments + 1] int32."""
    segment_lengths: list[int]
    """Documents and padding, in tokens; on the host, for the kernel that loops."""
    max_length: int
    """Longest segment."""

    @classmethod
    def from_host(cls, host: HostBatch, device: torch.device) -> DeviceBatch:
        """Copy to `device`; through pinned memory, without waiting, where that helps."""

        def move(array: Any) -> torch.Tensor:
            tensor = torch.from_numpy(array)
            if device.type == "cpu":
                return tensor
            return tensor.pin_memory().to(device, non_blocking=True)

        positions = np.flatnonzero(host.targets != IGNORE)
        return cls(
            input_ids=move(host.input_ids),
            position_ids=move(host.position_ids),
            positions=move(positions),
            labels=move(host.targets[positions]),
            cu_seq_lens=move(host.cu_seq_lens),
            segment_lengths=host.segment_lengths,
            max_length=host.max_length,
        )


_EVERY_LAYER_AGAIN = LayerChoices()
_CPU = torch.device("cpu")


def arrange(
    causal_lm: Any,
    loss_chunk_size: int,
    choices: LayerChoices = _EVERY_LAYER_AGAIN,
    device: torch.device = _CPU,
) -> SftModel:
    """`causal_lm` as it is trained: its layers as chosen, a chunked head."""
    for embedding in embeddings(causal_lm):
        # torch drops the gradient of the padding token's embedding; Levanter does not.
        embedding.padding_idx = None
    layers.apply(causal_lm, choices, device)
    return SftModel(causal_lm, loss_chunk_size)


class SftModel(nn.Module):
    """Backbone and loss head of `causal_lm`; a tied head stays the embedding's own parameter."""

    def __init__(self, causal_lm: Any, loss_chunk_size: int) -> None:
        super().__init__()
        self.model = causal_lm.model
        softcap = getattr(causal_lm.config, "final_logit_softcapping", None)
        self.lm_head = LossHead(causal_lm.lm_head.weight, loss_chunk_size, softcap)

    def hidden_states(self, batch: DeviceBatch) -> torch.Tensor:
        """Last hidden states [T, H]."""
        out = self.model(
            input_ids=batch.input_ids,
            position_ids=batch.position_ids,
            use_cache=False,
            cu_seq_lens_q=batch.cu_seq_lens,
            cu_seq_lens_k=batch.cu_seq_lens,
            max_length_q=batch.max_length,
            max_length_k=batch.max_length,
            segment_lengths=batch.segment_lengths,
        )
        return out.last_hidden_state[0]

    def forward(self, batch: DeviceBatch) -> torch.Tensor:
        """Summed cross-entropy over the trained positions, a float32 scalar."""
        return self.lm_head(self.hidden_states(batch), batch.positions, batch.labels)

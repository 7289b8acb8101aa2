"""Model FLOP utilisation: which share of the device's peak goes into the model's own arithmetic."""

from __future__ import annotations

import math

import numpy.typing as npt
import torch

from ds_sft.data.geometry import width_times_context
from ds_sft.data.model_files import ModelFiles
from ds_sft.recipe.decay import EMBEDDING, kind_of_name

TOKEN_EMBEDDING = "model.embed_tokens.weight"

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12}


def flops_per_token(model: ModelFiles, doc_lens: npt.ArrayLike) -> float:
    """Forward and backward FLOPs per document token: 6 N + 12 * layers * width * context.

    N excludes the input embeddings (lookups); context is the mean number of tokens attended to,
    half a document for each of its tokens, and no more than a layer's window.
    Recomputation is not counted. Source: PaLM (arXiv:2204.02311), appendix B.
    """
    lookups = sum(
        math.prod(shape)
        for name, (shape, _) in model.tensors.items()
        if kind_of_name(name) == EMBEDDING and not (model.tied and name == TOKEN_EMBEDDING)
    )
    attention = 6.0 * width_times_context(model.config, doc_lens)
    return 6.0 * (model.num_parameters - lookups) + attention


def mfu_factor(model: ModelFiles, doc_lens: npt.ArrayLike) -> float | None:
    """Factor from tokens/s per rank to MFU; None where the device's peak is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    return flops_per_token(model, doc_lens) / peak if peak else None

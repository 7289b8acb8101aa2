"""Model FLOP utilisation: which share of the device's peak goes into the model's own arithmetic."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from ds_sft.data.model_files import ModelFiles

# Dense bf16 peaks in FLOP/s, from NVIDIA's data sheets.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "A10G": 70e12}


def flops_per_token(model: ModelFiles, doc_lens: npt.ArrayLike) -> float:
    """Forward and backward FLOPs per document token: 6 N + 12 * layers * width * context.

    N excludes the input embedding (a lookup); context is the mean number of tokens attended to,
    half a document for each of its tokens, which gives 6 * layers * width * sum(n^2) / sum(n).
    Recomputation is not counted. Source: PaLM (arXiv:2204.02311), appendix B.
    """
    config = model.config
    embedding = 0 if model.tied else config["vocab_size"] * config["hidden_size"]
    heads = config["num_attention_heads"]
    width = heads * config.get("head_dim", config["hidden_size"] // heads)
    lengths = np.asarray(doc_lens, dtype=np.float64)
    context = float((lengths**2).sum() / max(lengths.sum(), 1.0))
    return (
        6.0 * (model.num_parameters - embedding)
        + 6.0 * config["num_hidden_layers"] * width * context
    )


def mfu_factor(model: ModelFiles, doc_lens: npt.ArrayLike) -> float | None:
    """Factor from tokens/s per rank to MFU; None where the device's peak is not known."""
    if not torch.cuda.is_available():
        return None
    name = torch.cuda.get_device_name()
    peak = next((value for key, value in PEAK_FLOPS.items() if key in name), None)
    return flops_per_token(model, doc_lens) / peak if peak else None

"""Which parameters decay: Levanter's default mask, by Hugging Face parameter name.

Excluded are norms (q_norm and k_norm too), embeddings and biases. An untied lm_head is an ordinary
linear layer and decays; a tied one is the embedding and does not. Source: Levanter
`optim/config.py`, `build_weight_decay_mask`.
"""

from __future__ import annotations


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to parameter `name` (`model.layers.0.mlp.up_proj.weight`)."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    return not (name.endswith("bias") or "norm" in module or module.startswith("embed_"))

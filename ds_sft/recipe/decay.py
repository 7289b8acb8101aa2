"""Which parameters decay: Levanter's default mask.

Excluded are norms (q_norm and k_norm too), embeddings and biases. An untied lm_head is an ordinary
linear layer and decays; a tied one is the embedding and does not. Source: Levanter
`optim/config.py`, `build_weight_decay_mask`, which goes by the class of the module.

Owns the names of the kinds. The engine asks the modules (`model.kinds`); before there are modules,
`kind_of_name` says the same of the tested architectures, which a test compares.
"""

from __future__ import annotations

EMBEDDING, HEAD, NORM, LINEAR, BIAS, OTHER = "embedding", "head", "norm", "linear", "bias", "other"
KINDS = (EMBEDDING, HEAD, NORM, LINEAR, BIAS, OTHER)
NOT_DECAYED = (EMBEDDING, NORM, BIAS)


def kind_decays(kind: str) -> bool:
    """Whether weight decay applies to parameters of `kind`."""
    return kind not in NOT_DECAYED


def kind_of_name(name: str) -> str:
    """Kind of parameter `name` (`model.layers.0.mlp.up_proj.weight`) of a tested architecture."""
    module = name.rpartition(".")[0].rpartition(".")[2]
    if name.endswith("bias"):
        return BIAS
    if "norm" in module:
        return NORM
    if module.startswith("embed_"):
        return EMBEDDING
    return HEAD if module == "lm_head" else LINEAR


def is_decayed(name: str) -> bool:
    """Whether weight decay applies to parameter `name` of a tested architecture."""
    return kind_decays(kind_of_name(name))

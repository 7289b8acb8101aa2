"""What each parameter is: embedding, head, norm, linear, bias or something else.

Owns the one classification from which the decay mask and an optimizer's routing are made.
Invariant: the class of the module that owns a parameter decides, never its name or its number of
dimensions: a name rule misses embeddings with another name, and under ZeRO-3 every parameter is
flat. A tensor that an embedding shares is the embedding, whichever module comes first: so is a tied
head. Any other shared tensor has the kind of its first owner.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from ds_sft.model.loss import LossHead
from ds_sft.recipe.decay import BIAS, EMBEDDING, HEAD, LINEAR, NORM, OTHER


def parameter_kinds(model: nn.Module) -> dict[str, str]:
    """Kind of each parameter of `model`, by the name that `named_parameters` gives it.

    Works on a Hugging Face causal language model and on an `SftModel`, partitioned or not.
    """
    head = _head(model)
    names: dict[int, str] = {}
    kinds: dict[str, str] = {}
    for prefix, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            kind = _kind(module, own_name, module is head)
            name = names.setdefault(id(parameter), f"{prefix}.{own_name}" if prefix else own_name)
            if name not in kinds or kind == EMBEDDING:
                kinds[name] = kind
    return kinds


def summary(kinds: Mapping[str, str]) -> str:
    """`169 linear, 57 norm, ...`: how many parameters there are of each kind, most first."""
    return ", ".join(f"{count} {kind}" for kind, count in Counter(kinds.values()).most_common())


def embeddings(model: nn.Module) -> Iterator[nn.Embedding]:
    """Every embedding of `model`: of the tokens, and of the tokens for each layer."""
    return (module for module in model.modules() if isinstance(module, nn.Embedding))


def _head(model: nn.Module) -> Any:
    """The module that turns hidden states into logits; None where there is none."""
    if isinstance(getattr(model, "lm_head", None), LossHead):
        return model.lm_head
    find = getattr(model, "get_output_embeddings", None)
    return None if find is None else find()


def _kind(module: nn.Module, own_name: str, is_head: bool) -> str:
    if own_name == "bias":
        return BIAS
    if isinstance(module, nn.Embedding):
        return EMBEDDING
    if "Norm" in type(module).__name__:
        return NORM
    if is_head:
        return HEAD
    return LINEAR if isinstance(module, nn.Linear) else OTHER

"""How much of a model ZeRO-3 has gathered at a time: DeepSpeed's coordinator, replayed.

Owns the walk over one recorded forward and backward pass with the rules of DeepSpeed 0.19's
parameter coordinator: fetch what a module needs, prefetch while the bucket and
`stage3_max_live_parameters` allow, release unless the parameter is used again within
`stage3_max_reuse_distance`. Numbers in, numbers out: no torch, no DeepSpeed.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

FORWARD, HEAD, LAYERS, EMBEDDING = "forward", "head", "layers", "embedding"
PHASES = (FORWARD, HEAD, LAYERS, EMBEDDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """One use of a tensor in the pass."""

    name: str
    """The tensor; a tied head is the embedding's."""
    phase: str
    """Part of the pass, one of PHASES."""


def trace(names: Sequence[str], tied: bool) -> list[Use]:
    """Uses of a decoder's tensors in order: forward, head, each layer again and backwards."""
    layers: dict[str, list[str]] = {}
    for name in names:
        if ".layers." in name:
            layers.setdefault(name.split(".layers.")[1].split(".")[0], []).append(name)
    ordered = [layers[key] for key in sorted(layers, key=int)]
    embedding = next(n for n in names if "embed_tokens" in n)
    head = embedding if tied else next(n for n in names if n.startswith("lm_head"))
    rest = [n for n in names if n not in {embedding, head} and ".layers." not in n]
    # Gemma 4 has more than the embedding before its layers.
    norm = [n for n in rest if n.endswith("model.norm.weight")]
    before = [embedding, *(n for n in rest if n not in norm)]
    uses = [Use(name=n, phase=FORWARD) for n in before]
    uses += [Use(name=n, phase=FORWARD) for layer in ordered for n in layer]
    uses += [Use(name=n, phase=FORWARD) for n in norm]
    uses += [Use(name=head, phase=HEAD)] * 2 + [Use(name=n, phase=LAYERS) for n in norm]
    for layer in reversed(ordered):  # recomputed, then backwards
        uses += [Use(name=n, phase=LAYERS) for n in [*layer, *reversed(layer)]]
    return [*uses, *(Use(name=n, phase=EMBEDDING) for n in reversed(before))]


def peaks(
    uses: Sequence[Use], numels: Mapping[str, int], zero: Mapping[str, Any]
) -> dict[str, int]:
    """Most elements gathered in each phase, persistent parameters aside.

    `zero` is the `zero_optimization` section; parameters below its persistence threshold are always
    there and counted elsewhere.
    """
    threshold = zero["stage3_param_persistence_threshold"]
    walk = [use for use in uses if numels[use.name] >= threshold]
    sums = [0]
    for use in walk:
        sums.append(sums[-1] + numels[use.name])
    coming: dict[str, list[int]] = {}
    for step, use in enumerate(walk):
        coming.setdefault(use.name, []).append(step)
    on_nvme = zero.get("offload_param", {}).get("device") == "nvme"
    bucket = 0 if on_nvme else zero["stage3_prefetch_bucket_size"]
    live: dict[str, int] = {}
    most = dict.fromkeys(PHASES, 0)
    ahead = 0  # first use that is not fetched yet
    for step, use in enumerate(walk):
        live[use.name] = numels[use.name]
        ahead = max(ahead, step + 1)
        room = min(zero["stage3_max_live_parameters"] - sum(live.values()), bucket)
        fetched = 0
        while ahead < len(walk) and fetched < room:
            name = walk[ahead].name
            fetched += 0 if name in live else numels[name]
            live[name] = numels[name]
            ahead += 1
        most[use.phase] = max(most[use.phase], sum(live.values()))
        steps = coming[use.name]
        later = bisect.bisect_right(steps, step)
        again = steps[later] if later < len(steps) else None
        within = again is not None and (
            again < ahead or sums[again] - sums[step + 1] < zero["stage3_max_reuse_distance"]
        )
        if not within:
            del live[use.name]
    return most

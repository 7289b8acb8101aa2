"""A DeepSpeed JSON with sizes that are right for one model: `ds-sft fit --write`.

Owns the choice of every size in a file from the model's largest tensors. Two sets of sizes: roomy
(a whole layer is reduced and fetched at a time) and tight (one tensor). Where states live is the
file's that it starts from and stays. No torch.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from ds_sft.engine.config import BUFFERS_OF_ADAM
from ds_sft.engine.host_memory import device
from ds_sft.engine.setup import Setup

SMALL = 100_000  # elements: norms stay on every rank
PARAM_BUFFERS = 5  # one in use, the others read ahead or written behind
_ROUND = 100_000
_MOST = 1_000_000_000  # beyond this, larger sizes bring nothing


def tuned(json_dict: Mapping[str, Any], setup: Setup, *, roomy: bool) -> dict[str, Any]:
    """`json_dict` with sizes for the model in `setup`."""
    layers: dict[str, int] = {}
    for name, numel in setup.numels.items():
        if ".layers." in name:
            key = name.split(".layers.")[1].split(".")[0]
            layers[key] = layers.get(key, 0) + numel
    layer = max(layers.values())
    tensor = max(n for name, n in setup.numels.items() if ".layers." in name)
    largest = max(setup.numels.values())
    result = copy.deepcopy(dict(json_dict))
    zero = result["zero_optimization"]
    step = layer if roomy else tensor
    zero["reduce_bucket_size"] = _rounded(step)
    zero["stage3_prefetch_bucket_size"] = _rounded(step)
    zero["stage3_param_persistence_threshold"] = SMALL
    # What is at work, and what is fetched meanwhile; the head and the embedding pass through it.
    zero["stage3_max_live_parameters"] = _rounded(
        min(_MOST, max(4 * layer, largest + layer)) if roomy else largest + tensor
    )
    on_nvme = device(zero, "offload_param") == "nvme"
    # A layer is used three times in the backward pass within twice its size.
    zero["stage3_max_reuse_distance"] = 0 if on_nvme else _rounded(2 * layer if roomy else layer)
    part = setup.part(largest)
    zero["sub_group_size"] = _rounded(min(_MOST, 4 * part if roomy else part))
    if device(zero, "offload_optimizer") == "nvme":
        section = zero["offload_optimizer"]
        pipelines = sum(bool(section.get(k)) for k in ("pipeline_read", "pipeline_write"))
        section["buffer_count"] = BUFFERS_OF_ADAM * (1 + pipelines)
    if on_nvme:
        zero["offload_param"]["buffer_count"] = PARAM_BUFFERS
        zero["offload_param"]["buffer_size"] = _rounded(part)
        zero["offload_param"]["max_in_cpu"] = 0
    return result


def _rounded(numel: int) -> int:
    """Up to a multiple that a person can read."""
    unit = _ROUND if numel >= 10 * _ROUND else 1
    return -(-numel // unit) * unit

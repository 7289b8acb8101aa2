"""What a native checkpoint needs of optimizer state that DeepSpeed has swapped to NVMe.

Under `offload_optimizer` device nvme the masters and moments of a sub-group lie in swap files, and
the tensors that DeepSpeed would save are empty; it copies the files beside the checkpoint instead,
and its own load forgets the moments (measured with 0.19.8). Here the empty tensors are replaced by
maps of the swap files, so that a checkpoint has the one format of every other run. Invariant: the
state is copied from file to file through the page cache, none of it is held in memory.
Leaves the way back to `reshard`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def no_copy_of_swap_files(engine: Any) -> Iterator[None]:
    """Keep `engine.save_checkpoint` from copying the swap files into the checkpoint.

    They would be there twice, and a rank that fails in that copy leaves the others in a barrier.
    """
    engine.zero_nvme_offload_optimizer = lambda: False
    try:
        yield
    finally:
        del engine.zero_nvme_offload_optimizer


def with_swapped(zero: Any, states: dict[str, Any]) -> dict[str, Any]:
    """`states` of one of DeepSpeed's files, with maps of the swap files for what is in them.

    Raises OSError or RuntimeError when a swap file is gone or cut short.
    """
    swapper = getattr(zero, "optimizer_swapper", None)
    if swapper is None or "optimizer_state_dict" not in states:
        return states
    files = {
        id(tensor.compute_tensor): (tensor.swap_path, info.numel())
        for info in swapper.swap_params_info.values()
        for tensor in info.tensors
    }

    def mapped(value: Any) -> Any:
        if id(value) not in files:
            return value
        path, numel = files[id(value)]
        return torch.from_file(path, shared=False, size=numel, dtype=value.dtype)

    saved = states["optimizer_state_dict"]
    adam = saved["optimizer_state_dict"]
    per_group = {
        index: {key: mapped(value) for key, value in state.items()}
        for index, state in adam["state"].items()
    }
    whole = {
        **saved,
        "optimizer_state_dict": {**adam, "state": per_group},
        "fp32_flat_groups": [mapped(flat) for flat in saved["fp32_flat_groups"]],
    }
    return {**states, "optimizer_state_dict": whole}

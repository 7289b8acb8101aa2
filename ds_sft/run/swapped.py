"""What checkpoints and exports need of optimizer state that DeepSpeed has swapped to NVMe.

Under `offload_optimizer` device nvme the masters and moments of a sub-group lie in swap files, and
the tensors that DeepSpeed would save are empty; it copies the files beside the checkpoint instead,
and its own load forgets the moments (measured with 0.19.8). Here the empty tensors are replaced by
maps of the swap files, so that a checkpoint has the one format of every other run. Invariant: the
state is copied from file to file through the page cache, none of it is held in memory. So is a
master for an export: DeepSpeed's own way to one of them reads masters, moments and gradients of its
whole sub-group each time, hundreds of times the bytes. Leaves the way back to `reshard`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from deepspeed.utils import safe_get_full_fp32_param


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
    files = _files(swapper)

    def mapped(value: Any) -> Any:
        return _mapped(value, *files[id(value)]) if id(value) in files else value

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


def full_master(parameter: torch.Tensor) -> torch.Tensor:
    """The whole master of a partitioned parameter on every rank; a collective.

    Raises OSError or RuntimeError when a swap file is gone or cut short.
    """
    zero: Any = parameter._z3_optimizer  # type: ignore[attr-defined]
    group, offset, size = zero.grad_position[zero.get_param_id(parameter)]
    if not zero._swappable_optimizer_subgroup(group):
        whole: torch.Tensor = safe_get_full_fp32_param(parameter)
        return whole
    flat = zero.fp32_partitioned_groups_flat[group]
    master = _mapped(flat, *_files(zero.optimizer_swapper)[id(flat)])
    whole = zero._fp32_state_allgather(parameter, master.narrow(0, offset, size))
    return whole


def _files(swapper: Any) -> dict[int, tuple[str, int]]:
    """{id of a swapped tensor: its file and number of values}."""
    return {
        id(tensor.compute_tensor): (tensor.swap_path, info.numel())
        for info in swapper.swap_params_info.values()
        for tensor in info.tensors
    }


def _mapped(tensor: torch.Tensor, path: str, numel: int) -> torch.Tensor:
    return torch.from_file(path, shared=False, size=numel, dtype=tensor.dtype)

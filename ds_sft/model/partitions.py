"""This rank's parts of parameters and of masters, in memory or in DeepSpeed's swap files.

Owns the two ways to write them from outside of a training step. A part may be swapped to NVMe
(`offload_param`), and so may a sub-group's masters and moments (`offload_optimizer`); whoever fills
one goes through here and needs not know. Invariant: one sub-group at a time is in memory on behalf
of the caller, and is written back before the next one is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus


def fill_part(parameter: Any, values: torch.Tensor) -> None:
    """Set this rank's part of a partitioned parameter to flat `values`, cast to its dtype."""
    parameter.ds_secondary_tensor = None  # hpZ's copy, made from what was there before
    if parameter.ds_tensor.status is PartitionedParamStatus.AVAILABLE:
        parameter.ds_tensor.data.copy_(values)
        return
    # In the file; what `ds_tensor` holds meanwhile is a placeholder of another dtype.
    parameter.nvme_swapper.get_buffer(parameter, values.numel()).copy_(values)
    parameter.nvme_swapper.swap_out_and_release([parameter])


def fetch_once(model: torch.nn.Module) -> None:
    """Let DeepSpeed swap a parameter in once where it asks for it several times at once.

    Its prefetch lists a parameter as often as the coming modules use it; the head of a chunked loss
    is used once a chunk, and the second entry fails an assertion (measured with 0.19.8).
    """
    swapper = next(model.parameters()).nvme_swapper  # type: ignore[attr-defined]
    if swapper is None:
        return
    swap_in = swapper.swap_in

    def swap_in_each_once(params: list[Any], *args: Any, **kwargs: Any) -> Any:
        return swap_in(list({param.ds_id: param for param in params}.values()), *args, **kwargs)

    swapper.swap_in = swap_in_each_once


def keep_out_of_buffers(model: torch.nn.Module) -> None:
    """Let what is swapped in on a CPU be a copy of its buffer, where one rank holds everything.

    There a gathered weight is no copy but the buffer itself, which is filled with the next weight
    while autograd still needs this one: gradients come out wrong in silence (measured with 0.19.8).
    Other ranks' parts and a GPU's memory make copies of their own.
    """
    swapper = next(model.parameters()).nvme_swapper  # type: ignore[attr-defined]
    if swapper is None or dist.get_world_size() > 1 or get_accelerator().device_name() != "cpu":
        return
    synchronize_reads = swapper.synchronize_reads

    def synchronize_and_copy() -> None:
        arriving = list(swapper.inflight_params)
        synchronize_reads()
        for param in arriving:
            param.ds_tensor.data = param.ds_tensor.data.clone()

    swapper.synchronize_reads = synchronize_and_copy


def resident_sub_groups(zero: Any) -> Iterator[tuple[int, torch.Tensor]]:
    """Yield index and flat masters of every sub-group of a ZeRO-3 optimizer, to be written.

    While a sub-group is yielded its state is in memory; what the caller leaves in the masters and
    in the optimizer's state is what DeepSpeed goes on with.
    """
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        swapped = zero._swappable_optimizer_subgroup(index)
        if swapped:
            zero._optimizer_states_and_gradient_swap_in(index)
        yield index, flat
        if swapped:
            zero._optimizer_states_and_gradient_swap_out(index)

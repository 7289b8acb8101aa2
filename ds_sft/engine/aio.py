"""DeepSpeed's async_io operator: there before it is needed, and writing only where there is room.

DeepSpeed counts the writes that came back and not how they ended: on a full disk it goes on, with
state that was never written (measured with 0.19.8: 13 of 16 MiB on disk, no error). So the blocks
of a swap file are reserved before its first write; in a file that has them, nothing can run out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from ds_sft.errors import ConfigError


def prepare() -> None:
    """Build or load the operator, and make DeepSpeed's writes safe. Raises ConfigError."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    try:
        AsyncIOBuilder().load(verbose=False)
    except Exception as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"NVMe offload needs DeepSpeed's async_io, which cannot be built here ({reason}): "
            "install libaio's headers (Debian: libaio-dev) and run `ds-sft doctor --build`, or use "
            "ds_configs/zero3_offload_optimizer.json"
        ) from error
    from deepspeed.runtime.swap_tensor import (
        async_swapper,
        optimizer_utils,
        partitioned_optimizer_swapper,
        partitioned_param_swapper,
        pipelined_optimizer_swapper,
        utils,
    )

    safe = reserving(utils.swap_out_tensors)
    for module in (
        async_swapper,
        optimizer_utils,
        partitioned_optimizer_swapper,
        partitioned_param_swapper,
        pipelined_optimizer_swapper,
        utils,
    ):
        module.swap_out_tensors = safe


def reserving(swap_out: Callable[..., None]) -> Callable[..., None]:
    """`swap_out` of DeepSpeed, after `reserve` for each file; raises ConfigError."""

    def reserve_and_swap_out(handle: Any, tensors: Sequence[Any], paths: Sequence[str]) -> None:
        for tensor, path in zip(tensors, paths, strict=True):
            reserve(path, tensor.numel() * tensor.element_size())
        swap_out(handle, tensors, paths)

    return reserve_and_swap_out


def reserve(path: str, size: int) -> None:
    """Give the file `path` blocks for `size` bytes; what is in it stays. Raises ConfigError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if os.fstat(descriptor).st_size < size:
                os.posix_fallocate(descriptor, 0, size)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(
            f"the swap file {path} of {size / 1e9:.2f} GB cannot be written: {error.strerror}: "
            "make room, or name another --nvme-path, and start again from the last checkpoint"
        ) from error

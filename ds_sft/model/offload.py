"""Inputs of recomputed layers, parked in host memory between forward and backward.

Owns the host buffers, the copies and their order. Invariants: what comes back is bit-equal; only
what a layer's recomputation starts from is moved, nothing that it makes; buffers are used again in
the next microbatch. On CUDA the copies run on a stream of their own: out while the next layer
computes, back while the layer above it goes backward. On a CPU the same steps run one by one.
Leaves to `recompute` which layers do it.

torch's `save_on_cpu` does the same on the computing stream, which then waits for every copy, and
allocates pinned memory in each forward.
"""

from __future__ import annotations

import contextlib
import weakref
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

Buffers = defaultdict[tuple[torch.Size, torch.dtype], list[torch.Tensor]]


class HostParking:
    """A `checkpoint` whose saved inputs wait in host memory."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.free: Buffers = defaultdict(list)
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._newest: weakref.ref[_Parked] | None = None

    def checkpoint(self, function: Callable[..., Any], *args: Any) -> Any:
        """Run `function(*args)`, keep only `args` and run it again in backward."""
        with saved_tensors_hooks(self._park, self._bring_back):
            # Its own hooks hide ours from all that is saved inside.
            return checkpoint(function, *args, use_reentrant=False)

    def _park(self, tensor: torch.Tensor) -> _Parked:
        kind = (tensor.shape, tensor.dtype)
        host = self.free[kind].pop() if self.free[kind] else self._new_buffer(*kind)
        with self.beside():
            host.copy_(tensor, non_blocking=True)
        if self._stream is not None:
            tensor.record_stream(self._stream)  # its memory is given away before the copy ends
        above = self._newest() if self._newest else None
        if above is not None:
            above.on_device = None
        # Backward starts with the newest: it need not go to the host and back.
        parked = _Parked(self, host, tensor.detach(), self._newest)
        # The stream's order keeps a buffer that is given back from being written too early.
        weakref.finalize(parked, self.free[kind].append, host)
        self._newest = weakref.ref(parked)
        return parked

    def _new_buffer(self, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self.device.type == "cuda")

    def _bring_back(self, parked: _Parked) -> torch.Tensor:
        tensor = parked.arrive()
        below = parked.below() if parked.below else None
        if below is not None:
            below.start()  # comes while this layer computes
        return tensor

    @contextlib.contextmanager
    def beside(self) -> Any:
        """Queue copies after everything that is queued now, without making the rest wait."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self._stream):
            yield

    def event(self) -> torch.cuda.Event | None:
        """A mark behind the last copy."""
        return self._stream.record_event() if self._stream else None


class _Parked:
    """One tensor in host memory; autograd holds it as long as backward may ask for it."""

    def __init__(
        self,
        parking: HostParking,
        host: torch.Tensor,
        on_device: torch.Tensor,
        below: weakref.ref[_Parked] | None,
    ) -> None:
        self.parking = parking
        self.host = host
        self.on_device: torch.Tensor | None = on_device
        self.below = below
        self._came: torch.cuda.Event | None = None

    def start(self) -> None:
        """Start the copy back, unless it is there or on its way."""
        if self.on_device is None:
            # Made outside: the memory belongs to the computing stream, which uses and frees it.
            self.on_device = torch.empty_like(self.host, device=self.parking.device)
            with self.parking.beside():
                self.on_device.copy_(self.host, non_blocking=True)
            self._came = self.parking.event()

    def arrive(self) -> torch.Tensor:
        """The tensor; the computing stream waits for it, the host does not."""
        self.start()
        assert self.on_device is not None
        if self._came is not None:
            torch.cuda.current_stream(self.parking.device).wait_event(self._came)
        tensor, self.on_device, self._came = self.on_device, None, None
        return tensor

"""A Triton kernel small enough to show whether Triton works on this machine.

A missing compiler or Python header shows itself at the first launch only. Imported where Triton is
installed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def _double(source, target, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at) * 2)


def doubles(device: torch.device) -> bool:
    """Compile and run the kernel; whether it doubled its input. Raises what Triton raises."""
    source = torch.arange(16, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    _double[(1,)](source, target, SIZE=16)
    return torch.equal(target, source * 2)

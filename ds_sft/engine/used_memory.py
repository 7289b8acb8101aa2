"""How much memory a rank has used, as its allocator or the kernel counts it.

Owns the one number that metrics, budgets and messages mean by "peak". Bytes are 1e9 to the GB.
Leaves what to do about it to `run.memory`.
"""

from __future__ import annotations

import errno
import re
import resource

import torch

_ALLOCATOR_WORDS = re.compile(
    r"out of memory|can't allocate memory|not enough memory: you tried to allocate", re.I
)


def peak_memory_gb() -> float:
    """Peak so far: allocated on the GPU, or resident on a CPU; 1e9 bytes."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 1e9
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9


def measured() -> str:
    """What this rank holds now, and at most until now."""
    if not torch.cuda.is_available():
        return f"{peak_memory_gb():.2f} GB resident at the peak"
    _, total = torch.cuda.mem_get_info()
    return (
        f"{torch.cuda.memory_allocated() / 1e9:.2f} GB allocated, "
        f"{torch.cuda.memory_reserved() / 1e9:.2f} GB reserved, peak {peak_memory_gb():.2f} GB "
        f"of {total / 1e9:.2f} GB"
    )


def ran_out(error: BaseException) -> str:
    """Which memory `error` says is used up: "gpu", "host", "cuda", or "" for another error.

    "cuda" is either: NCCL's buffers on the GPU, or page-locked memory of the host. Host
    allocations that fail inside torch have no type of their own.
    """
    if isinstance(error, torch.OutOfMemoryError):
        return "gpu"
    if isinstance(error, MemoryError) or getattr(error, "errno", None) == errno.ENOMEM:
        return "host"
    text = str(error)
    if isinstance(error, RuntimeError) and _ALLOCATOR_WORDS.search(text):
        return "cuda" if "cuda" in text.lower() else "host"
    return ""

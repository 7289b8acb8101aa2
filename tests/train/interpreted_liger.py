"""A training on Liger's kernels without a GPU, through model/interpreted_triton.py."""

from __future__ import annotations

import sys
from pathlib import Path

from ds_sft import train


def main(argv: list[str]) -> None:
    """Close the interpreter's gaps, train, and say that the kernels really ran."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "model"))
    import interpreted_triton

    interpreted_triton.close_gaps()
    train.main(argv)
    count = interpreted_triton.launches["_rms_norm_backward_kernel"]
    assert count, interpreted_triton.launches
    print(f"rms_norm backward launches: {count}", flush=True)

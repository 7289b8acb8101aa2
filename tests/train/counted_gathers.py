"""A training that says how many values of parameters ZeRO-3 gathered (see `launch_many`)."""

from __future__ import annotations

from typing import Any

from deepspeed.runtime.zero import partition_parameters

from ds_sft import train


def main(argv: list[str]) -> None:
    """Count what comes out of every all-gather of parameters, and train."""
    gathered = 0
    real = partition_parameters._dist_allgather_fn

    def count(source: Any, target: Any, group: Any = None) -> Any:
        nonlocal gathered
        gathered += target.numel()
        return real(source, target, group)

    partition_parameters._dist_allgather_fn = count
    train.main(argv)
    print(f"gathered {gathered} values", flush=True)

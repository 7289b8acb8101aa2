"""One rank of `ds-sft fit --probe`: a few optimizer steps of one candidate, measured.

Owns the run of a candidate. Invariants: every rank leaves a result, also when it runs out of memory
(but not when the kernel kills it); none outlives the `ds-sft fit` that asked for it. Writes neither
checkpoints nor exports; the gathering of the largest weight that an export does is done, since it
may be the peak. What is compared is `fit_probe`'s.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ds_sft.cli import reporting
from ds_sft.engine.leaving import ending_at_once, leave
from ds_sft.engine.machine import set_threads

LEARNING_RATE = 1e-6


def main() -> None:
    """Run the candidate that the JSON named last on the command line describes."""
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    set_threads()
    spec_file = Path(sys.argv[-1])
    spec = json.loads(spec_file.read_text(encoding="utf-8"))
    swap = [] if spec["nvme_path"] is None else [Path(spec["nvme_path"])]
    end_with(Path(spec["held"]), [spec_file.parent, *swap])
    with ending_at_once(), reporting(), leaving_a_result(spec["result"]) as result:
        measure(spec, result)


def end_with(held: Path, leftovers: list[Path]) -> None:
    """End this process when nobody holds the lock of `held` any more: its parent is gone.

    A parent that was killed cleans nothing up, so the directories `leftovers` go too.
    """

    def wait() -> None:
        with contextlib.suppress(OSError), held.open() as lock:
            fcntl.flock(lock, fcntl.LOCK_SH)
        for directory in leftovers:
            shutil.rmtree(directory, ignore_errors=True)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()


@contextlib.contextmanager
def leaving_a_result(base: str) -> Iterator[dict[str, Any]]:
    """A dictionary that is written beside those of the other ranks, whatever happens."""
    result: dict[str, Any] = {"seconds": [], "peak": 0, "problem": ""}
    try:
        yield result
    except Exception as error:
        from ds_sft.engine import used_memory

        if used_memory.ran_out(error):
            result["problem"] = f"out of memory ({used_memory.measured()})"
        raise
    finally:
        path = Path(f"{base}.rank{os.environ['RANK']}.json")
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(result), encoding="utf-8")
        partial.rename(path)


def measure(spec: dict[str, Any], result: dict[str, Any]) -> None:
    """Fill in the seconds of every step and the peak. Raises what a training would."""
    from deepspeed.accelerator import get_accelerator
    from deepspeed.utils import safe_get_full_fp32_param

    from ds_sft.data.packed import PackedDataset
    from ds_sft.engine import build, used_memory
    from ds_sft.engine.config import engine_config
    from ds_sft.engine.step import train_step
    from ds_sft.fit import model_of
    from ds_sft.recipe.batching import BatchPlan
    from ds_sft.recipe.recipe import Recipe
    from ds_sft.run_config import RunConfig

    run = RunConfig(data=Path(spec["data"]), **spec["run"])
    recipe, world_size = Recipe(**spec["recipe"]), int(os.environ["WORLD_SIZE"])
    nvme_path = None if spec["nvme_path"] is None else Path(spec["nvme_path"])
    config = engine_config(
        spec["config"], spec["name"], recipe, world_size=world_size,
        per_device_batch=run.per_device_batch, nvme_path=nvme_path,
    )  # fmt: skip
    data = PackedDataset.open(run.data)
    batches = BatchPlan(
        recipe, data.assistant_counts.tolist(), world_size=world_size,
        per_device_batch=run.per_device_batch, allow_idle=True,
    )  # fmt: skip
    with build.distributed(run.collective_timeout_minutes):
        engine = build.build_engine(
            run, recipe, config, model_of(spec["model"]), random_weights=spec["random_weights"]
        )
        for step in range(spec["steps"]):
            start = time.perf_counter()
            train_step(engine, data, batches, step, LEARNING_RATE)
            get_accelerator().synchronize()
            result["seconds"].append(time.perf_counter() - start)
        largest = max(engine.module.parameters(), key=lambda p: p.ds_numel)
        safe_get_full_fp32_param(largest)
        result["peak"] = round(used_memory.peak_memory_gb() * 1e9)


if __name__ == "__main__":
    main()
    leave()

"""Trainings without their launchers: `python many_runs.py`, told over stdin what to run.

`harness.launch_many` starts it. A launch spends most of its time on importing torch, DeepSpeed and
transformers, once in the launcher and once in each rank. This process imports them once and forks
every rank of every training, which then runs as `ds_sft.train` does under the launcher: own
process group, own port, the launcher's variables, own exit code. As the launcher does, it ends the
ranks whose neighbour failed.

A line on stdin is the path of a specification; the answer is a line of JSON, the exit codes of the
ranks of each training. The end of stdin is the end.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 10.0
# What a training imports, the last ones (a second of them) while its engine is made.
IMPORTED = (
    "ds_sft.engine.proofs", "ds_sft.run.memory", "ds_sft.run.metrics", "ds_sft.run.saver",
    "ds_sft.train", "setuptools", "deepspeed.runtime.zero.muon.muon_optimizer",
    "transformers.models.qwen3.modeling_qwen3",
)  # fmt: skip


def main() -> None:
    sys.path.append(str(Path(__file__).parents[1] / "run"))  # for the workers of the tests there
    for name in IMPORTED:
        importlib.import_module(name)
    gc.collect()
    gc.freeze()  # DeepSpeed collects for each engine: not what all ranks share

    for line in sys.stdin:
        spec_file = Path(line.strip())
        runs = json.loads(spec_file.read_text())
        codes = [_one(spec_file.with_suffix(f".{i}.log"), run) for i, run in enumerate(runs)]
        print(json.dumps(codes), flush=True)


def _one(log: Path, run: dict[str, Any]) -> list[int]:
    """Run one training in forks, whose words go to `log`. Exit codes of its ranks, in order."""
    running = {_fork(log, run, rank): rank for rank in range(run["ranks"])}
    codes = [0] * len(running)
    failed_at: float | None = None
    patience = float(run["env"].get("PATIENCE_SECONDS", PATIENCE_SECONDS))
    while running:
        for pid, rank in list(running.items()):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                del running[pid]
                codes[rank] = os.waitstatus_to_exitcode(status)
        if failed_at is None and any(codes):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > patience:
            for pid in running:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    return codes


def _fork(log: Path, run: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if pid == 0:
        _child(log, run, rank)
    return pid


def _child(log: Path, run: dict[str, Any], rank: int) -> None:
    """Never returns: becomes one rank of one training."""
    for name in ("RANK", "LOCAL_RANK"):
        os.environ[name] = str(rank)
    for name in ("WORLD_SIZE", "LOCAL_SIZE"):
        os.environ[name] = str(run["ranks"])
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": run["port"], **run["env"]}
    os.environ |= {"CROSS_RANK": "0", "CROSS_SIZE": "1"}
    words = [word.replace("@RANK@", str(rank)) for word in run["args"]]
    sys.argv = ["ds_sft.train", *words]
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    code = 1
    try:
        importlib.import_module(run["module"]).main(words)
        code = 0
    except SystemExit as exit_:
        code = int(exit_.code or 0)
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()

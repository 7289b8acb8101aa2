"""Several trainings in one launch: `deepspeed --num_gpus W many_runs.py SPEC.json`.

`harness.launch_many` starts it.
A launch spends most of its time on importing torch, DeepSpeed and transformers. Here every rank
imports them once and forks a process for each training, which then runs as `ds_sft.train` does:
own process group, own port, own exit code. As the launcher does, a rank whose neighbour failed is
ended.
"""

from __future__ import annotations

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


def main() -> None:
    spec_file = Path(sys.argv[-1])
    spec = json.loads(spec_file.read_text())
    import ds_sft.engine.proofs
    import ds_sft.run.metrics
    import ds_sft.run.saver  # noqa: F401  # what `train` imports, before the fork

    for i, run in enumerate(spec):
        _one(spec_file.with_suffix(f".{i}"), run)


def _one(base: Path, run: dict[str, Any]) -> None:
    """Run one training in a fork; its exit code goes to `<base>.rank<R>`, its words to `.log`."""
    pid = os.fork()
    if pid == 0:
        _child(base, run)
    mine = Path(f"{base}.rank{os.environ['RANK']}")
    others = [Path(f"{base}.rank{r}") for r in range(int(os.environ["WORLD_SIZE"]))]
    failed_at: float | None = None
    while True:
        done, status = os.waitpid(pid, os.WNOHANG)
        if done:
            break
        if failed_at is None and any(_code(path) for path in others if path != mine):
            failed_at = time.monotonic()
        if failed_at is not None and time.monotonic() - failed_at > PATIENCE_SECONDS:
            os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    mine.with_suffix(mine.suffix + ".new").write_text(str(os.waitstatus_to_exitcode(status)))
    mine.with_suffix(mine.suffix + ".new").rename(mine)


def _code(path: Path) -> int:
    return int(path.read_text()) if path.is_file() else 0


def _child(base: Path, run: dict[str, Any]) -> None:
    """Never returns: becomes one rank of one training."""
    log = os.open(f"{base}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    os.environ.update(run["env"])
    os.environ["MASTER_PORT"] = run["port"]
    words = [word.replace("@RANK@", os.environ["RANK"]) for word in run["args"]]
    sys.argv = ["ds_sft.train", *words]
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

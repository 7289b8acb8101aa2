"""What a run says while it runs: console, metrics.jsonl, Weights & Biases, DeepSpeed monitors.

Owns the forms that people's log readers know. Invariants: only rank 0 of the world writes; a
resumed run's metrics.jsonl reads as one run; no logger ever stops the training. A row with `loss`
is an optimizer step, a row with `eval/loss` an evaluation; both have a `label`. Leaves the numbers
to `engine.step` and `engine.evaluate`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import sys
import time
import uuid
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from ds_sft.engine.evaluate import EvalResult
from ds_sft.engine.step import StepResult
from ds_sft.engine.used_memory import peak_memory_gb
from ds_sft.errors import SavingFailed
from ds_sft.run import manifest
from ds_sft.run.atomic import write_file
from ds_sft.run.layout import RunDir
from ds_sft.run.rows import open_rows, rows_in
from ds_sft.run_config import RunConfig

HEARTBEAT_SECONDS = 30.0


class RunLog:
    """The log of one process' part of a run, from optimizer step `first` on."""

    def __init__(
        self, run: RunConfig, num_steps: int, first: int, monitor: Any, mfu: float | None
    ) -> None:
        """`mfu` turns tokens/s per rank into model FLOP utilisation; None where that is unknown."""
        self.run, self.num_steps, self.first = run, num_steps, first
        self.monitor, self.mfu = monitor, mfu
        self.run_dir = run_dir = RunDir(run.run_dir)
        self.is_main = dist.get_rank() == 0
        self.started = self.step_started = self.last_line = time.monotonic()
        self.last_loss: float | None = None
        self.completed = first
        self.wandb: Any = None
        if self.is_main:
            self.rows = open_rows(run_dir.metrics, first)
            self.wandb = start_wandb(run, run_dir) if run.wandb_project else None
            print("First batch loaded, starting first train step", flush=True)

    def step(self, result: StepResult) -> None:
        """Record one optimizer step."""
        now = time.monotonic()
        seconds, self.step_started = now - self.step_started, now
        self.last_loss, self.completed = finite(result.loss), result.step + 1
        if not self.is_main:
            return
        row = self._row(result, seconds)
        self.rows.add(row)
        completed, total = result.step + 1, self.num_steps
        if completed % self.run.log_every == 0 or completed in (total, self.run.stop_after):
            self._line(completed, f"loss={result.loss:.3f}")
        self._wandb_row(row)
        if self.monitor.enabled:
            keys = ("loss", "lr", "grad_norm")
            self.monitor.write_events(
                [(f"Train/{k}", row[k], completed) for k in keys if row[k] is not None]
            )

    def evaluation(self, label: int, result: EvalResult) -> None:
        """Record one evaluation of the weights after step `label`; its time is no step's."""
        self.resume_clock()
        if not self.is_main:
            return
        row = {
            "label": label,
            "eval/loss": finite(result.loss),
            "eval/tokens": result.target_tokens,
            "eval/seconds": round(result.seconds, 4),
        }
        self.rows.add(row)
        self.last_line = time.monotonic()
        print(
            f"[eval] step-{label} loss={result.loss:.4f} over {result.target_tokens:,} tokens in "
            f"{result.seconds:.1f} s",
            flush=True,
        )
        if self.wandb is not None:
            never_stop(lambda: self.wandb.log({k: v for k, v in row.items() if v is not None}))
        if self.monitor.enabled and row["eval/loss"] is not None:
            self.monitor.write_events([("Eval/loss", result.loss, label + 1)])

    def has_evaluation(self, label: int) -> bool:
        """Whether the evaluation of `label` is in metrics.jsonl: rank 0 looks, all ranks know."""
        known: list[Any] = [None]
        if self.is_main:
            rows = rows_in(self.run_dir.metrics)
            known = [any(row.get("label") == label and "eval/loss" in row for row in rows)]
        dist.broadcast_object_list(known, src=0)
        return bool(known[0])

    def _row(self, result: StepResult, seconds: float) -> dict[str, Any]:
        world = dist.get_world_size()
        row: dict[str, Any] = {
            "label": result.step,
            "loss": finite(result.loss),
            "lr": result.lr,
            "grad_norm": finite(result.grad_norm),
            "target_tokens": result.target_tokens,
            "tokens": result.tokens,
            "step_time_s": round(seconds, 4),
            "tokens_per_s": round(result.tokens / seconds, 1),
            "tokens_per_s_per_rank": round(result.tokens / seconds / world, 1),
            "peak_memory_gb": round(peak_memory_gb(), 3),
        }
        if result.problem:
            row["dropped"] = result.problem
        if self.mfu:
            row["mfu"] = round(row["tokens_per_s_per_rank"] * self.mfu, 4)
        return row

    def _line(self, completed: int, postfix: str) -> None:
        total = self.num_steps
        self.last_line = time.monotonic()
        elapsed = self.last_line - self.started
        rate = elapsed / max(completed - self.first, 1)
        print(
            f"Progress on:train {completed}it/{total / 1000:.2f}kit rate:{rate:.1f}s/it "
            f"remaining:{hms(rate * (total - completed))} elapsed:{hms(elapsed)} postfix:{postfix}",
            flush=True,
        )

    def within_step(self, done: int, of: int) -> None:
        """A sign of life inside a long step."""
        if self.is_main and time.monotonic() - self.last_line > HEARTBEAT_SECONDS and done < of:
            self.last_line = time.monotonic()
            print(f"[train] microbatch {done} of {of} in this step", flush=True)

    def within_evaluation(self, done: int, of: int) -> None:
        """A sign of life inside a long evaluation."""
        if self.is_main and time.monotonic() - self.last_line > HEARTBEAT_SECONDS and done < of:
            self.last_line = time.monotonic()
            print(f"[eval] microbatch {done} of {of}", flush=True)

    def resume_clock(self) -> None:
        """Leave the time since the last step (saves, exports) out of the next step's."""
        self.step_started = time.monotonic()

    def _wandb_row(self, row: dict[str, Any]) -> None:
        if self.wandb is None:
            return
        values = {
            "label": row["label"],
            "train/loss": row["loss"],
            "train/lr": row["lr"],
            "train/grad_norm": row["grad_norm"],
            "train/tokens": row["target_tokens"],
            "train/step_time": row["step_time_s"],
            "train/tokens_per_s": row["tokens_per_s"],
        }
        never_stop(lambda: self.wandb.log({k: v for k, v in values.items() if v is not None}))

    @property
    def seconds(self) -> float:
        """Time since the first step of this process began."""
        return time.monotonic() - self.started

    def stopped(self, why: str) -> None:
        """Say that the run ended before its last step."""
        if self.is_main:
            print(f"[stop] {why} after {self.completed} steps: start it again to go on", flush=True)
        self._close()

    def finished(self) -> None:
        """Write the final marker and say so."""
        seconds = self.seconds
        if self.is_main:
            try:
                manifest.write_finished(self.run_dir, self.completed, seconds, self.last_loss)
            except OSError as error:
                raise SavingFailed(
                    f"all is saved, but {self.run_dir.finished} cannot be written: {error}: make "
                    "room and start again"
                ) from None
            print(f"[done] {self.completed} steps in {hms(seconds)}", flush=True)
        self._close()

    def _close(self) -> None:
        if self.is_main:
            self.rows.close()
        if self.wandb is not None:
            never_stop(self.wandb.finish)


def start_wandb(run: RunConfig, run_dir: RunDir) -> Any:
    """One W&B run per run directory: its id is kept there, so a restart goes on in the same one."""
    if importlib.util.find_spec("wandb") is None:
        print("[wandb] not installed (pip install ds-sft[wandb]): training without it", flush=True)
        return None
    id_file = run_dir.root / "wandb_id"
    run_id = run.wandb_id or (id_file.read_text().strip() if id_file.is_file() else "")
    run_id = run_id or uuid.uuid4().hex[:12]
    write_file(id_file, run_id + "\n")

    def start() -> Any:
        import wandb

        started = wandb.init(
            project=run.wandb_project,
            name=run.wandb_name or run_dir.root.resolve().name,
            id=run_id,
            resume="allow",
            dir=str(run_dir.root),
        )
        # Our own step: W&B drops rows whose own counter goes back, as after a rewind.
        started.define_metric("label")
        for group in ("train/*", "eval/*"):
            started.define_metric(group, step_metric="label")
        config = json.loads(run_dir.run_json.read_text())
        config.pop("made_from", None)  # a hash for every file would drown the rest
        started.config.update(config, allow_val_change=True)
        return started

    return never_stop(start)


def never_stop(action: Callable[[], Any]) -> Any:
    """Run a logger's action; its failure is a line on the console and nothing else."""
    try:
        return action()
    except Exception as error:
        print(f"[wandb] {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        return None


def finite(value: float) -> float | None:
    """The value, or null: NaN is no JSON."""
    return value if math.isfinite(value) else None


def hms(seconds: float) -> str:
    """Seconds as H:MM:SS."""
    whole = max(int(seconds), 0)
    return f"{whole // 3600}:{whole % 3600 // 60:02d}:{whole % 60:02d}"

"""Training: `deepspeed --module ds_sft.train ...` enters here, on every rank.

Owns the order of a run: cheap checks, heavy build, proofs, loop. Invariant: torch is not imported
before the cheap checks have passed. The parts are in their rooms: `plan` checks,
`engine` builds and steps, `run` saves.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_sft.cli import reporting
from ds_sft.data.model_files import ModelFiles
from ds_sft.engine.leaving import ending_at_once, leave
from ds_sft.engine.machine import check_accelerator, set_threads
from ds_sft.errors import ConfigError, DsSftError
from ds_sft.flags import parse_train
from ds_sft.plan import Plan, check
from ds_sft.run.console import outlive_console
from ds_sft.run.layout import RunDir, labels_in, step_dir
from ds_sft.run.lock import RunLock
from ds_sft.run.stopping import Stopping

if TYPE_CHECKING:
    from ds_sft.run.metrics import RunLog
    from ds_sft.run.saver import Saver

RANK_ZERO_SECONDS = 3.0  # the launcher looks at its ranks once a second


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, and train. Ends the process with the exit code of what happened."""
    # Started through ssh, a rank has the login shell's PATH: DeepSpeed would not find ninja.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    outlive_console()
    threads = set_threads()
    with ending_at_once(), reporting():
        with rank_zero_first():
            run, recipe = parse_train(sys.argv[1:] if argv is None else argv)
            _ = run.run_dir  # a missing --out is refused before anything heavy
            plan = check(run, recipe, int(os.environ.get("WORLD_SIZE", "1")))
            if run.dry_run:
                return dry_run(plan) if is_rank_zero() else None
            if already_finished(plan):
                return None
            check_accelerator()
        stopping = Stopping(RunDir(run.run_dir).stop)
        with RunLock(RunDir(run.run_dir).lock) if is_rank_zero() else contextlib.nullcontext():
            if is_rank_zero():
                stopping.forget_an_old_stop()
            code = train(plan, stopping, threads)
        if code:
            raise SystemExit(code)


def dry_run(plan: Plan) -> None:
    """Show the plan, then refuse what only a look into the files finds. Raises what a run would."""
    from ds_sft import plan_view
    from ds_sft.run import preflight

    plan_view.show(plan)
    for line in preflight.check(plan):
        print(f"[preflight] {line}", flush=True)
    print("[preflight] passed", flush=True)


def is_rank_zero() -> bool:
    """Whether the launcher made this process rank 0; known before there is a process group."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def rank_zero_first() -> Iterator[None]:
    """Let rank 0 say what is wrong, and say it in its place if it is wrong only here.

    The launcher ends a host's ranks once one has exited: without the pause it could end rank 0
    before its line. A rank that lives on has a problem that rank 0's host does not have, such as
    missing data. The ranks of a host wait one after the other, so that one of them speaks.
    """
    try:
        yield
    except DsSftError as error:
        if not is_rank_zero():
            time.sleep(RANK_ZERO_SECONDS * (1 + int(os.environ.get("LOCAL_RANK", "0"))))
            where = f"rank {os.environ['RANK']} on host {socket.gethostname()}"
            print(f"error: {where}: {' '.join(str(error).split())}", file=sys.stderr, flush=True)
        raise


def train(plan: Plan, stopping: Stopping, threads: str) -> int:
    """Run the optimizer steps that are left, saving and exporting; returns the exit code."""
    from ds_sft.engine import build
    from ds_sft.engine.step import train_step
    from ds_sft.recipe.cadence import due_after
    from ds_sft.run import memory
    from ds_sft.run.watch import Watch

    run, recipe, schedule, batches = plan.run, plan.recipe, plan.schedule, plan.batches
    with (
        memory.in_one_line(plan),
        build.distributed(run.collective_timeout_minutes),
        Watch(run.step_timeout_minutes) as watch,
    ):
        plan, engine, saver, log = start(plan, stopping, threads)
        first = log.first
        # What was stopped or killed inside an evaluation has saved its step and not its evaluation.
        whole = evaluate_if_due(engine, plan, log, first - 1, stopping.agreed)
        last = min(schedule.num_steps, run.stop_after or schedule.num_steps)
        for step in range(first, last if whole else first):
            lr = recipe.learning_rate * schedule.lr_multiplier(step)
            with watch.step(step):
                result = train_step(
                    engine, plan.data, batches, step, lr,
                    flag=saver.timer_fired, stop=stopping.agreed, progress=log.within_step,
                    over_budget=lambda: memory.over_budget(run),
                )  # fmt: skip
            if result is None:
                break
            saver.health.judge(result)
            log.step(result)
            if result.over_budget:
                saver.before_stopping(log.completed)
                raise memory.budget_error(plan)
            due = due_after(step + 1, schedule.num_steps, recipe, timer_fired=result.rank0_flag)
            if due.export:
                saver.export(due.label, interrupted=stopping.agreed)
            if due.checkpoint or due.temporary:
                saver.checkpoint(due.label, temporary=not due.checkpoint)
            whole = evaluate_if_due(engine, plan, log, step, stopping.agreed)
            if not whole:
                break
            log.resume_clock()
        # A run that was stopped in its last export has no result yet: the next start makes it.
        whole = whole and log.completed == schedule.num_steps and not saver.export_interrupted
        if not whole:
            saver.before_stopping(log.completed)
            log.stopped(stopping.reason or "--stop-after")
            saver.report_time(log.seconds)
        else:
            saver.require_saved(log.completed)
            log.finished()
            saver.report_time(log.seconds)
            saver.report_missing()
        stopping.ignore_signals()
        return 0 if whole else stopping.exit_code


def start(plan: Plan, stopping: Stopping, threads: str) -> tuple[Plan, Any, Saver, RunLog]:
    """Build the engine, load the checkpoint, prove what the run relies on; with the final plan."""
    from ds_sft import presets
    from ds_sft.engine import build, proofs
    from ds_sft.run.flops import mfu_factor
    from ds_sft.run.metrics import RunLog
    from ds_sft.run.saver import Saver

    run, recipe, num_steps = plan.run, plan.recipe, plan.schedule.num_steps
    point = str(plan.resume_from.path) if plan.resume_from else "step 0"
    proofs.prove_same_files(run.run_dir, plan.data_sha256, point)
    plan, model, tokenizer_dir = with_model(plan)
    for line in (threads, *presets.describe(run.preset, run.preset_origins)):
        build.say(f"[init] {line}")
    engine = build.build_engine(run, recipe, plan.ds_config, model)
    saver = Saver(engine, run, recipe, plan.ds_config, plan.data, model, tokenizer_dir)
    for note in plan.notes:
        build.say(f"[init] note: {note}")
    stopping.use_group(saver.prompt)
    first = saver.resume(plan.resume_from, interrupted=stopping.agreed)
    if not run.skip_checks:
        proofs.prove(engine, plan.data, plan.batches, min(first, num_steps - 1))
    mfu = mfu_factor(model, plan.data.doc_lens)
    return plan, engine, saver, RunLog(run, num_steps, first, engine.monitor, mfu)


def evaluate_if_due(
    engine: Any, plan: Plan, log: RunLog, label: int, stop: Callable[[], bool]
) -> bool:
    """Evaluate after step `label`, if that is due and not in the log; False when it was stopped."""
    from ds_sft.engine.evaluate import evaluate
    from ds_sft.recipe.cadence import is_due

    chosen = plan.validation
    if chosen is None or not is_due(label, plan.schedule.num_steps, chosen.every):
        return True
    if log.has_evaluation(label):
        return True
    result = evaluate(
        engine, chosen.data, chosen.batches, stop=stop, progress=log.within_evaluation
    )
    if result is not None:
        log.evaluation(label, result)
    return result is not None


def already_finished(plan: Plan) -> bool:
    """Whether the run has nothing left to do; makes a missing final export, on rank 0.

    Raises ConfigError for a finished run without the checkpoint that a longer one would need.
    """
    from ds_sft.run.marker import read_finished

    run, steps = plan.run, plan.schedule.num_steps
    completed = read_finished(RunDir(run.run_dir))
    if completed is None or run.resume == "none":
        return False
    if completed < steps:
        if plan.resume_from is None:
            raise ConfigError(
                f"{run.out} finished {completed} steps and has no checkpoint left to go on from: "
                "use another --out"
            )
        return False
    if is_rank_zero():
        print(f"[done] {run.out} already has its {completed} steps", flush=True)
        export_if_missing(plan, completed)
    return True


def export_if_missing(plan: Plan, completed: int) -> None:
    """Make the last export of a finished run from its last checkpoint, where there is one."""
    run, point = plan.run, plan.resume_from
    out = step_dir(RunDir(run.run_dir).exports, completed - 1)
    if completed - 1 in labels_in(out.parent):
        return
    if point is None or point.completed != completed:
        print(f"[done] {out} is missing, and so is the checkpoint to make it from", flush=True)
        return
    from ds_sft.run.export import export_offline

    export_offline(
        point.path, out, dtype=run.hf_export_dtype,
        keep_generation_config=run.keep_generation_config,
    )  # fmt: skip


def with_model(plan: Plan) -> tuple[Plan, ModelFiles, Path]:
    """The plan, its model and tokenizer; fetches a Hub model once per host. Raises ConfigError."""
    if plan.model is None:
        from ds_sft.engine.build import fetch_model

        fetch_model(plan.recipe.model_id)
        plan = check(plan.run, plan.recipe, plan.batches.world_size)
    if plan.model is None or plan.tokenizer_dir is None:
        raise ConfigError(f"{plan.recipe.model_id} is still not in the Hub's cache of this host")
    return plan, plan.model, plan.tokenizer_dir


if __name__ == "__main__":
    main()
    leave()

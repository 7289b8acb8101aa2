"""Training: `deepspeed --module ds_sft.train ...` enters here, on every rank.

Owns the order of a run: cheap checks, heavy build, proofs, loop. Invariant: torch is not imported
before the cheap checks have passed. The parts are in their rooms: `plan` checks,
`engine` builds and steps, `run` saves.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from ds_sft.cli import reporting
from ds_sft.errors import CheckpointError
from ds_sft.flags import parse_train
from ds_sft.plan import Plan, check, show
from ds_sft.run.layout import RunDir, labels_in, step_dir


def main(argv: Sequence[str] | None = None) -> None:
    """Parse, check, and train. Ends the process with the exit code of what happened."""
    # Started through ssh, a rank has the login shell's PATH: DeepSpeed would not find ninja.
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    with reporting():
        run, recipe = parse_train(sys.argv[1:] if argv is None else argv)
        if not run.dry_run:
            _ = run.run_dir  # a missing --out is refused before anything heavy
        plan = check(run, recipe, int(os.environ.get("WORLD_SIZE", "1")))
        if run.dry_run:
            return show(plan) if os.environ.get("RANK", "0") == "0" else None
        if already_finished(plan):
            return None
        train(plan)


def train(plan: Plan) -> None:
    """Run the optimizer steps that are left, saving and exporting at their labels."""
    from ds_sft.engine import build, proofs
    from ds_sft.engine.step import train_step
    from ds_sft.recipe.cadence import due_after
    from ds_sft.run.flops import mfu_factor
    from ds_sft.run.metrics import RunLog
    from ds_sft.run.saver import Saver

    run, recipe, schedule, batches = plan.run, plan.recipe, plan.schedule, plan.batches
    with build.distributed(run.collective_timeout_minutes):
        proofs.prove_same_files(run.run_dir, plan.data.manifest_sha256)
        plan = with_model(plan)
        engine = build.build_engine(run, recipe, plan.ds_config, plan.model)
        saver = Saver(
            engine, run, recipe, plan.ds_config, plan.data, plan.model, plan.tokenizer_dir
        )
        first = saver.resume(plan.resume_from)
        if not run.skip_checks:
            proofs.prove(engine, plan.data, batches, min(first, schedule.num_steps - 1))
        mfu = mfu_factor(plan.model, plan.data.doc_lens)
        log = RunLog(run, schedule.num_steps, first, engine.monitor, mfu)

        last = min(schedule.num_steps, run.stop_after or schedule.num_steps)
        for step in range(first, last):
            lr = recipe.learning_rate * schedule.lr_multiplier(step)
            result = train_step(
                engine, plan.data, batches, step, lr,
                flag=saver.timer_fired, progress=log.within_step,
            )  # fmt: skip
            log.step(result)
            due = due_after(step + 1, schedule.num_steps, recipe, timer_fired=result.rank0_flag)
            stopping = step + 1 == last < schedule.num_steps
            if due.export:
                saver.export(due.label)
            if due.checkpoint or due.temporary or stopping:
                saver.checkpoint(due.label, temporary=not due.checkpoint)
            log.resume_clock()
        if last < schedule.num_steps:
            return log.stopped(max(first, last), "--stop-after")
        log.finished(schedule.num_steps)
        saver.report_failures()


def already_finished(plan: Plan) -> bool:
    """Whether the run has nothing left to do; makes a missing final export, on rank 0."""
    run, point, steps = plan.run, plan.resume_from, plan.schedule.num_steps
    if point is None or point.completed < steps or not RunDir(run.run_dir).finished.is_file():
        return False
    if os.environ.get("RANK", "0") == "0":
        print(f"[done] {run.out} already has its {steps} steps", flush=True)
        exports = RunDir(run.run_dir).exports
        if steps - 1 not in labels_in(exports):
            from ds_sft.run.export import export_offline

            export_offline(
                point.path, step_dir(exports, steps - 1), dtype=run.hf_export_dtype,
                keep_generation_config=run.keep_generation_config,
            )  # fmt: skip
    return True


def with_model(plan: Plan) -> Plan:
    """The plan with its model's files; fetches a Hub model once per host. Raises ConfigError."""
    if plan.model is not None:
        return plan
    from ds_sft.engine.build import fetch_model

    fetch_model(plan.recipe.model_id)
    plan = check(plan.run, plan.recipe, plan.batches.world_size)
    if plan.model is None:
        raise CheckpointError(f"{plan.recipe.model_id} is still not in the Hub's cache")
    return plan


if __name__ == "__main__":
    main()

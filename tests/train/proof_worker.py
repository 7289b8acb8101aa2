"""One rank of the proof tests: every start-up proof, met by what it is there to find.

Started by the real `deepspeed` launcher with the flags of a training. For each broken world it
prints, on rank 0, `NAME: CODE MESSAGE` with the exit code and message of the error on that rank and
`NAME agreed` if every rank raised the same one; `NAME: passed` if nothing was raised.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import deepspeed
import torch
import torch.distributed as dist
from transformers import AttentionInterface

from ds_sft.engine import build, proofs
from ds_sft.engine.leaving import leave
from ds_sft.errors import DsSftError
from ds_sft.flags import parse_train
from ds_sft.model import attention
from ds_sft.model.attention import _per_document
from ds_sft.plan import check


def outcome(name: str, proof: Callable[[], None]) -> None:
    """Run a proof on every rank and report what rank 0 and the others got."""
    mine = f"{name}: passed"
    try:
        proof()
    except DsSftError as error:
        mine = f"{name}: {error.exit_code} {error}"
    everybody: list[str] = [""] * dist.get_world_size()
    dist.all_gather_object(everybody, mine)
    build.say(mine)
    if set(everybody) == {mine}:
        build.say(f"{name} agreed")


def leaky_attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: None, *, scaling: float, **_: object,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """Causal over the whole row: what transformers does when it is not told of the documents."""
    length = query.shape[2]
    return _per_document(
        query, key, value, scaling, None, [length], torch.tensor([0]), length
    ), None


@contextlib.contextmanager
def not_finite(weight: torch.nn.Parameter) -> Iterator[None]:
    """One value is NaN: a damaged file, or a checkpoint of a run that had diverged."""
    old = 0.0
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        old, weight.data[3, 5] = weight.data[3, 5].item(), math.nan
    yield
    with deepspeed.zero.GatheredParameters([weight], modifier_rank=0):
        weight.data[3, 5] = old


def main() -> None:
    run, recipe = parse_train([w for w in sys.argv[1:] if not w.startswith("--local_rank")])
    plan = check(run, recipe, int(os.environ["WORLD_SIZE"]))
    assert plan.model is not None
    with build.distributed(run.collective_timeout_minutes):
        rank = dist.get_rank()
        sha, start = plan.data.manifest_sha256, "step 0"
        proofs.NONCE_WAIT_SECONDS = 1.0
        same_files(run.run_dir, sha, start, rank)

        outcome("average", lambda: proofs.prove_gradient_average(plan.ds_config))
        real, world = proofs.safe_get_full_grad, dist.get_world_size()
        proofs.safe_get_full_grad = lambda p: real(p) * world  # a library that sums
        outcome("sum", lambda: proofs.prove_gradient_average(plan.ds_config))
        proofs.safe_get_full_grad = real

        engine = build.build_engine(run, recipe, plan.ds_config, plan.model)
        outcome("isolated", lambda: proofs.prove_isolation(engine, plan.data.max_seq_len))
        with not_finite(engine.module.get_parameter("model.layers.1.mlp.up_proj.weight")):
            outcome("not finite", lambda: proofs.prove_isolation(engine, plan.data.max_seq_len))
        AttentionInterface.register(attention.NAME, leaky_attention)
        outcome("leaky", lambda: proofs.prove_isolation(engine, plan.data.max_seq_len))
        outcome("counts", lambda: proofs.prove_denominators(engine, plan.data, plan.batches, 3))
        wrong = SimpleNamespace(
            num_groups=plan.batches.num_groups,
            micro_batches=plan.batches.micro_batches,
            step_tokens=lambda step: [n + 1 for n in plan.batches.step_tokens(step)],
        )
        outcome("miscounted", lambda: proofs.prove_denominators(engine, plan.data, wrong, 3))


def same_files(out: Path, sha: str, start: str, rank: int) -> None:
    """The first proof, with one disk, with a disk per rank, and with other files."""
    outcome("one disk", lambda: proofs.prove_same_files(out, sha, start))
    own = out.parent / f"disk-of-{rank}"
    own.mkdir()
    os.chdir(own)
    outcome("two disks", lambda: proofs.prove_same_files(Path("run"), sha, start))
    outcome("two data sets", lambda: proofs.prove_same_files(out, sha + str(rank), start))
    stale = f"checkpoints/step-{rank}"
    outcome("two checkpoints", lambda: proofs.prove_same_files(out, sha, stale))


if __name__ == "__main__":
    main()
    leave()

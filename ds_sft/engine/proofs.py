"""Start-up proofs: what the run relies on, shown on this machine before GPU-days are spent.

Owns five proofs, each a line on the console: all ranks see the same files, the data is as it was
prepared, gradients average as the loss factor assumes, documents are isolated, the loss
denominators are the manifest's. Each raises
PreflightError (exit code 2) with what to do.
"""

from __future__ import annotations

import socket
import time
import uuid
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.utils import safe_get_full_grad

from ds_sft.data.packed import PackedDataset, check_hashes
from ds_sft.engine import nonfinite
from ds_sft.engine.build import say
from ds_sft.engine.step import prefetched
from ds_sft.errors import DataError, PreflightError
from ds_sft.model.sft import DeviceBatch
from ds_sft.recipe.batching import BatchPlan

NONCE_WAIT_SECONDS = 10.0  # network file systems show a new file late


def prove_same_files(out: Path, manifest_sha256: str, starts_from: str) -> None:
    """Every rank reads a nonce that rank 0 wrote into `out`, and has the same data manifest.

    `starts_from` names the checkpoint that this rank would load; it has to be everybody's.
    """
    box: list[Any] = [None]
    nonce_file = out / ".nonce"
    if dist.get_rank() == 0:
        box = [(uuid.uuid4().hex, manifest_sha256, starts_from)]
        try:
            out.mkdir(parents=True, exist_ok=True)
            nonce_file.write_text(box[0][0])
        except OSError as error:
            raise PreflightError(f"--out {out} cannot be written: {error}: make room") from None
    dist.broadcast_object_list(box, src=0)
    nonce, expected_data, expected_start = box[0]
    same_data = manifest_sha256 == expected_data
    report = (socket.gethostname(), _reads(nonce_file, nonce), same_data, starts_from)
    reports: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reports, report)
    if dist.get_rank() == 0:
        nonce_file.unlink(missing_ok=True)
    for rank, (host, same_out, same_data, start) in enumerate(reports):
        if not same_out:
            raise PreflightError(
                f"rank {rank} on host {host} does not see what rank 0 wrote into --out {out}: "
                "put --out on a disk that all hosts share"
            )
        if not same_data:
            raise PreflightError(
                f"rank {rank} on host {host} has another data set at --data than rank 0: "
                "copy the same one to every host"
            )
        if start != expected_start:
            raise PreflightError(
                f"rank {rank} on host {host} would start from {start}, rank 0 from "
                f"{expected_start}: --out is shared, but its listing is not up to date: start again"
            )
    say(f"[init] {len(reports)} ranks see the same --out and the same data")


def prove_data(data: PackedDataset) -> None:
    """The arrays are those that the manifest was written for; each rank hashes its share of them.

    The manifest's own hash, which a resume compares, says nothing about a file changed in place.
    """
    started = time.monotonic()
    problem = ""
    try:
        check_hashes(data, dist.get_rank(), dist.get_world_size())
    except DataError as error:
        problem = str(error)
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem)
    for found in filter(None, problems):
        raise PreflightError(f"{found}; run ds-sft verify {data.path} for the rest")
    say(f"[init] the data is as it was prepared ({time.monotonic() - started:.1f} s of hashing)")


def _reads(path: Path, nonce: str) -> bool:
    end = time.monotonic() + NONCE_WAIT_SECONDS
    while time.monotonic() < end:
        try:
            if path.read_text() == nonce:
                return True
        except OSError:
            pass
        time.sleep(0.2)
    return False


def prove(engine: Any, data: PackedDataset, batches: BatchPlan, first_step: int) -> None:
    """Run the proofs of the data and the engine; leaves no gradient and no state behind."""
    prove_data(data)
    prove_gradient_average(engine.config)
    prove_isolation(engine, data.max_seq_len)
    prove_denominators(engine, data, batches, first_step)


def prove_gradient_average(ds_config: dict[str, Any]) -> None:
    """DeepSpeed averages gradients over ranks; `MicroBatch.scale` undoes exactly that.

    Rank r's loss has gradient r + 1 everywhere; the average over W ranks is (W + 1) / 2.
    """
    config = {**ds_config, "gradient_clipping": 0.0}
    # A probe of 64 values needs no offload, and would have to build an optimizer for it.
    zero = {k: v for k, v in config["zero_optimization"].items() if not k.startswith("offload_")}
    config["zero_optimization"] = zero
    if "bf16" in config:  # DeepSpeed takes masters in bfloat16 with its own Adam only
        config["bf16"] = {"enabled": config["bf16"]["enabled"]}
    for section in ("tensorboard", "csv_monitor", "wandb"):
        config.pop(section, None)
    probe = torch.nn.Linear(8, 8, bias=False)
    optimizer = torch.optim.SGD(probe.parameters(), lr=0.0)
    engine, *_ = deepspeed.initialize(model=probe, optimizer=optimizer, config=config)
    dtype = next(engine.module.parameters()).dtype
    rank, world = dist.get_rank(), dist.get_world_size()
    output = engine(torch.eye(8, dtype=dtype, device=engine.device))
    engine.backward(output.float().sum() * (rank + 1), scale_wrt_gas=False)
    gradient = safe_get_full_grad(engine.module.weight).float()
    engine.destroy()
    expected = (world + 1) / 2
    if not torch.allclose(gradient, torch.full_like(gradient, expected), rtol=1e-2):
        raise PreflightError(
            f"gradients of 1..{world} on {world} ranks gave {gradient.mean().item():.4f}, not "
            f"their mean {expected}: this DeepSpeed does not average; install deepspeed==0.19.8"
        )
    say(f"[init] gradients average over {world} ranks, the loss factor carries the world size")


@torch.no_grad()
def prove_isolation(engine: Any, max_seq_len: int) -> None:
    """Changing one document leaves the other's hidden states bit-equal, in both directions."""
    vocab = engine.module.model.config.vocab_size
    half = min(32, max_seq_len // 2)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, vocab, (2 * half,), generator=generator)
    engine.eval()
    base = _hidden(engine, ids, half)
    if not base.isfinite().all():
        bad = nonfinite.bad_weights(engine)
        blame = f"weights that are not finite: {nonfinite.first(bad)}" if bad else "no bad weight"
        raise PreflightError(
            f"the model's hidden states are not finite before any training ({blame}): look at "
            "--model-id, or at the checkpoint that the run goes on from"
        )
    for changed, other in (
        (slice(0, half), slice(half, None)),
        (slice(half, None), slice(0, half)),
    ):
        perturbed = ids.clone()
        perturbed[changed] = (perturbed[changed] + 1) % vocab
        hidden = _hidden(engine, perturbed, half)
        leak = (hidden[other] - base[other]).abs().max().item()
        moved = (hidden[changed] - base[changed]).abs().max().item()
        if leak != 0.0 or moved == 0.0:
            raise PreflightError(
                f"documents of a pack are not isolated (changing one moved the other by {leak:.3e} "
                f"and itself by {moved:.3e}): the segments do not reach the attention kernel: "
                "install the pinned transformers, or use --attn-impl sdpa"
            )
    engine.train()
    say("[init] documents of a pack are isolated (bit-equal under a change of the other)")


def _hidden(engine: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
    total = len(ids)
    batch = DeviceBatch(
        input_ids=ids[None].to(engine.device),
        position_ids=torch.arange(total, device=engine.device)[None],
        positions=torch.empty(0, dtype=torch.int64, device=engine.device),
        labels=torch.empty(0, dtype=torch.int64, device=engine.device),
        cu_seq_lens=torch.tensor([0, first, total], dtype=torch.int32, device=engine.device),
        segment_lengths=[first, total - first],
        max_length=max(first, total - first),
    )
    return engine.module.hidden_states(batch).clone()


def prove_denominators(engine: Any, data: PackedDataset, batches: BatchPlan, step: int) -> None:
    """The targets that the ranks will really train on are those that the manifest counts."""
    seen = torch.zeros(batches.num_groups, device=engine.device, dtype=torch.int64)
    for micro, batch in prefetched(data, batches, step, engine.device):
        seen[micro.group] += batch.labels.numel()
    dist.all_reduce(seen)
    expected = batches.step_tokens(step)
    if seen.tolist() != expected:
        raise PreflightError(
            f"the ranks see {seen.tolist()} targets in step {step}, assistant_counts.npy says "
            f"{expected}: the data set is damaged: run ds-sft verify {data.path}"
        )
    say(f"[init] loss denominators of step {step} verified: {expected}")

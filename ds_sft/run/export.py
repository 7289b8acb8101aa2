"""Exports: a model in Hugging Face format from a running engine, or from a native checkpoint.

Both feed the same writer in the same order, so that they give the same bytes. Invariants: the
directory appears under its final name whole or not at all; nobody holds more than one parameter at
a time, in fp32 at most twice (the gather's own buffer), on any rank; a failure of rank 0 is a
CheckpointError on every rank, never a deadlock; ranks that have nothing to write wait in the
caller's long-timeout barrier, not in a collective whose timeout kills the job.

Leaves the files' content to `shards` and `hf_format`, when to export to the train loop.
"""

from __future__ import annotations

import contextlib
import functools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist

from ds_sft.errors import CheckpointError
from ds_sft.run import numerics
from ds_sft.run.atomic import atomic_directory, fresh_partial, partial_path, publish
from ds_sft.run.hf_format import ExportSource, write_unchanging_files
from ds_sft.run.native import NativeCheckpoint
from ds_sft.run.seal import CHECKSUMS, names_in, seal
from ds_sft.run.shards import (
    MAX_SHARD_BYTES,
    TensorSpec,
    WeightsWriter,
    export_dtype,
    stored_dtype,
)
from ds_sft.run.swapped import full_master

Barrier = Callable[[], None]


def export_live(
    engine: Any,
    out_dir: Path,
    *,
    dtype: str,
    source: ExportSource,
    barrier: Barrier,
    interrupted: Callable[[], bool] = lambda: False,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the engine's model to `out_dir`; every rank must call it at the same step.

    The values are the engine's own weights where `dtype` is what it computes in, else its fp32
    masters. An `out_dir` that exists (a label reached again after a resume) is replaced.
    `interrupted` is asked before each tensor, on all ranks with the same answer.
    Raises CheckpointError on all ranks if rank 0 cannot write, a value does not fit `dtype`, or it
    was interrupted.
    """
    target = export_dtype(dtype)
    tensors = _named_tensors(engine.module)
    specs = [_live_spec(name, tensor, target) for name, tensor in tensors.items()]
    writer = WeightsWriter(partial_path(out_dir), specs, max_shard_bytes)
    on_rank_zero = RankZero(barrier, engine.device, f"the export to {out_dir} failed")

    def begin() -> None:
        fresh_partial(out_dir)
        write_unchanging_files(writer.directory, source, dtype=dtype, tied=is_tied(tensors))

    try:
        on_rank_zero.run(begin)
        for spec in writer.order:
            if interrupted():
                raise CheckpointError(f"the export to {out_dir} was interrupted: the run stops")
            _write_one(writer, spec, tensors[spec.name], on_rank_zero)
        on_rank_zero.run(writer.finish)
        on_rank_zero.run(functools.partial(seal_export, writer.directory))
        on_rank_zero.run(functools.partial(publish, writer.directory, out_dir))
    except BaseException:
        if dist.get_rank() == 0:
            shutil.rmtree(writer.directory, ignore_errors=True)
        raise


def export_offline(
    checkpoint: Path,
    out: Path,
    *,
    dtype: str,
    keep_generation_config: bool,
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> None:
    """Write the model of a native checkpoint to `out`; needs no GPU and no other process.

    Holds 32 MiB of values at a time; the checkpoint's files are mapped and stay in the page cache.
    Raises CheckpointError if the checkpoint is not whole, `out` exists, a value does not fit
    `dtype`, or the disk is full.
    """
    target = export_dtype(dtype)
    if out.exists():
        raise CheckpointError(f"{out} exists: remove it or name another --out")
    native = NativeCheckpoint.open_checked(checkpoint)
    source = native.export_source(keep_generation_config)
    specs = [TensorSpec(name=n, shape=s, dtype=target) for n, s in native.shapes.items()]
    specs += [_live_spec(name, buffer, target) for name, buffer in native.buffers.items()]
    try:
        with atomic_directory(out) as partial:
            write_unchanging_files(partial, source, dtype=dtype, tied=is_tied(native.shapes))
            writer = WeightsWriter(partial, specs, max_shard_bytes)
            for spec in writer.order:
                buffer = native.buffers.get(spec.name)
                writer.write(spec, native.pieces(spec.name) if buffer is None else [buffer])
            writer.finish()
            seal_export(partial)
    except OSError as error:
        raise CheckpointError(f"the export to {out} failed: {error}") from error
    print(f"[export] wrote {out}\n[numerics] {numerics.summary(out)}", flush=True)


def seal_export(directory: Path) -> None:
    """Write the list of an export's files, by which `ds-sft verify` sees that it is whole."""
    text = json.dumps(seal(directory, names_in(directory)), indent=1)
    (directory / CHECKSUMS).write_text(text + "\n", encoding="utf-8")


class RankZero:
    """Runs rank 0's work so that its failure becomes every rank's failure at the same place."""

    def __init__(self, barrier: Barrier, device: torch.device, what_failed: str) -> None:
        self._barrier = barrier
        self._device = device
        self._what_failed = what_failed

    def run(self, work: Callable[[], None]) -> None:
        """Call `work` on rank 0 while the others wait; if it raises, all raise CheckpointError."""
        cause: Exception | None = None
        outcome: list[str | None] = [None]
        if dist.get_rank() == 0:
            try:
                work()
            except Exception as error:  # whatever it is, nobody may wait in vain
                cause = error
                reason = str(error) if str(error) else type(error).__name__
                outcome = [f"{self._what_failed}: {reason}"]
        self._barrier()
        dist.broadcast_object_list(outcome, src=0, device=self._device)
        if outcome[0] is not None:
            raise CheckpointError(outcome[0]) from cause


def is_tied(names: dict[str, Any]) -> bool:
    """Say whether the head shares the embedding: then it has no parameter of its own name."""
    return "lm_head.weight" not in names


def _named_tensors(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by Hugging Face name, shared ones once."""
    parameters = dict(module.named_parameters())
    persistent = module.state_dict(keep_vars=True).keys()
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    return {**parameters, **buffers}


def _live_spec(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> TensorSpec:
    """Return the spec of a whole tensor; a partitioned parameter keeps its shape in `ds_shape`."""
    shape = tuple(getattr(tensor, "ds_shape", tensor.shape))
    return TensorSpec(name=name, shape=shape, dtype=stored_dtype(tensor.dtype, dtype))


def _write_one(
    writer: WeightsWriter, spec: TensorSpec, tensor: torch.Tensor, on_rank_zero: RankZero
) -> None:
    """Gather one tensor on every rank, write it on rank 0, and let it go before the next one."""
    with _full_tensor(tensor, spec.dtype) as full:
        on_rank_zero.run(functools.partial(writer.write, spec, [full]))


@contextlib.contextmanager
def _full_tensor(tensor: torch.Tensor, dtype: torch.dtype) -> Iterator[torch.Tensor]:
    """Yield all values of a parameter or buffer on every rank (a collective for parameters)."""
    if not hasattr(tensor, "ds_id"):
        yield tensor
    elif tensor.dtype == dtype:
        with deepspeed.zero.GatheredParameters([tensor]):
            yield tensor.data
    else:
        yield full_master(tensor)

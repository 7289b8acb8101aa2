"""A native checkpoint into an engine of any world size, each rank reading its own share.

Owns the way from the files of one number of ranks to the partitions of another. Masters, moments
and compute weights of a rank are slices of the flat parameters, whoever wrote them; so one loader
serves an equal and a changed world size, and any offload and sub-group size on either side.
DeepSpeed's own loads are not used: the native one wants the same world size and layout, and the
universal one copies the first group's weight decay to all groups and shares one Adam step between
all sub-groups (measured with 0.19.8).

Invariants: a rank holds its own partitions and one slice of one parameter besides; no values are
sent over the network; when `load` returns, no rank reads the checkpoint any more. Learning rate and
weight decay are the recipe's, never the file's.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_sft.data.sealed import sealed_json
from ds_sft.engine.apollo import MEMBERS, NORM, Apollo
from ds_sft.errors import CheckpointError
from ds_sft.model.partitions import resident_sub_groups
from ds_sft.run.atomic import atomic_directory
from ds_sft.run.marker import META_NAME
from ds_sft.run.native import MASTERS, MOMENTS, NativeCheckpoint, load_states, rank_files
from ds_sft.run.seal import names_in, seal

FILE_KINDS = ("model", "optim")


def load(engine: Any, native: NativeCheckpoint) -> None:
    """Bring a fresh engine to the state of `native`, on every rank. Raises CheckpointError."""
    zero, names = engine.optimizer, engine.param_names
    if set(native.shapes) != {names[p] for group in zero.fp16_groups for p in group}:
        raise CheckpointError(f"{native.path} has other parameters than the model")
    never_updated = native.meta.get("dropped_updates", [0])[0] == native.meta["completed"]
    if native.adam_step == 0 and not never_updated:
        raise CheckpointError(f"{native.path} holds no optimizer state: it cannot be gone on from")
    optimizer = zero.optimizer
    if isinstance(optimizer, Apollo) and native.adam_step:
        optimizer.require_same(native.low_rank, native.path)
    zero.checkpoint_event_prologue()  # everything partitioned, small parameters too
    for index, flat in resident_sub_groups(zero):
        places = {names[param]: zero.grad_position[zero.get_param_id(param)][1:]
                  for param in zero.fp16_groups[index]}  # fmt: skip
        for name, (offset, size) in places.items():
            start = dist.get_rank() * size
            flat.data.narrow(0, offset, size).copy_(native.part(name, start, size, MASTERS))
        if isinstance(optimizer, Apollo):
            optimizer.state[flat] = _apollo_state(optimizer, native, flat)
        else:
            optimizer.state[flat] = _adam_state(engine, native, flat, places)
        # The weights of the forward pass are the masters, rounded and put away as after an update.
        zero._reassign_or_swap_out_partitioned_parameters(index)
    zero.invalidate_secondary_tensor()  # hpZ's copies, made from other weights
    zero.checkpoint_event_epilogue()
    engine.global_steps = native.meta["completed"]
    # Rank 0 may rename or delete directories next, which another rank may still be opening.
    dist.barrier()


def convert(source: Path, out: Path, world_size: int) -> None:
    """Write `source` to `out` as `world_size` ranks would have: `ds-sft reshard`.

    Holds one rank's share at a time. Raises CheckpointError.
    """
    if world_size < 1:
        raise CheckpointError(f"--world-size {world_size} is not a number of ranks: use 1 or more")
    if out.exists():
        raise CheckpointError(f"{out} exists: remove it or name another --out")
    native = NativeCheckpoint.open_checked(source)
    if not (source / "model").is_dir():
        raise CheckpointError(f"{source}/model is missing: the checkpoint is not whole")
    old_rank_0 = {kind: rank_files(source, kind, native.world_size)[0] for kind in FILE_KINDS}
    try:
        _write_all(native, old_rank_0, out, world_size)
    except OSError as error:
        raise CheckpointError(f"{out} cannot be written: {error}") from error
    print(f"[reshard] wrote {out} for {world_size} ranks", flush=True)


def _write_all(
    native: NativeCheckpoint, old_rank_0: dict[str, Path], out: Path, world_size: int
) -> None:
    with atomic_directory(out) as partial:
        for rank in range(world_size):
            _write_rank(native, old_rank_0, partial, rank, world_size)
        shutil.copytree(native.path / "model", partial / "model")
        files = seal(partial, names_in(partial))
        meta = {**native.meta, "world_size": world_size, "files": files}
        (partial / META_NAME).write_text(sealed_json(meta), encoding="utf-8")


def _write_rank(
    native: NativeCheckpoint, old_rank_0: dict[str, Path], to: Path, rank: int, world_size: int
) -> None:
    """The two files of one new rank, in the form of the old rank 0's."""
    model = load_states(old_rank_0["model"])
    optim = load_states(old_rank_0["optim"])
    groups = [list(shapes) for shapes in model["param_shapes"]]

    def flat(kind: str, names: list[str]) -> torch.Tensor:
        held = native.extents_for(kind, world_size)
        sizes = {name: held[name].part for name in names if name in held}
        parts = [native.part(name, rank * size, size, kind) for name, size in sizes.items()]
        return (torch.cat(parts) if parts else torch.zeros(0)).to(native.dtype(kind))

    zero = optim["optimizer_state_dict"]
    zero["partition_count"] = world_size
    zero["fp32_flat_groups"] = [flat(MASTERS, names) for names in groups]
    for index, state in zero["optimizer_state_dict"]["state"].items():  # none before an update
        names = groups[index]
        state.update({kind: flat(kind, names) for kind in native.flat_groups if kind != MASTERS})
    model["dp_world_size"] = world_size
    for kind, states in (("model", model), ("optim", optim)):
        name = old_rank_0[kind].name.replace("_rank_0_", f"_rank_{rank}_", 1)
        torch.save(states, to / name)


def _adam_state(
    engine: Any, native: NativeCheckpoint, flat: torch.Tensor, places: dict[str, Any]
) -> dict[str, Any]:
    """Both moments of a sub-group, which lie as its masters do, and the count of updates."""
    dtype = torch.bfloat16 if engine.bf16_optimizer_states() else torch.float32
    moments = {key: torch.zeros_like(flat, dtype=dtype, requires_grad=False) for key in MOMENTS}
    for key, whole in moments.items():
        for name, (offset, size) in places.items():
            start = dist.get_rank() * size
            whole.narrow(0, offset, size).copy_(native.part(name, start, size, key))
    step: int | torch.Tensor = native.adam_step  # each sub-group has its own
    if isinstance(engine.optimizer.optimizer, torch.optim.AdamW):
        step = torch.tensor(float(step), device=flat.device)
    return {"step": step, **moments}


def _apollo_state(
    optimizer: Apollo, native: NativeCheckpoint, flat: torch.Tensor
) -> dict[str, Any]:
    """Moments, norms and the count of updates of a sub-group."""
    state = optimizer.fresh_state(flat)
    if not native.adam_step:
        return state
    state["step"] = native.adam_step
    for key, name, offset, size in optimizer.slices(flat):
        values = native.part(name, dist.get_rank() * size, size, key)
        state[key].narrow(0, offset, size).copy_(values)
    for norm, name in zip(state[NORM], state[MEMBERS], strict=True):
        norm.copy_(native.norms[name])
    return state

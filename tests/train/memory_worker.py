"""One rank of the memory tests: what a real run holds, counted without any help of `ds_sft.engine`.

Runs two optimizer steps of a training with the given flags and writes `<out>.rankR.json`: bytes of
DeepSpeed's own tensors by what they are, bytes of every live tensor (each storage once), and bytes
that the layers of one microbatch keep for the backward pass (autograd's saved tensors, and what
Python holds alive meanwhile).
"""

from __future__ import annotations

import gc
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ds_sft.engine import build
from ds_sft.engine.step import train_step
from ds_sft.flags import parse_train
from ds_sft.plan import check


def live_tensors() -> list[torch.Tensor]:
    """Every tensor that Python can see; a dead one in a cycle is not alive."""
    gc.collect()
    return [x for x in gc.get_objects() if issubclass(type(x), torch.Tensor)]


def storages(tensors: Iterable[torch.Tensor]) -> dict[int, int]:
    """Bytes by storage."""
    found = {}
    for tensor in tensors:
        storage = tensor.untyped_storage()
        if storage.nbytes():
            found[storage.data_ptr()] = storage.nbytes()
    return found


def states(engine: Any) -> dict[str, int]:
    """Bytes of DeepSpeed's tensors: this rank's weights, gradients, masters and moments."""
    zero = engine.optimizer
    masters = zero.fp32_partitioned_groups_flat
    moments = [t for m in masters for t in zero.optimizer.state[m].values()
               if isinstance(t, torch.Tensor)]  # fmt: skip
    gradients = [zero.grad_partitions_flat_buffer, *(m.grad for m in masters if m.grad is not None)]
    return {
        "parameters": sum(storages(p.ds_tensor for p in engine.module.parameters()).values()),
        "gradients": sum(storages(gradients).values()),
        "optimizer": sum(storages([*masters, *moments]).values()),
    }


def kept_by_layers(engine: Any, plan: Any) -> int:
    """Bytes that came alive between the start of a forward pass and the head, weights aside."""
    before = live_tensors()  # held, so that no address is used again
    known = storages(before)
    saved: list[torch.Tensor] = []
    found: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    def at_head(*_: object) -> None:
        hook.remove()  # the first microbatch says it
        weights = storages(p.data for p in engine.module.parameters())
        alive = storages([*live_tensors(), *saved])
        found.update({k: n for k, n in alive.items() if k not in known and k not in weights})

    hook = engine.module.lm_head.register_forward_pre_hook(at_head)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        train_step(engine, plan.data, plan.batches, 1, 0.0)
    return sum(found.values())


def gathered(engine: Any, plan: Any) -> int:
    """Most bytes of whole weights when a module starts, on their way or there.

    Those that are never split are left aside.
    """
    most = 0
    weights = [p for p in engine.module.parameters() if not p.ds_persist]

    def look(*_: object) -> None:
        nonlocal most
        there = sum(storages(p.data for p in weights if p.data.numel()).values())
        coming = [p for p in weights if p.ds_status.name == "INFLIGHT" and not p.data.numel()]
        most = max(most, there + sum(p.ds_numel * p.element_size() for p in coming))

    hooks = [m.register_forward_pre_hook(look) for m in engine.module.modules()]
    train_step(engine, plan.data, plan.batches, 1, 0.0)
    for hook in hooks:
        hook.remove()
    return most


def main(words: list[str]) -> None:
    run, recipe = parse_train(words)
    plan = check(run, recipe, int(os.environ["WORLD_SIZE"]))
    assert plan.model is not None
    with build.distributed(run.collective_timeout_minutes):
        before = sum(storages(live_tensors()).values())
        engine = build.build_engine(run, recipe, plan.ds_config, plan.model)
        train_step(engine, plan.data, plan.batches, 0, 0.0)
        alive = storages(live_tensors())
        result = {**states(engine), "live": sum(alive.values()) - before}
        result["kept"] = kept_by_layers(engine, plan)
        if dist.get_world_size() > 1:
            result["gathered"] = gathered(engine, plan)
        Path(f"{run.out}.rank{dist.get_rank()}.json").write_text(json.dumps(result))

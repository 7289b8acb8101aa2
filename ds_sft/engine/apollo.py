"""APOLLO as the optimizer under ZeRO-3: each rank holds a slice of every weight and gradient.

DeepSpeed calls `step` once for each sub-group, with one flat master whose `.grad` is averaged and
clipped. The projection is linear, so a rank projects the rows that it holds; a reduce-scatter adds
the parts up and leaves each rank with the channels whose moments it keeps (1 / world size of them,
padded). The channels' factors are gathered, every rank scales its own slice in place, and one
all-reduce of the sub-group's norms sets the growth limits. No gradient is ever gathered.

Invariants: every rank makes the same collectives in the same order; beside state and gradients
there are at most BUCKET elements of projected gradient (or one tensor's); an update that DeepSpeed
drops never comes here, so it leaves nothing behind. Embeddings, head, norms, biases and small
matrices take torch's fused AdamW. Weights decay as AdamW's do, from their value before the update.
Leaves the formulas to `apollo_maths`, what lies where to `apollo_parts`, the rule of who is
low-rank to `recipe.low_rank`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.adamw import adamw

from ds_sft.engine import apollo_maths as maths
from ds_sft.engine.apollo_parts import Part, SubGroup, buckets, sub_group_of
from ds_sft.errors import CheckpointError
from ds_sft.model.kinds import parameter_kinds
from ds_sft.recipe.low_rank import Tensor
from ds_sft.recipe.recipe import ApolloSettings, Recipe

DENSE = ("exp_avg", "exp_avg_sq")
PROJECTED = ("low_rank_exp_avg", "low_rank_exp_avg_sq")
NORM = "update_norm"
MEMBERS = "low_rank"
GENERATORS = 4  # threads that make projections; torch makes one matrix on one core


class Apollo(torch.optim.Optimizer):
    """The base optimizer of a ZeRO-3 engine; `attach` it before the first step."""

    def __init__(
        self, groups: list[dict[str, Any]], tensors: Mapping[str, Tensor], recipe: Recipe
    ) -> None:
        assert recipe.apollo is not None
        super().__init__(groups, {"lr": recipe.learning_rate})
        self.settings: ApolloSettings = recipe.apollo
        self.betas, self.eps = (recipe.beta1, recipe.beta2), recipe.eps
        self.seed = recipe.trainer_seed
        self.tensors = tensors
        self._sub_groups: dict[torch.Tensor, SubGroup] = {}
        self._group: Any = None

    def attach(self, engine: Any, timeout: timedelta) -> None:
        """Learn what lies where in the partitions of `engine`; every rank calls it.

        `timeout` is that of a collective, should a group of its own be needed.
        """
        zero, names = engine.optimizer, engine.param_names
        places = {name: i for i, (name, _) in enumerate(engine.module.named_parameters())}
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
            members = [(names[p], p, zero.grad_position[zero.get_param_id(p)])
                       for p in zero.fp16_groups[index]]  # fmt: skip
            self._sub_groups[flat] = sub_group_of(members, places, self.tensors, self.settings.rank)
        masters = zero.fp32_partitioned_groups_flat[0].device
        if masters.type == "cpu" and torch.device(engine.device).type != "cpu":
            # NCCL takes no tensors in host memory.
            self._group = dist.new_group(backend="gloo", timeout=timeout)

    def fresh_state(self, flat: torch.Tensor) -> dict[str, Any]:
        """The state of a flat master that has seen no update."""
        sub_group, rank = self._sub_groups[flat], self.settings.rank
        dense, projected = sub_group.dense, sub_group.projected

        def zeros(size: int) -> torch.Tensor:
            return torch.zeros(size, device=flat.device)

        return {
            "step": 0,
            **{key: zeros(sum(p.moments(rank) for p in dense)) for key in DENSE},
            **{key: zeros(sum(p.moments(rank) for p in projected)) for key in PROJECTED},
            NORM: zeros(len(projected)),
            MEMBERS: {part.name: rank for part in projected},
        }

    def slices(self, flat: torch.Tensor) -> Iterator[tuple[str, str, int, int]]:
        """Every piece of the moments of a flat master: state key, parameter, offset, elements."""
        sub_group = self._sub_groups[flat]
        for keys, parts in ((DENSE, sub_group.dense), (PROJECTED, sub_group.projected)):
            for key in keys:
                for part in parts:
                    yield key, part.name, part.state, part.moments(self.settings.rank)

    def require_same(self, ranks: Mapping[str, int], where: Path) -> None:
        """Raise CheckpointError unless the checkpoint `where` has moments of the same kinds."""
        mine = {
            part.name for sub_group in self._sub_groups.values() for part in sub_group.projected
        }
        if dict(ranks) != dict.fromkeys(mine, self.settings.rank):
            raise CheckpointError(
                f"{where} has other low-rank moments than --apollo-rank {self.settings.rank} gives "
                "this model: use what it was trained with, or start a new run from its export"
            )

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the flat masters that DeepSpeed has put into the groups, one at a time."""
        for group in self.param_groups:
            for flat in group["params"]:
                state = self.state[flat]
                if not state:
                    state.update(self.fresh_state(flat))
                state["step"] += 1
                sub_group = self._sub_groups[flat]
                self._dense(flat, sub_group.dense, state, group)
                if sub_group.projected:
                    self._projected(flat, sub_group.projected, state, group)

    def _dense(
        self, flat: torch.Tensor, parts: list[Part], state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        if not parts:
            return
        assert flat.grad is not None
        exp_avg, exp_avg_sq = (
            [state[key].narrow(0, p.state, p.size) for p in parts] for key in DENSE
        )
        before = float(state["step"] - 1)
        adamw(
            [flat.narrow(0, p.offset, p.size) for p in parts],
            [flat.grad.narrow(0, p.offset, p.size) for p in parts],
            exp_avg, exp_avg_sq, [], [torch.tensor(before, device=flat.device) for _ in parts],
            fused=True, amsgrad=False, maximize=False, beta1=self.betas[0], beta2=self.betas[1],
            lr=group["lr"], weight_decay=group["weight_decay"], eps=self.eps,
        )  # fmt: skip

    def _projected(
        self, flat: torch.Tensor, parts: list[Part], state: dict[str, Any], group: dict[str, Any]
    ) -> None:
        settings, grad = self.settings, flat.grad
        assert grad is not None
        for bucket in buckets(parts, settings.rank):
            self._scale_gradients(grad, bucket, state)
        squares = torch.stack([part.of(grad).norm().double().square() for part in parts])
        self._all_reduce(squares)
        norms = squares.sqrt().float()
        bounded = maths.limit(norms, state[NORM])
        state[NORM].copy_(norms * bounded)
        size = maths.step_size(group["lr"], self.betas, state["step"])
        size *= 1.0 if settings.tensor_wise else math.sqrt(settings.scale)
        for part, factor in zip(parts, bounded, strict=True):
            weights = part.of(flat)
            weights.mul_(1.0 - group["lr"] * group["weight_decay"])
            weights.addcmul_(part.of(grad), factor, value=-size)

    def _scale_gradients(
        self, grad: torch.Tensor, parts: list[Part], state: dict[str, Any]
    ) -> None:
        """Bring the moments of `parts` up to date and turn their gradients into updates."""
        mine = self._reduced(grad, parts, state["step"])  # [channels of this rank, rank]
        exp_avg, exp_avg_sq = (
            state[key].narrow(0, parts[0].state, mine.numel()).view(mine.shape) for key in PROJECTED
        )
        n = maths.direction(mine, exp_avg, exp_avg_sq, self.betas, self.eps)
        for part, factor in zip(parts, self._factors(n, mine, parts), strict=True):
            for block in part.blocks():
                values = block.of(part.of(grad))
                maths.multiply(values, block, maths.is_tall(part.shape), factor)

    def _reduced(self, grad: torch.Tensor, parts: list[Part], step: int) -> torch.Tensor:
        """The projected gradients of `parts`, summed over ranks: the rows of this rank."""
        world, rank = dist.get_world_size(), self.settings.rank
        per_rank = sum(p.channels for p in parts)
        whole = torch.zeros(world, per_rank, rank, device=grad.device)
        begin = 0
        for part, p in zip(parts, self._projections(parts, step), strict=True):
            r = torch.zeros(world * part.channels, rank, device=grad.device)
            p = p.to(grad.device, non_blocking=True)
            for block in part.blocks():
                values = block.of(part.of(grad))
                maths.add_projected(r, values, block, maths.is_tall(part.shape), p)
            whole[:, begin : begin + part.channels] = r.view(world, part.channels, rank)
            begin += part.channels
        if world == 1:
            return whole[0]
        mine = torch.empty(per_rank, rank, device=grad.device)
        dist.reduce_scatter_tensor(mine, whole.view(world * per_rank, rank), group=self._group)
        return mine

    def _projections(self, parts: list[Part], step: int) -> list[torch.Tensor]:
        number = (step - 1) // self.settings.update_proj_gap

        def make(part: Part) -> torch.Tensor:
            return maths.projection(self.seed, part.index, number, part.shape, self.settings.rank)

        with ThreadPoolExecutor(max_workers=GENERATORS) as pool:
            return list(pool.map(make, parts))

    def _factors(self, n: torch.Tensor, r: torch.Tensor, parts: list[Part]) -> list[torch.Tensor]:
        """For each part the factors of all its channels [C], on every rank.

        Those of a whole tensor come with the scale in them, which then counts for the limit.
        """
        counts = [p.channels for p in parts]
        if self.settings.tensor_wise:
            squares = torch.stack([
                torch.stack([x.norm().double().square() for x in whole.split(counts)])
                for whole in (n, r)
            ])  # fmt: skip
            self._all_reduce(squares)
            scalars = maths.factor_of_squares(squares[0], squares[1]).float()
            scalars *= math.sqrt(self.settings.scale)
            return [f.expand(max(p.shape)) for f, p in zip(scalars, parts, strict=True)]
        mine = maths.factors(n, r)
        everywhere = mine.new_empty(dist.get_world_size(), len(mine))
        if len(everywhere) == 1:
            everywhere[0] = mine
        else:
            dist.all_gather_into_tensor(everywhere.view(-1), mine, group=self._group)
        split = everywhere.split(counts, dim=1)
        return [f.reshape(-1)[: max(p.shape)] for f, p in zip(split, parts, strict=True)]

    def _all_reduce(self, values: torch.Tensor) -> None:
        if dist.get_world_size() > 1:
            dist.all_reduce(values, group=self._group)


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Every parameter of a partitioned model with its kind, by the class of its module."""
    kinds = parameter_kinds(model)
    return {
        name: Tensor(kind=kinds[name], shape=tuple(getattr(p, "ds_shape", p.shape)))
        for name, p in model.named_parameters()
    }

"""APOLLO under ZeRO-3 on prescribed gradients: one rank; see test_apollo_slices.py.

Every gradient is drawn from a seed, so that nothing but the update itself is compared. Shapes are
odd, and sub-groups, slices of ranks and rows end at different places.
"""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import deepspeed
import torch
import torch.distributed as dist
from torch import nn

from ds_sft.engine.apollo import Apollo, tensors_of
from ds_sft.engine.build import distributed
from ds_sft.model.load import parameter_groups
from ds_sft.recipe.named import RECIPES
from ds_sft.recipe.recipe import Recipe

SHAPES = {"table": (11, 6), "tall": (13, 7), "wide": (5, 17), "square": (9, 9), "small": (23, 3),
          "unused": (8, 7)}  # fmt: skip
"""Of the weights: an embedding, linear layers, one that rank 3 is too much for, one without any
gradient."""
STEPS, DECAY, CLIP = 20, 0.1, 0.5
SILENT = {"square": (0, 4, 5)}
"""Steps at which a weight has no gradient, the first one too."""
CASES: dict[str, dict[str, Any]] = {
    "one sub-group": {},
    "a sub-group for each weight": {"sub_group_size": 10},
    "some sub-groups": {"sub_group_size": 60},
    "in host memory": {"sub_group_size": 60, "offload_optimizer": {"device": "cpu"}},
    "a new projection at every step": {"gap": 1},
    "one factor a tensor": {"mini": True, "sub_group_size": 60},
    "rank as large as a matrix may be": {"rank": 6},
}


def recipe_of(case: dict[str, Any]) -> Recipe:
    """What a case trains with; the seed is that of the projections."""
    mini = bool(case.get("mini"))
    return RECIPES["qwen3-8b"].replace(
        optimizer="apollo-mini" if mini else "apollo", learning_rate=0.02, weight_decay=DECAY,
        apollo_rank=1 if mini else case.get("rank", 3), apollo_update_proj_gap=case.get("gap", 5),
        apollo_scale=16.0 if mini else 2.0, trainer_seed=3,
    )  # fmt: skip


def gradient(name: str, step: int, micro: int, rank: int) -> torch.Tensor:
    """What one microbatch of one rank adds; a step in the middle is a hundred times larger."""
    words = (list(SHAPES).index(name), step, micro, rank)
    seed = sum(word * 1000**i for i, word in enumerate(words))
    values = torch.randn(SHAPES[name], generator=torch.Generator().manual_seed(seed))
    return values * (100.0 if step == 7 else 0.1) * (step not in SILENT.get(name, ()))


def start(name: str) -> torch.Tensor:
    """Weights before the first step."""
    generator = torch.Generator().manual_seed(100 + list(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


class Prescribed(nn.Module):
    """Its loss has the gradients that are asked for."""

    def __init__(self) -> None:
        super().__init__()
        for name, (rows, columns) in SHAPES.items():
            module: Any = (
                nn.Embedding(rows, columns) if name == "table"
                else nn.Linear(columns, rows, bias=False)
            )  # fmt: skip
            module.weight.data = start(name)
            self.add_module(name, module)

    def forward(self, step: int, micro: int) -> torch.Tensor:
        total = torch.zeros(())
        for name, (rows, columns) in SHAPES.items():
            if name == "unused":
                continue
            module, wanted = getattr(self, name), gradient(name, step, micro, dist.get_rank())
            if name == "table":
                total = total + (module(torch.arange(rows)) * wanted).sum()
            else:
                total = total + (module(torch.eye(columns)) * wanted.T).sum()
        return total


def run_case(case: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Final weights of a case."""
    recipe = recipe_of(case)
    zero = {k: case[k] for k in ("sub_group_size", "offload_optimizer") if k in case}
    config = {
        "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 2,
        "gradient_clipping": CLIP, "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {"stage": 3, "stage3_param_persistence_threshold": 0, **zero},
    }  # fmt: skip
    model = Prescribed()
    optimizer = Apollo(parameter_groups(model, DECAY), tensors_of(model), recipe)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)
    optimizer.attach(engine, timedelta(minutes=1))
    for step in range(STEPS):
        for group in engine.optimizer.param_groups:
            group["lr"] = recipe.learning_rate / (1 + step)
        for micro in range(2):
            engine.backward(engine(step, micro))
            engine.step()
    with deepspeed.zero.GatheredParameters(list(model.parameters())):
        return {n: p.detach().clone() for n, p in model.named_parameters()}


def main(words: list[str]) -> None:
    out = Path(words[words.index("--out") + 1])
    with distributed(5):
        found = {name: run_case(case) for name, case in CASES.items()}
        if dist.get_rank() == 0:
            out.parent.mkdir(parents=True, exist_ok=True)
            torch.save(found, out)
            out.with_suffix(".json").write_text(json.dumps(dist.get_world_size()))

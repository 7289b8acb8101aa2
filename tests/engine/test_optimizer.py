"""AdamW with clipping and the decay mask against the optax trajectory."""

import json

import harness
import numpy as np
import pytest
import torch

from ds_sft.engine.build import make_optimizer
from ds_sft.recipe.recipe import Recipe
from ds_sft.recipe.schedule import Schedule

META = json.loads((harness.GOLDEN / "adam_trajectory" / "meta.json").read_text())
AVAILABLE = sorted(p.stem for p in (harness.GOLDEN / "adam_trajectory").glob("*.npz"))


def test_there_are_trajectories_to_compare_with():
    assert AVAILABLE == ["8b_like", "no_clip"]


def errors_in_roundings(case: str, mask: dict[str, bool]) -> list[float]:
    """Largest error of a parameter after each step, in roundings of the tensor's largest value."""
    spec, arrays = META["cases"][case], np.load(harness.GOLDEN / f"adam_trajectory/{case}.npz")
    config = dict(spec["config"])
    clip = config.pop("max_grad_norm") or 0.0
    recipe = Recipe(model_id="m", train_batch_size=2, num_train_steps=spec["num_train_steps"],
                    eps=config.pop("epsilon"), max_grad_norm=clip, **config)  # fmt: skip
    params = {n: torch.nn.Parameter(torch.from_numpy(arrays[f"p0/{n}"].copy())) for n in mask}
    groups = [
        {"params": [p for n, p in params.items() if mask[n] is decayed],
         "weight_decay": recipe.weight_decay if decayed else 0.0}
        for decayed in (True, False)
    ]  # fmt: skip
    optimizer = make_optimizer("adamw", groups, recipe)
    schedule = Schedule.from_recipe(recipe, num_packs=1)
    errors = []
    for step in range(len(spec["gnorm"])):
        for name, p in params.items():
            p.grad = torch.from_numpy(arrays[f"g/{step}/{name}"].copy())
        norm = torch.cat([p.grad.flatten() for p in params.values()]).norm().item()
        assert norm == pytest.approx(spec["gnorm"][step], rel=1e-6)
        if clip:  # DeepSpeed's formula
            for p in params.values():
                p.grad /= max(1.0, (norm + 1e-6) / clip)
        for group in optimizer.param_groups:
            group["lr"] = recipe.learning_rate * schedule.lr_multiplier(step)
        optimizer.step()
        pairs = [(p.detach().numpy(), arrays[f"p/{step}/{n}"]) for n, p in params.items()]
        errors.append(max(np.abs(a - b).max() / np.spacing(np.abs(b).max()) for a, b in pairs))
    return errors


@pytest.mark.parametrize("case", AVAILABLE)
def test_parameters_follow_optax_within_the_roundings_of_a_step(case):
    """torch rounds twice a step (decay, then update), optax once."""
    errors = errors_in_roundings(case, META["mask"])
    assert len(errors) >= 8
    assert all(error <= 1.5 * (step + 1) for step, error in enumerate(errors)), errors


def test_a_wrong_decay_mask_would_be_seen():
    flipped = {name: not decays for name, decays in META["mask"].items()}
    assert errors_in_roundings("no_clip", flipped)[-1] > 1000

"""What a planned run needs of a GPU, of host memory and of NVMe, for `ds-sft plan --memory`.

Owns the step from a plan to `engine.memory`'s arithmetic. Imports torch, inside, to measure what
the layers keep: seconds, not milliseconds, so a plan says it only when asked.
"""

from __future__ import annotations

import math
from typing import Any

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import memory
from ds_sft.engine.memory import Activations
from ds_sft.engine.setup import Setup
from ds_sft.errors import ConfigError, DsSftError
from ds_sft.fit_question import FitFlags
from ds_sft.plan import Plan
from ds_sft.recipe import low_rank
from ds_sft.run_config import RunConfig

GPUS_OF_A_NODE = 8
BUDGET_TOLERANCE = 1.1  # of --memory-budget-gb


def facts(plan: Plan) -> dict[str, Any]:
    """Bytes by place and purpose, as plain values. Raises ConfigError without the model's files."""
    from ds_sft.fit_view import need_facts

    if plan.model is None:
        raise ConfigError(
            f"--memory: {plan.recipe.model_id} is not on this machine: name a directory, or use "
            "`ds-sft fit`, for which config.json is enough"
        )
    recipe = plan.recipe
    setup = Setup(
        numels={name: math.prod(shape) for name, (shape, _) in plan.model.tensors.items()},
        tied=plan.model.tied,
        world_size=plan.batches.world_size,
        gpus_per_node=GPUS_OF_A_NODE,
        compute_bytes=2 if recipe.compute_dtype == "bfloat16" else 4,
        reduce_bytes=2 if recipe.grad_reduce_dtype == "bfloat16" else 4,
        moments=low_rank.moments_of(plan.model.shapes, recipe, plan.batches.world_size),
    )
    need = memory.need(setup, plan.ds_config, activations(plan))
    budget = plan.run.memory_budget_gb
    allocated = need.gpu.total - need.gpu.slack  # as a run measures its peak: without the context
    return {
        **need_facts(need),
        "budget": {
            "gb": budget, "allocated": allocated,
            "stops": 0 < BUDGET_TOLERANCE * budget < allocated / 1e9,
        },
        "assumptions": memory.ASSUMPTIONS,
    }  # fmt: skip


def activations(plan: Plan) -> Activations:
    """What a microbatch of the run holds beside the states, its attention included."""
    assert plan.model is not None
    run, dtype = plan.run, plan.recipe.compute_dtype
    tokens = run.per_device_batch * plan.data.max_seq_len
    kernel = "varlen" if dtype == "bfloat16" and run.attn_impl != "sdpa" else "sdpa"
    return of_layers(plan.model, tokens, run, dtype, kernel)


def of_layers(
    model: ModelFiles, tokens: int, flags: RunConfig | FitFlags, dtype: str, kernel: str
) -> Activations:
    """What a microbatch of so many tokens holds in a model whose layers run as `flags` say.

    Raises ConfigError for a config.json that transformers cannot take.
    """
    import torch

    from ds_sft.model.activations import of_choices
    from ds_sft.model.layers import LayerChoices

    choices = LayerChoices(
        recompute_every=flags.recompute_every, mlp_tiles=flags.mlp_tiles,
        offload_activations=flags.offload_activations,
    )  # fmt: skip
    config = dict(model.config)
    how = {"dtype": getattr(torch, dtype), "loss_chunk_size": flags.loss_chunk_size}
    try:
        small, large = of_choices(config, tokens, choices, **how, kernel=kernel)
    except DsSftError:
        raise
    except Exception as error:  # transformers' classes check their configurations in many ways
        raise ConfigError(
            f"transformers cannot build a model from {model.directory}/config.json "
            f"({type(error).__name__}: {error}): copy the model again"
        ) from error
    layers = model.config["num_hidden_layers"]
    whole = memory.extrapolated(small, large, layers)
    if not flags.offload_activations:
        return whole
    one = tokens * model.config["hidden_size"] * (2 if dtype == "bfloat16" else 4)
    return memory.parked(whole, choices.recomputed(layers), one)


def rows(said: dict[str, Any]) -> list[tuple[str, str]]:
    """The table: name and text."""
    gpu, host = said["gpu"], said["host"]
    parts = {k: v for k, v in gpu.items() if k not in ("phase", "total") and v}
    budget = said["budget"]
    verdict = "the run would stop" if budget["stops"] else "within it and a tenth"
    held = f"{budget['gb']:g} GB; {budget['allocated'] / 1e9:.2f} GB would be allocated: {verdict}"
    return [
        ("a GPU at its peak", f"{_gib(gpu['total'])}, in the {gpu['phase']}"),
        *((f"... {name}", _gib(size)) for name, size in parts.items()),
        ("host memory of a node", f"{_gib(host['total'])} = states {_gib(host['states'])}, buffers "
         f"{_gib(host['buffers'])}, processes {_gib(host['processes'])} ({GPUS_OF_A_NODE} GPUs a "
         "node at most)"),
        ("NVMe of a node", _gib(said["nvme"]) if said["nvme"] else "none"),
        *([("budget", held)] if budget["gb"] else []),
        ("assumed", said["assumptions"]),
    ]  # fmt: skip


def _gib(size: float) -> str:
    return f"{size / memory.GIB:.2f} GiB"

"""The DeepSpeed engine of a run: process group, partitioned model, optimizer.

Owns every call of `deepspeed.initialize`. Invariants: bf16 compute over fp32 masters, fp32
accumulation and the reduction dtype of the recipe (the config says so, see `engine.config`); the
learning rate is set by hand before each update. Leaves the loop to `train`, one step to `step`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import warnings
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import deepspeed
import numpy as np
import torch
import torch.distributed as dist
from deepspeed.accelerator import get_accelerator
from torch import nn

from ds_sft.data.model_files import ModelFiles
from ds_sft.engine import meeting, ops, swap_files
from ds_sft.engine.apollo import Apollo, tensors_of
from ds_sft.engine.config import optimizer_kind
from ds_sft.errors import ConfigError, PreflightError
from ds_sft.model import attention, liger
from ds_sft.model.kinds import parameter_kinds, summary
from ds_sft.model.layers import LayerChoices
from ds_sft.model.load import build_partitioned, parameter_groups, restore_float32_masters
from ds_sft.recipe import low_rank
from ds_sft.recipe.recipe import Recipe
from ds_sft.run_config import RunConfig


@contextlib.contextmanager
def distributed(timeout_minutes: float) -> Iterator[None]:
    """The process group of the launcher, for a run; every collective has this timeout.

    Raises PreflightError when the port at which ranks meet belongs to another program.
    """
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    # DeepSpeed calls names that torch renames: a line per collective, with nothing to be done here.
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch.distributed")
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    for name, value in {**alone, "MASTER_PORT": "29500"}.items():
        os.environ.setdefault(name, value)
    skip_inference_op()
    accelerator = get_accelerator()
    accelerator.set_device(int(os.environ["LOCAL_RANK"]))
    with meeting.listening():
        try:
            deepspeed.init_distributed(
                dist_backend=accelerator.communication_backend_name(),
                timeout=timedelta(minutes=timeout_minutes),
                verbose=False,
            )
        except dist.DistNetworkError as error:
            if "EADDRINUSE" not in str(error):
                raise
            raise PreflightError(
                f"port {os.environ['MASTER_PORT']}, at which the ranks meet, is in use, perhaps by "
                "another run: give the launcher another one (--master_port 29501)"
            ) from None
    yield
    # Only after success: on an error the other ranks may be inside a collective for good.
    dist.barrier()
    dist.destroy_process_group()


def skip_inference_op() -> None:
    """Keep DeepSpeed from compiling its shared-memory all-reduce on a CPU; call it before init.

    Only its inference uses the operator. It takes a compiler half a minute, and each rank of each
    run would leave 69 MB in /dev/shm for ever (measured with 0.19.8).
    """
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def fetch_model(model_id: str) -> None:
    """Download a Hub model into this host's cache: one rank per host fetches, the others wait."""
    problem: list[str | None] = [None]
    if os.environ["LOCAL_RANK"] == "0":
        from huggingface_hub import snapshot_download

        print(f"[init] fetching {model_id} from the Hub", flush=True)
        try:
            snapshot_download(
                model_id, allow_patterns=["*.json", "*.safetensors", "*.jinja", "*.txt"]
            )
        except Exception as error:
            problem = [f"{model_id} cannot be fetched from the Hub: {error}"]
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, problem[0])
    for message in problems:
        if message:
            raise ConfigError(f"{message}: name a directory with --model-id, or fetch it first")


def device() -> torch.device:
    """The device of this rank."""
    return torch.device(get_accelerator().current_device_name())


def build_engine(
    run: RunConfig,
    recipe: Recipe,
    ds_config: dict[str, Any],
    files: ModelFiles,
    *,
    random_weights: bool = False,
) -> Any:
    """A ZeRO-3 engine with the model of `files` in it; prints each automatic choice once."""
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(recipe.trainer_seed)
    dtype = getattr(torch, recipe.compute_dtype)
    kernel, why = attention.choose(run.attn_impl, device(), dtype, files.head_sizes)
    attention.register(kernel)
    say(f"[init] attention {kernel} ({why}), one segment per document")
    if run.no_loss_checkpoint:
        say("[init] --no-loss-checkpoint changes nothing: the head keeps and recomputes no logits")
    choices = layer_choices(run, files)
    ops.clear(ops.needed_by(ds_config))
    ds_config = swap_files.claim(ds_config)
    model = build_partitioned(
        files, ds_config, dtype, run.loss_chunk_size, choices, device(),
        random_weights=random_weights,
    )  # fmt: skip
    say(f"[init] parameters: {summary(parameter_kinds(model))}")
    groups = parameter_groups(model, recipe.weight_decay)
    optimizer = choose_optimizer(ds_config, model, groups, recipe)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)
    if isinstance(optimizer, Apollo):
        optimizer.attach(engine, timedelta(minutes=run.collective_timeout_minutes))
    rounded = recipe.compute_dtype == "bfloat16" and recipe.master_dtype == "float32"
    if rounded and not random_weights:
        count = restore_float32_masters(engine.module, files)
        if count:
            say(f"[init] {count} tensors of the model are float32: the masters keep their values")
    return engine


def layer_choices(run: RunConfig, files: ModelFiles) -> LayerChoices:
    """How the layers run, the same on every rank, printed once. Raises ConfigError."""
    obstacle = liger.obstacle(files.config, device()) if run.liger != "off" else None
    obstacles: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(obstacles, obstacle)
    use_liger, why = liger.choose(run.liger, obstacles)
    say(f"[init] Liger {'on' if use_liger else 'off'} ({why}); the head is ds_sft's own")
    choices = LayerChoices(
        recompute_every=run.recompute_every,
        offload_activations=run.offload_activations,
        mlp_tiles=run.mlp_tiles,
        liger=use_liger,
    )
    num_layers, hidden_size = (files.config[k] for k in ("num_hidden_layers", "hidden_size"))
    for line in choices.lines(num_layers, hidden_size):
        say(f"[init] {line}")
    return choices


def choose_optimizer(
    ds_config: dict[str, Any], model: nn.Module, groups: list[dict[str, Any]], recipe: Recipe
) -> torch.optim.Optimizer:
    """The recipe's optimizer, said once; with APOLLO, who takes which way. Raises ConfigError."""
    if recipe.apollo is None:
        kind = optimizer_kind(ds_config)
        say(f"[init] optimizer {kind}")
        return make_optimizer(kind, groups, recipe)
    tensors = tensors_of(model)
    low_rank.check(tensors, recipe.apollo.rank)
    say(f"[init] optimizer {low_rank.in_words(recipe)}")
    for line in low_rank.table(tensors, recipe.apollo.rank, dist.get_world_size()):
        say(f"[init] {line}")
    return Apollo(groups, tensors, recipe)


def make_optimizer(
    kind: str, groups: list[dict[str, Any]], recipe: Recipe
) -> torch.optim.Optimizer:
    """AdamW with optax's formula: eps outside the root, decay decoupled and times lr.

    `kind` is "adamw" or "cpu_adam" (DeepSpeed's, for an offloaded optimizer). Raises ConfigError
    when the latter cannot be built on this machine.
    """
    betas = (recipe.beta1, recipe.beta2)
    if kind == "cpu_adam":
        from ds_sft.engine.cpu_adam import cpu_adam

        try:
            return cpu_adam(
                groups, recipe.learning_rate, betas, recipe.eps,
                float32_states=recipe.optimizer_state_dtype == "float32",
            )  # fmt: skip
        except Exception as error:
            raise ConfigError(
                "offload_optimizer needs DeepSpeed's CPU Adam, which cannot be built here "
                f"({error}): install a C++ compiler and ninja (`ds-sft doctor` says what is "
                "missing), or use ds_configs/zero3.json"
            ) from error
    return torch.optim.AdamW(
        groups, lr=recipe.learning_rate, betas=betas, eps=recipe.eps, fused=True
    )


def say(message: str) -> None:
    """Print once, on rank 0 of the world."""
    if dist.get_rank() == 0:
        print(message, flush=True)

"""The flags of training that say where and when, and move no loss: `RunConfig`.

Owns their names, defaults, help texts and limits; each field is a flag. Leaves the flags that
decide the loss curve to `Recipe`, and the words of the command line to `flags`. Imports neither
torch nor numpy.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro

from ds_sft.errors import ConfigError

LARGEST = 1_000_000_000  # of any count or time on the command line; also keeps infinity out
DEFAULT_RECIPE = "qwen3-8b"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunConfig:
    """Where and when: what moves no loss."""

    data: Path
    """Packed data set, made by `ds-sft prepare`."""
    out: Path | None = None
    """Run directory: run.json, metrics.jsonl, checkpoints/, hf/, finished."""
    recipe: str = DEFAULT_RECIPE
    """Named recipe or model entry (`ds-sft recipes` lists them), or a .toml file."""
    allow_unverified: bool = False
    """Take a model entry that is marked unverified."""
    preset: str = ""
    """Flags for one card of a size: smoke-12gb, 16gb, 24gb or 80gb; flags given here win over it,
    and it wins over the recipe."""
    preset_origins: tyro.conf.Suppress[tyro.conf.Fixed[tuple[str, ...]]] = ()
    """Where the fields that a preset may decide have their values from; no flag."""
    deepspeed_config: Path = Path("ds_configs/zero3.json")
    """Plain DeepSpeed JSON; what the recipe decides is not in it."""
    nvme_path: Path | None = None
    """Directory on a local disk for swap files; default: nvme_path of the DeepSpeed JSON."""
    tokenizer: str = ""
    """Tokenizer that exports write; default: the one stored with the data, else the model's."""
    epochs: float = 0.0
    """Length of the run in passes over the data; excludes --num-train-steps."""
    per_device_batch: int = 1
    """Packs per rank in one microbatch."""
    memory_budget_gb: float = 0.0
    """End the run when a rank's peak (allocated on its GPU; on a CPU its resident memory) exceeds
    so many 1e9 bytes by a tenth; 0 = no budget."""
    allow_idle: bool = False
    """Accept more than 25 % idle slots when the world size does not divide the batch."""
    loss_chunk_size: int = 2048
    """Tokens per chunk of the cross-entropy; 0 = the whole row at once."""
    allow_full_logits: bool = False
    """Accept --loss-chunk-size 0, which holds [tokens, vocabulary] logits."""
    no_loss_checkpoint: bool = False
    """Accepted from the first trainer; the head keeps no logits and recomputes nothing."""
    attn_impl: Literal["auto", "flash_attention_2", "varlen", "sdpa"] = "auto"
    """Attention kernel: flash-attn, torch's varlen_attn, or one SDPA call per document."""
    allow_untested_architecture: bool = False
    """Train a dense model of an architecture that was never compared with plain transformers."""
    recompute_every: int = 1
    """Compute every so many layers again in backward instead of keeping what is inside them; 1 =
    every layer, 0 = none: faster, with more memory."""
    offload_activations: bool = False
    """Keep the inputs of recomputed layers in pinned host memory until backward."""
    mlp_tiles: int | Literal["auto"] = 0
    """Run each MLP over so many tiles of tokens; 0 = off, auto = tiles as long as the model is
    wide, so that a longer row needs no more memory inside an MLP."""
    liger: Literal["auto", "on", "off"] = "auto"
    """Liger's kernels for norms, rotary embedding and SwiGLU: auto = where they can run."""
    temp_checkpoint_minutes: float = 10.0
    """A temporary checkpoint when so long passed since any save; 0 = off."""
    keep_checkpoints: int = 2
    """Native checkpoints that stay; 0 = all."""
    hf_export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    """Precision of the exports."""
    keep_generation_config: bool = False
    """Copy the model's generation_config.json into exports."""
    resume: str = "auto"
    """auto (newest whole checkpoint of --out), none, or a checkpoint directory."""
    verify_on_resume: Literal["size", "hash"] = "hash"
    """What is compared with a checkpoint's marker before it is loaded; hash reads every file."""
    allow_change: tuple[str, ...] = ()
    """What a resumed run may change: recipe fields (num_train_steps), data, tokenizer, code."""
    stop_after: int = 0
    """Stop after so many completed steps without changing the schedule; 0 = run to the end."""
    eval_every: int | None = None
    """Evaluate <data>/validation at every label that is a multiple of this and at the last one;
    default: 500 where there is one; 0 = never."""
    log_every: int = 1
    """A console line every so many steps; the last step always."""
    skip_checks: bool = False
    """Skip the start-up proofs."""
    collective_timeout_minutes: float = 30.0
    """A collective that takes longer ends the run."""
    step_timeout_minutes: float = 0.0
    """A step that takes longer prints each rank's stack and ends the run; 0 = ten times the median
    step, at least 30."""
    on_nonfinite: Literal["stop", "skip"] = "stop"
    """When a loss or gradient is not finite: end the run, or drop that update and go on."""
    max_nonfinite: int = 5
    """End the run when so many updates in a row had to be dropped."""
    check_weights_every: int = 100
    """Look for weights that are not finite every so many steps, and before each save; 0 = only
    before saves."""
    wandb_project: str = ""
    """Log to this Weights & Biases project."""
    wandb_name: str = ""
    """Run name; default: the name of the run directory."""
    wandb_id: str = ""
    """Fixed run id; default: one that is kept in the run directory."""
    dry_run: bool = False
    """Print the plan, look into all files that training would read, and stop: exit code 0 or 2."""

    def __post_init__(self) -> None:
        if self.loss_chunk_size == 0 and not self.allow_full_logits:
            raise ConfigError(
                "--loss-chunk-size 0 holds [tokens, vocabulary] logits in float32 (20 GB for 32k "
                "tokens of Qwen3): use 2048, or add --allow-full-logits"
            )
        if self.offload_activations and self.recompute_every == 0:
            raise ConfigError(
                "--offload-activations moves the inputs of recomputed layers, and with "
                "--recompute-every 0 there are none: drop one of the two"
            )
        minimum = {
            "per_device_batch": 1,
            "memory_budget_gb": 0,
            "loss_chunk_size": 0,
            "recompute_every": 0,
            "mlp_tiles": 0,
            "keep_checkpoints": 0,
            "stop_after": 0,
            "log_every": 1,
            "eval_every": 0,
            "temp_checkpoint_minutes": 0,
            "epochs": 0,
            "collective_timeout_minutes": 0.01,
            "step_timeout_minutes": 0,
            "max_nonfinite": 1,
            "check_weights_every": 0,
        }
        for name, low in minimum.items():
            value = getattr(self, name)
            if value not in (None, "auto") and not low <= value <= LARGEST:
                flag = name.replace("_", "-")
                raise ConfigError(f"--{flag}={value} must be from {low} to {LARGEST:,}")

    @property
    def run_dir(self) -> Path:
        """--out. Raises ConfigError when it was not given."""
        if self.out is None:
            raise ConfigError(
                "--out is missing: name the run directory, for example --out runs/one"
            )
        return self.out

"""The complete DeepSpeed configuration: the person's JSON, checked, plus what the recipe decides.

Owns every key that touches the numbers. Invariants: gradients are accumulated in float32 and
reduced in the recipe's precision whatever the engine's default (both keys are needed for that,
DeepSpeed would use bfloat16); clipping is always written, since DeepSpeed clips at 1.0 when the key
is missing; a key that is misspelt, that ds_sft owns, or that would have no effect is a ConfigError,
never a warning. Leaves the optimizer's construction to `build`. No torch, no DeepSpeed.
"""

from __future__ import annotations

import difflib
import json
import math
from pathlib import Path
from typing import Any

from ds_sft.engine.json_keys import ACCEPTED, REFUSED, Rules, Value
from ds_sft.errors import ConfigError
from ds_sft.recipe.recipe import NO_FP8, Recipe, asks_for_fp8

_NEVER = 2**31 - 1
BUFFERS_OF_ADAM = 4
BUFFERS_OF_PARAMS = 2
DIRECT_BYTES = 4096
_SHORT_DTYPE = {"bfloat16": "bf16", "float32": "fp32"}


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`. Raises ConfigError with line and column of what is wrong."""
    try:
        value = json.loads(
            path.read_text(encoding="utf-8"),
            object_pairs_hook=_unique_keys,
            parse_constant=_no_constant,
        )
    except FileNotFoundError:
        raise ConfigError(
            f"--deepspeed-config {path} does not exist: use one of ds_configs/, "
            "for example ds_configs/zero3.json"
        ) from None
    except json.JSONDecodeError as error:
        raise ConfigError(
            f"{path}:{error.lineno}:{error.colno}: not JSON: {error.msg} "
            "(comments and trailing commas are not allowed)"
        ) from None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"--deepspeed-config {path} cannot be read: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds {_shown(value)}, not a JSON object: write {{...}}")
    return value


def engine_config(
    json_dict: dict[str, Any],
    where: str | Path,
    recipe: Recipe,
    *,
    world_size: int,
    per_device_batch: int,
    nvme_path: Path | None = None,
) -> dict[str, Any]:
    """The dictionary for `deepspeed.initialize` from the keys of the file called `where`.

    The engine counts one microbatch a step: the train step marks the boundary itself, so that the
    number of microbatches can follow from the world size. `nvme_path` replaces the file's.
    Raises ConfigError.
    """
    check_keys(json_dict, where)
    zero = {
        "contiguous_gradients": True,
        "overlap_comm": True,
        **json_dict.get("zero_optimization", {}),
        "reduce_scatter": True,
    }
    if zero.setdefault("stage", 3) != 3:
        raise ConfigError(
            f"{where}: `zero_optimization.stage` is {zero['stage']}: ds_sft is built on stage 3"
        )
    _check_offload(zero, where, world_size)
    on_nvme = _place_on_nvme(zero, where, nvme_path)
    _check_swapping(zero, json_dict.get("aio", {}), on_nvme, where)
    owned: dict[str, Any] = {
        "train_batch_size": per_device_batch * world_size,
        "train_micro_batch_size_per_gpu": per_device_batch,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": recipe.max_grad_norm,
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": _SHORT_DTYPE[recipe.grad_reduce_dtype],
        "zero_allow_untested_optimizer": True,
        "steps_per_print": _NEVER,
    }
    if recipe.compute_dtype == "bfloat16":
        owned["bf16"] = {"enabled": True}
    if recipe.apollo is not None:
        _check_apollo(zero, where, recipe)
        owned["zero_force_ds_cpu_optimizer"] = False
    if recipe.master_dtype == "bfloat16":
        _check_masters(zero, where, recipe)
        owned["bf16"]["bf16_master_weights_and_grads"] = True
        owned["bf16"]["bf16_optimizer_states"] = recipe.optimizer_state_dtype == "bfloat16"
    return {**json_dict, **owned, "zero_optimization": zero}


def _check_apollo(zero: dict[str, Any], where: str | Path, recipe: Recipe) -> None:
    """Refuse swap files for a state of APOLLO: DeepSpeed swaps states as long as their weights."""
    if zero.get("offload_optimizer", {}).get("device") == "nvme":
        raise ConfigError(
            f"{where}: `zero_optimization.offload_optimizer` on NVMe does not work with "
            f"--optimizer {recipe.optimizer}, whose state is small: use "
            "ds_configs/zero3_offload_optimizer.json, which keeps it in host memory"
        )


def _check_masters(zero: dict[str, Any], where: str | Path, recipe: Recipe) -> None:
    """Refuse places where DeepSpeed cannot keep masters in bfloat16."""
    home = zero.get("offload_optimizer", {}).get("device", "none")
    if home == "nvme":
        raise ConfigError(
            f"{where}: --master-dtype bfloat16 with the optimizer on NVMe is not supported: use "
            "ds_configs/zero3_offload_optimizer.json, or --master-dtype float32"
        )
    if home == "none" and recipe.optimizer_state_dtype == "float32":
        raise ConfigError(
            f"{where}: --master-dtype bfloat16 with moments in float32 needs offload_optimizer: "
            "use ds_configs/zero3_offload_optimizer.json, or --optimizer-state-dtype bfloat16"
        )


def optimizer_kind(ds_config: dict[str, Any]) -> str:
    """`cpu_adam` when the optimizer's state lives off the GPU, else `adamw`."""
    offload = ds_config["zero_optimization"].get("offload_optimizer", {})
    return "adamw" if offload.get("device", "none") == "none" else "cpu_adam"


def check_keys(
    values: dict[str, Any], where: str | Path, rules: Rules = ACCEPTED, prefix: str = ""
) -> None:
    """Raise ConfigError for the first key, at any depth, that must not be in the file `where`."""
    for key, value in values.items():
        path = prefix + key
        if asks_for_fp8(key) or ("type" in key and asks_for_fp8(str(value))):
            raise ConfigError(f"{where}: `{path}`: {NO_FP8}")
        if path in REFUSED:
            raise ConfigError(f"{where}: `{path}` {REFUSED[path]}")
        if key not in rules:
            raise ConfigError(f"{where}: unknown key `{path}`: {_advice(key, prefix, rules)}")
        if value == "auto":
            raise ConfigError(
                f'{where}: `{path}` is "auto", which only the transformers Trainer fills in: '
                "write the value, or drop the key"
            )
        rule = rules[key]
        if isinstance(rule, Value):
            _check_value(value, rule, path, where)
        elif isinstance(value, dict):
            check_keys(value, where, rule, path + ".")
        else:
            raise ConfigError(
                f"{where}: `{path}` is {_shown(value)}, but must be an object {{...}} with "
                f"{', '.join(list(rule)[:3])}, ..."
            )


def _advice(key: str, prefix: str, rules: Rules) -> str:
    """What was probably meant: a key of this level, or of another one."""
    here = [*rules, *(k[len(prefix) :] for k in REFUSED if k.startswith(prefix))]
    # The stage-3 keys are often written without their prefix, which DeepSpeed's own code does too.
    for candidate in (f"stage3_{key}", *difflib.get_close_matches(key, here, n=1)):
        if candidate in here:
            return f"did you mean `{prefix}{candidate}`?"
    elsewhere = [p for p in _accepted_paths(ACCEPTED) if p.rpartition(".")[2] == key]
    if elsewhere:
        return f"it belongs to `{elsewhere[0].rpartition('.')[0]}`"
    return f"known here: {', '.join(rules)}"


def _accepted_paths(rules: Rules, prefix: str = "") -> list[str]:
    paths: list[str] = []
    for key, rule in rules.items():
        paths.append(prefix + key)
        if not isinstance(rule, Value):
            paths += _accepted_paths(rule, f"{prefix}{key}.")
    return paths


def _check_value(value: object, rule: Value, path: str, where: str | Path) -> None:
    advice = f"must be {rule.kind}"
    if rule.kind == "true or false":
        ok = isinstance(value, bool)
    elif rule.kind == "a list of texts":
        ok = isinstance(value, list) and all(isinstance(v, str) for v in value)
    elif rule.kind == "a text":
        ok = isinstance(value, str)
        if ok and rule.choices:
            ok = str(value).lower() in [choice.lower() for choice in rule.choices]
            advice = f"must be one of {', '.join(rule.choices)}"
    else:
        ok = isinstance(value, int | float) and not isinstance(value, bool)
        ok = ok and math.isfinite(value)  # type: ignore[arg-type]  # 1e400 is infinity in JSON
        if ok and rule.kind == "a whole number":
            ok = value == int(value)  # type: ignore[call-overload]  # 5e8 is a float in JSON
        if ok:
            ok = rule.low <= value <= rule.high  # type: ignore[operator]
            top = "" if math.isinf(rule.high) else f" and at most {rule.high:g}"
            advice = f"must be {rule.kind} of at least {rule.low:g}{top}"
    if not ok:
        raise ConfigError(f"{where}: `{path}` is {_shown(value)}, but {advice}")


def _check_offload(zero: dict[str, Any], where: str | Path, world_size: int) -> None:
    for name in ("offload_optimizer", "offload_param"):
        if "device" in zero.get(name, {}):
            zero[name] = {**zero[name], "device": zero[name]["device"].lower()}
    ratio = zero.get("offload_optimizer", {}).get("ratio", 1.0)
    if ratio < 1.0:
        raise ConfigError(
            f"{where}: `zero_optimization.offload_optimizer.ratio` is {ratio}: DeepSpeed keeps the "
            "state of the rest in a second optimizer, which no checkpoint holds: drop the key"
        )
    hpz = zero.get("zero_hpz_partition_size", 1)
    if hpz > world_size or world_size % hpz:
        raise ConfigError(
            f"{where}: `zero_optimization.zero_hpz_partition_size` is {hpz}, which does not divide "
            f"the world size {world_size}: use the number of GPUs of one host, or "
            "ds_configs/zero3.json"
        )


def _place_on_nvme(zero: dict[str, Any], where: str | Path, nvme_path: Path | None) -> list[str]:
    """Write the path into the sections that are on NVMe, whose names are returned."""
    on_nvme = [name for name in ("offload_optimizer", "offload_param")
               if zero.get(name, {}).get("device") == "nvme"]  # fmt: skip
    if nvme_path is not None and not on_nvme:
        raise ConfigError(
            f"--nvme-path {nvme_path}: {where} puts nothing on NVMe: drop the flag, or use "
            "ds_configs/zero3_offload_optimizer_nvme.json"
        )
    for name in on_nvme:
        section = dict(zero[name])
        if nvme_path is not None:
            section["nvme_path"] = str(nvme_path)
        if not section.get("nvme_path"):
            raise ConfigError(
                f"{where}: `zero_optimization.{name}.nvme_path` is missing: name a directory on a "
                "local NVMe disk there, or with --nvme-path"
            )
        zero[name] = section
    return on_nvme


def _check_swapping(
    zero: dict[str, Any], aio: dict[str, Any], on_nvme: list[str], where: str | Path
) -> None:
    """Refuse sizes with which DeepSpeed's swapping fails, hangs or reads something else."""
    block = aio.get("block_size", DIRECT_BYTES)
    if on_nvme and block % DIRECT_BYTES:
        raise ConfigError(
            f"{where}: `aio.block_size` is {block:,}, but direct reads and writes want a multiple "
            f"of {DIRECT_BYTES:,}: use 1048576"
        )
    if "offload_param" in on_nvme and zero.get("stage3_max_reuse_distance") != 0:
        raise ConfigError(
            f"{where}: `zero_optimization.stage3_max_reuse_distance` must be 0 with offload_param "
            "on NVMe: DeepSpeed fails when it wants to keep more parameters than it has buffers"
        )
    count = zero.get("offload_param", {}).get("buffer_count", BUFFERS_OF_PARAMS)
    if "offload_param" in on_nvme and count < BUFFERS_OF_PARAMS:
        raise ConfigError(
            f"{where}: `zero_optimization.offload_param.buffer_count` is {count}, but DeepSpeed "
            f"holds {BUFFERS_OF_PARAMS} parameters at a time: use 5"
        )
    if "offload_optimizer" not in on_nvme:
        return
    optimizer = zero["offload_optimizer"]
    pipelines = [k for k in ("pipeline_read", "pipeline_write") if optimizer.get(k)]
    wanted = BUFFERS_OF_ADAM * (1 + len(pipelines))
    if optimizer.get("buffer_count", BUFFERS_OF_ADAM) < wanted:
        why = f" with {' and '.join(pipelines)}" if pipelines else ""
        raise ConfigError(
            f"{where}: `zero_optimization.offload_optimizer.buffer_count` must be at least {wanted}"
            f"{why}: {BUFFERS_OF_ADAM} for a sub-group (master, two moments, gradient)"
        )


def _shown(value: object) -> str:
    """The value as it stands in the file, cut to a readable length."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    for key, value in pairs:
        if key in seen:
            raise ValueError(f"key `{key}` is given twice")
        seen[key] = value
    return seen


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")

"""A pretrained model, partitioned by ZeRO-3 from its first parameter on.

Owns the way from a directory of safetensors to the partitions of this rank. Invariants: no rank
ever holds the whole model; each rank reads its own slices of the files and nothing is sent over the
network; every parameter is filled or the load fails. Leaves the module tree to `sft`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import deepspeed
import torch
import transformers
from huggingface_hub.errors import StrictDataclassError
from safetensors import safe_open
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from ds_sft.data.architectures import unused_tensors
from ds_sft.data.model_files import ModelFiles, text_name
from ds_sft.data.weight_files import weight_files
from ds_sft.errors import ConfigError
from ds_sft.model import attention
from ds_sft.model.kinds import parameter_kinds
from ds_sft.model.layers import LayerChoices
from ds_sft.model.partitions import (
    fetch_once,
    fill_part,
    keep_out_of_buffers,
    resident_sub_groups,
)
from ds_sft.model.sft import SftModel, arrange
from ds_sft.recipe.decay import kind_decays


def build_partitioned(
    source: ModelFiles,
    ds_config: dict[str, Any],
    dtype: torch.dtype,
    loss_chunk_size: int,
    choices: LayerChoices,
    device: torch.device,
    *,
    random_weights: bool = False,
) -> SftModel:
    """The model of `source` with its weights, each rank holding 1 / world_size of every tensor.

    `random_weights` takes none from the files: to see what a model needs, config.json is enough.

    Raises ConfigError when the files lack a parameter or hold one that the architecture has not,
    and for a class of which more than decoder layers and a plain head would have to be trained.
    """
    config, model_class = config_and_class(source.config)
    # zero.Init takes its dtype from the config; its own dtype argument turns into bf16 on a CPU.
    with deepspeed.zero.Init(config_dict_or_path=ds_config), no_init_weights():
        causal_lm = model_class._from_config(
            config, attn_implementation=attention.NAME, dtype=dtype
        )
    causal_lm.tie_weights()  # left out with the initialisation
    _rebuild_buffers(causal_lm)
    require_plain_decoder(causal_lm)
    model = arrange(causal_lm, loss_chunk_size, choices, device)
    fetch_once(model)
    keep_out_of_buffers(model)
    if random_weights:
        for parameter in model.parameters():
            fill_part(parameter, _random_part(parameter, config.initializer_range))
        return model
    with WeightFiles(source) as files:
        files.check_names(model)
        for name, parameter in model.named_parameters():
            fill_part(parameter, files.local_slice(name, parameter))
        for name, buffer in stored_buffers(model).items():
            # In the precision of the file: nothing rounds it once more for an export.
            buffer.data = files.whole(name, tuple(buffer.shape)).to(buffer.device)
    return model


def _random_part(parameter: Any, deviation: float) -> torch.Tensor:
    """A rank's part of a new weight; norms, the only vectors beside biases, start at one."""
    size = parameter.partition_numel()
    return torch.ones(size) if len(parameter.ds_shape) == 1 else torch.randn(size) * deviation


def config_and_class(config: dict[str, Any]) -> tuple[Any, Any]:
    """transformers' configuration object and model class for a config.json.

    The class is imported here: inside zero.Init an import runs under patched tensor constructors
    and fails.
    """
    try:
        made = CONFIG_MAPPING[config["model_type"]].from_dict(config)
        model_class = AutoModelForCausalLM._model_mapping[type(made)]
    except KeyError as error:
        raise ConfigError(
            f"transformers {transformers.__version__} has no causal language model for the model's "
            f"config.json ({error}): use a model that it knows, or a newer transformers"
        ) from None
    except (StrictDataclassError, AttributeError, IndexError, TypeError, ValueError) as error:
        raise ConfigError(
            f"transformers {transformers.__version__} refuses the model's config.json: "
            f"{' '.join(str(error).split())}: copy the model again"
        ) from None
    made.use_cache = False
    return made, model_class


def require_plain_decoder(causal_lm: Any) -> None:
    """Raise ConfigError unless all of `causal_lm` is decoder layers and a head that is one matrix.

    The trained model is its `model` and its `lm_head.weight`: anything else would be left out.
    """
    parts = {name.split(".")[0] for name, _ in causal_lm.named_parameters()}
    head = getattr(causal_lm, "lm_head", None)
    layers_found = hasattr(getattr(causal_lm, "model", None), "layers")
    if parts - {"model", "lm_head"} or not isinstance(head, nn.Linear) or not layers_found:
        raise ConfigError(
            f"{type(causal_lm).__name__} is not decoder layers with a linear head, but has "
            f"{', '.join(sorted(parts))}: use a tested architecture"
        )
    if head.bias is not None:
        raise ConfigError(
            f"{type(causal_lm).__name__} has a bias in its head, which the head here has not: use "
            "a tested architecture"
        )


def stored_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Buffers that are stored with the weights, by name."""
    stored = model.state_dict(keep_vars=True).keys()
    return {name: buffer for name, buffer in model.named_buffers() if name in stored}


def _rebuild_buffers(causal_lm: nn.Module) -> None:
    """Compute rotary frequencies again, in float32.

    zero.Init rounds every floating tensor made inside it to the compute dtype, so a bf16 engine
    would rotate by frequencies that are off by up to 0.4 %.
    """
    for parent in list(causal_lm.modules()):
        for name, child in list(parent.named_children()):
            if list(child.buffers(recurse=False)) and not list(child.parameters()):
                device = next(child.buffers()).device
                setattr(parent, name, type(child)(child.config).to(device))


def restore_float32_masters(model: nn.Module, source: ModelFiles) -> int:
    """Write float32 weights of the files into the masters; returns how many parameters that were.

    A bf16 engine makes its masters from the weights that it has already rounded; a checkpoint in
    float32 would lose its low bits for the whole run.
    """
    with WeightFiles(source) as files:
        names = {p: name for name, p in model.named_parameters() if files.dtype(name) == "F32"}
        if not names:
            return 0  # the masters need not be read from a disk
        zero: Any = next(model.parameters())._z3_optimizer  # type: ignore[attr-defined]
        for index, flat in resident_sub_groups(zero):
            for parameter in (p for p in zero.fp16_groups[index] if p in names):
                _, offset, size = zero.grad_position[zero.get_param_id(parameter)]
                values = files.local_slice(names[parameter], parameter)
                flat.data.narrow(0, offset, size).copy_(values)
    return len(names)


class WeightFiles:
    """The safetensors files of a model directory, read slice by slice."""

    def __init__(self, source: ModelFiles) -> None:
        self.directory = source.directory
        self._unused = unused_tensors(source.config)
        self._open = ExitStack()
        # By the trained model's name: the open file, and the name in it.
        self._files: dict[str, tuple[Any, str]] = {}

    def __enter__(self) -> WeightFiles:
        for path in weight_files(self.directory):
            file = self._open.enter_context(safe_open(path, framework="pt"))
            for stored in file.keys():  # noqa: SIM118 - it is no mapping
                name = text_name(stored)
                if name is not None and name not in self._unused:
                    self._files[name] = (file, stored)
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def check_names(self, model: nn.Module) -> None:
        """Raise ConfigError unless the files hold exactly the model's parameters and buffers."""
        wanted = {name for name, _ in model.named_parameters()} | stored_buffers(model).keys()
        # named_parameters lists a tied tensor once; files may hold it under either name.
        known = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        known |= {name for name, _ in model.named_buffers()}
        missing = sorted(wanted - self._files.keys())
        extra = sorted(self._files.keys() - known)
        if missing or extra:
            raise ConfigError(
                f"{self.directory} does not fit its config.json: missing {missing[:3] or 'none'}, "
                f"unexpected {extra[:3] or 'none'}: take the files of one and the same model"
            )

    def dtype(self, name: str) -> str:
        """Storage type of a tensor, as safetensors spells it (BF16, F32, ...)."""
        return self._slice(name).get_dtype()

    def _slice(self, name: str) -> Any:
        file, stored = self._files[name]
        return file.get_slice(stored)

    def whole(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """All of a small tensor, which must have `shape`."""
        tensor: torch.Tensor = self._slice(name)[:]
        if tuple(tensor.shape) != shape:
            raise ConfigError(
                f"{self.directory}: {name} has shape {tuple(tensor.shape)}, config.json asks for "
                f"{shape}: take the files of one and the same model"
            )
        return tensor

    def local_slice(self, name: str, parameter: Any) -> torch.Tensor:
        """This rank's flat part of tensor `name`, padded with zeros like DeepSpeed's.

        ZeRO-3 cuts the row-major flat tensor into world_size parts of ceil(n / world_size) values.
        """
        stored = self._slice(name)
        shape = tuple(stored.get_shape())
        if shape != tuple(parameter.ds_shape):
            raise ConfigError(
                f"{self.directory}: {name} has shape {shape}, config.json asks for "
                f"{tuple(parameter.ds_shape)}: take the files of one and the same model"
            )
        numel, size = math.prod(shape), parameter.partition_numel()
        start = min(torch.distributed.get_rank() * size, numel)
        end = min(start + size, numel)
        width = numel // shape[0]  # only the rows that hold our values are read
        rows = stored[start // width : -(-end // width)].flatten()
        part = rows[start - start // width * width :][: end - start]
        return nn.functional.pad(part, (0, size - part.numel()))


def parameter_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Two optimizer groups: with and without weight decay, in the order of the model."""
    kinds = parameter_kinds(model)

    def named(wanted: bool) -> Iterator[nn.Parameter]:
        return (p for n, p in model.named_parameters() if kind_decays(kinds[n]) is wanted)

    groups = [
        {"params": list(named(True)), "weight_decay": weight_decay},
        {"params": list(named(False)), "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]

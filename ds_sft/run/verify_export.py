"""Checks of a finished Hugging Face export.

Owns what "whole" means for an export: the architecture named by config.json, built without values,
says which tensors there must be; the files must hold exactly these, finite, in the dtype that the
config states, and nothing else; the tokenizer must fit and have a chat template. Reads one tensor
at a time. Invariant: changes nothing.

Uses nothing of the code that writes exports: what it checks must not be wrong in the same way.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from ds_sft.errors import CheckpointError
from ds_sft.run.hf_format import read_json_object

_INDEX = "model.safetensors.index.json"
_OTHER_WEIGHTS = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.h5", "*.msgpack", "*.gguf")


def verify_export(path: Path) -> list[str]:
    """Return what was checked; raise CheckpointError with the first thing wrong."""
    config = read_json_object(path / "config.json")
    dtype = _stated_dtype(path, config)
    files = _weight_files(path)
    expected = _expected_shapes(path)
    location = _locate(files)
    _check_names(path, expected, location, config)
    total = _check_tensors(expected, location, dtype)
    lines = [f"{len(location)} tensors, {total:,} bytes: names, shapes, {dtype}, finite values"]
    lines.append(_check_index(path, location, total))
    lines.append(f"tie_word_embeddings={str('lm_head.weight' not in location).lower()} is true")
    lines.append(_check_tokenizer(path, config))
    if (path / "generation_config.json").exists():
        read_json_object(path / "generation_config.json")
        lines.append("generation_config.json can be read")
    return lines


def _stated_dtype(path: Path, config: dict[str, Any]) -> str:
    """Return the one dtype that config.json states under its two names."""
    new, old = config.get("dtype"), config.get("torch_dtype")
    if new is None and old is None:
        raise CheckpointError(f"{path / 'config.json'} states no dtype")
    if new is not None and old is not None and new != old:
        raise CheckpointError(f"{path / 'config.json'} says dtype={new} and torch_dtype={old}")
    return str(new if new is not None else old)


def _weight_files(path: Path) -> list[Path]:
    """Return the safetensors files; refuse every other file that loaders take for weights."""
    others = sorted(file for pattern in _OTHER_WEIGHTS for file in path.glob(pattern))
    if others:
        raise CheckpointError(f"{others[0]} is a weight file that does not belong to the export")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"{path} has no *.safetensors file")
    index = path / _INDEX
    if not index.exists() and [file.name for file in files] != ["model.safetensors"]:
        raise CheckpointError(f"{index} is missing for {len(files)} weight files")
    if index.exists():
        named = set(read_json_object(index).get("weight_map", {}).values())
        if named != {file.name for file in files}:
            odd = sorted(named ^ {file.name for file in files})[0]
            raise CheckpointError(f"{odd}: {index.name} and the directory differ about this file")
    return files


def _expected_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """Return what the architecture of config.json saves: shape by name, a tied tensor once."""
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        with torch.device("meta"):
            config = AutoConfig.from_pretrained(path)
            model = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    except Exception as error:  # Transformers raises many kinds for a config that it cannot use
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"{path / 'config.json'} makes no model: {reason}") from error
    seen: set[int] = set()
    shapes = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            shapes[name] = tuple(tensor.shape)
            seen.add(id(tensor))
    return shapes


def _locate(files: list[Path]) -> dict[str, Path]:
    """Return the file of each tensor, from the files' own headers."""
    location: dict[str, Path] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as opened:
                names = list(opened.keys())
                metadata = opened.metadata() or {}
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{file} cannot be read: {error}") from error
        if metadata.get("format") != "pt":
            raise CheckpointError(f"{file} lacks the metadata format=pt that Transformers needs")
        for name in names:
            if name in location:
                raise CheckpointError(f"{name} is both in {location[name].name} and {file.name}")
            location[name] = file
    return location


def _check_names(
    path: Path,
    expected: dict[str, tuple[int, ...]],
    location: dict[str, Path],
    config: dict[str, Any],
) -> None:
    """Check that there is each tensor of the architecture and no other."""
    if ("lm_head.weight" in location) != ("lm_head.weight" in expected):
        flag = str(config.get("tie_word_embeddings")).lower()
        has = "holds an" if "lm_head.weight" in location else "holds no"
        raise CheckpointError(f"{path} {has} lm_head.weight but tie_word_embeddings={flag}")
    missing = sorted(expected.keys() - location.keys())
    if missing:
        raise CheckpointError(f"{path} lacks {missing[0]} ({len(missing)} tensors are missing)")
    extra = sorted(location.keys() - expected.keys())
    if extra:
        raise CheckpointError(f"{location[extra[0]]} holds {extra[0]}, which the model has not")


def _check_tensors(
    expected: dict[str, tuple[int, ...]], location: dict[str, Path], dtype: str
) -> int:
    """Check shape, dtype and values of every tensor; return the bytes of all."""
    total = 0
    for name, file in location.items():
        with safe_open(file, framework="pt") as opened:
            tensor = opened.get_tensor(name)
        shape = tuple(tensor.shape)
        if shape != expected[name]:
            raise CheckpointError(f"{file}: {name} is {shape}, the model needs {expected[name]}")
        if math.prod(shape) == 0:
            raise CheckpointError(f"{file}: {name} has no element")
        total += tensor.numel() * tensor.element_size()
        if not tensor.is_floating_point():
            continue
        if str(tensor.dtype) != f"torch.{dtype}":
            raise CheckpointError(f"{file}: {name} is {tensor.dtype}, config.json says {dtype}")
        if not all(torch.isfinite(bound) for bound in torch.aminmax(tensor)):
            raise CheckpointError(f"{file}: {name} holds values that are not finite")
    return total


def _check_index(path: Path, location: dict[str, Path], total: int) -> str:
    """Check the index against the files, if there is one."""
    if not (path / _INDEX).exists():
        return "one weight file, no index needed"
    index = read_json_object(path / _INDEX)
    weight_map = index.get("weight_map")
    if weight_map != {name: file.name for name, file in location.items()}:
        raise CheckpointError(f"{path / _INDEX} places tensors where they are not")
    stated = index.get("metadata", {}).get("total_size")
    if stated != total:
        raise CheckpointError(f"{path / _INDEX} says total_size={stated}, the tensors have {total}")
    return f"index of {len(set(location.values()))} files, total_size={total}"


def _check_tokenizer(path: Path, config: dict[str, Any]) -> str:
    """Check that the tokenizer loads, has a token for each row, and has a chat template."""
    from tokenizers import Tokenizer
    from transformers import AutoTokenizer

    if not (path / "tokenizer.json").is_file():
        raise CheckpointError(f"{path / 'tokenizer.json'} is missing")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path)
    except Exception as error:  # Transformers and tokenizers raise many kinds here too
        reason = str(error).strip().splitlines()[0] if str(error) else type(error).__name__
        raise CheckpointError(f"the tokenizer in {path} cannot be loaded: {reason}") from error
    rows = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    # Some servers read tokenizer.json alone, Transformers also what tokenizer_config.json adds.
    alone = Tokenizer.from_file(str(path / "tokenizer.json"))
    added = alone.get_added_tokens_decoder()
    for size in (len(tokenizer), alone.get_vocab_size(with_added_tokens=True)):
        beyond = [added.get(i) for i in range(rows, size)]
        if size < rows or not all(token is not None and token.special for token in beyond):
            raise CheckpointError(
                f"the tokenizer in {path} has {size} tokens, the model has {rows} rows"
            )
    if not tokenizer.chat_template:
        raise CheckpointError(f"the tokenizer in {path} has no chat template")
    return f"tokenizer of {rows} tokens with a chat template"

"""A model's weight files: which there are, whether they are whole, what their headers say.

Owns the safetensors header and the index of several files. Reads headers only, and values where two
tensors are compared. Leaves which tensors a model must have to `model_files`. No torch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ds_sft.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_BLOCK_BYTES, _BLOCKS = 4096, 256  # compared of two tensors
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_DTYPE_BYTES |= {"BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_DTYPE_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model, in order. Raises ConfigError when they are not whole."""
    index = directory / INDEX_NAME
    if index.is_file():
        files = [directory / name for name in shard_names(index)]
        missing = [file.name for file in files if not file.is_file()]
        if missing:
            raise ConfigError(
                f"{directory} lacks {missing[0]}, which {INDEX_NAME} names "
                f"({len(missing)} of {len(files)} missing): copy or download the model again"
            )
        return files
    single = directory / "model.safetensors"
    if single.is_file():
        return [single]
    if any(directory.glob("*.bin")) or any(directory.glob("*.pt")):
        raise ConfigError(
            f"{directory} holds no safetensors weights, only pickled ones (.bin): convert it with "
            "transformers: from_pretrained(...).save_pretrained(...)"
        )
    raise ConfigError(f"{directory} holds no model.safetensors: it is not a whole model")


def safetensors_header(file: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """Shape and dtype of every tensor in `file`. Raises ConfigError when the file is not whole.

    Format: 8 bytes little-endian length of a JSON header, the header, then the values.
    """
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER_BYTES):
                raise ConfigError(
                    f"{file} is not a whole safetensors file ({size} bytes): copy it again"
                )
            header = json.loads(stream.read(length))
        tensors = {}
        end = 0
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            shape = tuple(int(n) for n in entry["shape"])
            begin, stop = entry["data_offsets"]
            wanted = math.prod(shape) * _DTYPE_BYTES[entry["dtype"]]
            if stop - begin != wanted:
                raise ValueError(f"tensor {name} has {stop - begin} bytes, not {wanted}")
            end = max(end, stop)
            tensors[name] = (shape, str(entry["dtype"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{file} has no readable safetensors header: {error}") from None
    if size != 8 + length + end:
        raise ConfigError(
            f"{file} has {size} bytes, its header describes {8 + length + end}: copy it again"
        )
    return tensors


def same_values(files: Iterable[Path], one: str, two: str) -> bool:
    """Whether two tensors of `files`, whose headers were read, hold the same bytes.

    Looks at blocks all over them, the first and the last among these: an embedding of a gigabyte
    takes milliseconds, and a matrix that was trained on its own differs everywhere.
    """
    found: dict[str, tuple[Path, int, int]] = {}
    for file in files:
        with file.open("rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            header = json.loads(stream.read(length))
        for name in {one, two} & header.keys():
            begin, end = header[name]["data_offsets"]
            found[name] = (file, 8 + length + begin, end - begin)
    (file, place, size), (other_file, other_place, other_size) = found[one], found[two]
    if size != other_size:
        return False
    with file.open("rb") as stream, other_file.open("rb") as other:
        for i in range(_BLOCKS):
            start = max(0, size - _BLOCK_BYTES) * i // (_BLOCKS - 1)
            stream.seek(place + start)
            other.seek(other_place + start)
            count = min(_BLOCK_BYTES, size)
            if stream.read(count) != other.read(count):
                return False
    return True


def shard_names(index: Path) -> list[str]:
    """The files that an index names. Raises ConfigError for an index that is not one."""
    weight_map = read_object(index, "copy the model again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map: copy the model again")
    return sorted({str(name) for name in weight_map.values()})


def read_object(path: Path, advice: str) -> dict[str, Any]:
    """The JSON object in a file. Raises ConfigError, which ends with `advice`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: {advice}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}: {advice}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object: {advice}")
    return value

"""What a model's files say about it, read without torch: config.json and safetensors headers.

Owns finding the directory (a local one, or a Hub id in the Hub's cache) and the names, shapes and
dtypes of all tensors. Reads headers only, never weights: an 8B model takes milliseconds. Leaves
which tensors there must be to `architectures`, downloading and loading to the model room.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft.data import geometry
from ds_sft.data.architectures import (
    TESTED_ARCHITECTURES,
    architecture,
    check_architecture,
    expected_buffers,
    expected_shapes,
    text_part,
    unused_tensors,
)
from ds_sft.data.geometry import completed
from ds_sft.data.hub import cached_revision
from ds_sft.errors import ConfigError

INDEX_NAME = "model.safetensors.index.json"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library itself
_DTYPE_BYTES = {"F64": 8, "I64": 8, "U64": 8, "F32": 4, "I32": 4, "U32": 4}
_DTYPE_BYTES |= {"BF16": 2, "F16": 2, "I16": 2, "U16": 2}
_DTYPE_BYTES |= {"I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1}
_FLOATS = ("BF16", "F16", "F32", "F64")
_OTHER_PARTS = tuple(
    f"{prefix}{part}"
    for part in ("vision_", "audio_", "embed_vision", "embed_audio", "multi_modal_projector")
    for prefix in ("", "model.")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFiles:
    """A model on this disk, as its config.json and headers describe it."""

    directory: Path
    """Where the files are."""
    config: dict[str, Any]
    """config.json, of the text part where the files hold more; with its family's defaults."""
    tensors: dict[str, tuple[tuple[int, ...], str]]
    """Shape and safetensors dtype (BF16, F32, ...) of every trained tensor by name, without a tied
    copy of the head."""
    tied: bool
    """Whether the head shares the embedding's weights."""
    notes: tuple[str, ...] = ()
    """What is said about the model before it is trained."""

    @property
    def num_parameters(self) -> int:
        """Trained parameters; a tied head is counted once."""
        return sum(math.prod(shape) for shape, _ in self.tensors.values())

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every trained parameter, by name."""
        return {name: shape for name, (shape, _) in self.tensors.items()}

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding."""
        return int(self.config["vocab_size"])

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest row the model was made for; None if config.json does not say."""
        longest = self.config.get("max_position_embeddings")
        return int(longest) if isinstance(longest, int) else None

    @property
    def head_sizes(self) -> list[int]:
        """Sizes of attention heads, each once; empty for an architecture that nobody tested."""
        tested = architecture(self.config) in TESTED_ARCHITECTURES
        return geometry.head_sizes(self.config) if tested else []

    @property
    def tokenizer_dir(self) -> Path | None:
        """The model's directory when it holds a tokenizer."""
        return self.directory if (self.directory / "tokenizer.json").is_file() else None


def find_model(model_id: str, allow_untested: bool = False) -> ModelFiles | None:
    """The model called `model_id`; None for a Hub id that is not in this machine's cache.

    Raises ConfigError for a path without a usable model, for an architecture that is not tested
    (unless `allow_untested`), and for files that are not whole.
    """
    path = Path(model_id).expanduser()
    if model_id and path.is_dir():
        return read_model(path, allow_untested)
    if model_id and path.exists():
        raise ConfigError(f"--model-id {model_id} is a file: name the directory that holds it")
    looks_local = model_id.startswith(("/", ".", "~")) or model_id.count("/") > 1
    if looks_local:
        raise ConfigError(f"--model-id {model_id} does not exist: check the path")
    if not _HUB_ID.fullmatch(model_id):
        raise ConfigError(
            f"--model-id {model_id!r} is neither a directory nor a Hub id: "
            "write for example Qwen/Qwen3-8B"
        )
    snapshot = cached_snapshot(model_id)
    return None if snapshot is None else read_model(snapshot, allow_untested)


def cached_snapshot(model_id: str) -> Path | None:
    """Directory of a model in the Hub's cache; None unless all its files are there."""
    snapshot = cached_revision(model_id)
    if snapshot is None or not (snapshot / "config.json").is_file():
        return None
    # A download that stopped half-way is finished by the run itself: no reason to refuse it here.
    weights = any(snapshot.glob("*.safetensors")) or any(snapshot.glob("*.bin"))
    index = snapshot / INDEX_NAME
    if not weights:
        return None
    if index.is_file() and not all((snapshot / name).is_file() for name in _shards(index)):
        return None
    return snapshot


def read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """config.json with its family's defaults, and a note when it is of a larger model's text part.

    Raises ConfigError.
    """
    config = _read_object(directory / "config.json", "it is not a Hugging Face model directory")
    text = text_part(config)
    if text is None:
        return completed(config), ""
    note = (
        f"{directory} is {architecture(config)}: only its text part is trained and exported, as "
        f"{architecture(text)}"
    )
    return completed(text), note


def read_model(directory: Path, allow_untested: bool = False) -> ModelFiles:
    """The model in `directory`. Raises ConfigError."""
    config, note = read_config(directory)
    with of_config(directory):
        check_architecture(directory, config, allow_untested)
    vocab_size = config.get("vocab_size")
    if not isinstance(vocab_size, int) or vocab_size < 1:
        raise ConfigError(f"{directory}/config.json: vocab_size is {vocab_size!r}, not a size")
    stored: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in weight_files(directory):
        stored |= safetensors_header(file)
    tensors = {name: entry for n, entry in stored.items() if (name := text_name(n)) is not None}
    tied = bool(config.get("tie_word_embeddings", False))
    if tied:
        tensors.pop("lm_head.weight", None)
    notes = [note] if note else []
    if config.get("quantization_config"):
        raise ConfigError(f"{directory} is quantised: start from the original weights")
    if architecture(config) in TESTED_ARCHITECTURES:
        tensors = _checked_tensors(directory, config, tensors, tied)
    else:
        notes.append(
            f"{architecture(config)} was never tested here (--allow-untested-architecture): its "
            "names and shapes are not checked before it is loaded"
        )
    return ModelFiles(
        directory=directory, config=config, tensors=tensors, tied=tied, notes=tuple(notes)
    )


def text_name(stored: str) -> str | None:
    """Name in the trained model of a tensor that files call `stored`; None for other parts.

    A multimodal model holds its text part under `model.language_model.` or, in files written before
    transformers 5, under `language_model.`.
    """
    if stored.startswith("model.language_model."):
        return "model." + stored.removeprefix("model.language_model.")
    if stored.startswith("language_model."):
        return stored.removeprefix("language_model.")
    return None if stored.startswith(_OTHER_PARTS) else stored


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files of the model, in order. Raises ConfigError when they are not whole."""
    index = directory / INDEX_NAME
    if index.is_file():
        files = [directory / name for name in _shards(index)]
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


def _shards(index: Path) -> list[str]:
    weight_map = _read_object(index, "copy the model again").get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{index} has no weight_map: copy the model again")
    return sorted({str(name) for name in weight_map.values()})


def _read_object(path: Path, advice: str) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path.parent} has no {path.name}: {advice}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}: {advice}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object: {advice}")
    return value


@contextlib.contextmanager
def of_config(directory: Path) -> Iterator[None]:
    """Name the config.json of which something is missing or cannot be. Raises ConfigError."""
    try:
        yield
    except KeyError as error:
        raise ConfigError(f"{directory}/config.json has no {error}: copy the model again") from None
    except ConfigError as error:
        if str(error).startswith("config.json: "):
            raise ConfigError(f"{directory}/{error}: copy the model again") from None
        raise


def _checked_tensors(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, tuple[tuple[int, ...], str]],
    tied: bool,
) -> dict[str, tuple[tuple[int, ...], str]]:
    """The trained tensors. Refuses files that are not the model of their config.json."""
    with of_config(directory):
        trained, buffers = expected_shapes(config, tied), expected_buffers(config)
        unused = unused_tensors(config)
    expected = trained | buffers
    missing = sorted(expected.keys() - tensors.keys())
    extra = sorted(tensors.keys() - expected.keys() - unused)
    if missing or extra:
        raise ConfigError(
            f"{directory} does not fit its config.json: missing "
            f"{', '.join(missing[:3]) or 'none'}, unexpected {', '.join(extra[:3]) or 'none'}: "
            "take the files of one and the same model"
        )
    for name, wanted in expected.items():
        shape, dtype = tensors[name]
        if shape != wanted:
            raise ConfigError(
                f"{directory}: {name} has shape {shape}, config.json asks for {wanted}: "
                "take the files of one and the same model"
            )
        if dtype not in _FLOATS:
            raise ConfigError(
                f"{directory}: {name} is stored as {dtype}: start from bfloat16 or float32 weights"
            )
    return {name: entry for name, entry in tensors.items() if name in trained}

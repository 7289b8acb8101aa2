"""What a model's files say about it, read without torch: config.json and safetensors headers.

Owns finding the directory (a local one, or a Hub id in the Hub's cache) and the names, shapes and
dtypes of all tensors: an 8B model takes milliseconds. Leaves the files themselves to
`weight_files`, which tensors there must be to `architectures`, downloading and loading to the model
room.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterator, Mapping
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
from ds_sft.data.weight_files import (
    INDEX_NAME,
    read_object,
    safetensors_header,
    same_values,
    shard_names,
    weight_files,
)
from ds_sft.errors import ConfigError

_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
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
    if index.is_file() and not all((snapshot / name).is_file() for name in shard_names(index)):
        return None
    return snapshot


def read_config(directory: Path) -> tuple[dict[str, Any], str]:
    """config.json with its family's defaults, and a note when it is of a larger model's text part.

    Raises ConfigError.
    """
    config = read_object(directory / "config.json", "it is not a Hugging Face model directory")
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
    files = weight_files(directory)
    for file in files:
        stored |= safetensors_header(file)
    names = {name: n for n in stored if (name := text_name(n)) is not None}
    tensors = {name: stored[n] for name, n in names.items()}
    tied = config.get("tie_word_embeddings") or False
    if not isinstance(tied, bool):
        raise ConfigError(
            f"{directory}/config.json: tie_word_embeddings is {tied!r}: write true or false"
        )
    head = tensors.pop(_HEAD, None) if tied else None
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
    if head and _EMBEDDING in names:
        _check_tied(directory, files, names)
    return ModelFiles(
        directory=directory, config=config, tensors=tensors, tied=tied, notes=tuple(notes)
    )


def _check_tied(directory: Path, files: list[Path], names: Mapping[str, str]) -> None:
    """Refuse a head of its own in a model that is to have none: transformers would use it."""
    if not same_values(files, names[_EMBEDDING], names[_HEAD]):
        raise ConfigError(
            f"{directory}/config.json says tie_word_embeddings=true, but {_HEAD} and {_EMBEDDING} "
            "hold different values: set it to false to train both"
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

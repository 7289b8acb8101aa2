"""What a plan checks about tokens: their range, the tokenizers, the chat template, the validation.

Owns the comparisons of the data set with the tokenizers of the model and of the exports, and of the
validation set with the data set. A data set of the first trainer says nothing about its tokenizer:
then a note, never an error. No torch.
"""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft.data.hub import cached_revision
from ds_sft.data.model_files import ModelFiles
from ds_sft.data.packed import TOKENIZER_DIR, VALIDATION_DIR, PackedDataset
from ds_sft.data.template import SHIPPED, read_template
from ds_sft.data.tokenizer import TEMPLATE_FILE, tokenizer_hash
from ds_sft.errors import ConfigError, DataError
from ds_sft.recipe.batching import EvalPlan
from ds_sft.recipe.recipe import Recipe
from ds_sft.run.hf_format import has_chat_template, needs_more_rows
from ds_sft.run_config import RunConfig

_MAX_SCANNED_TOKENS = 1 << 26  # 256 MiB of int32: a tenth of a second from memory
_CHUNK_TOKENS = 1 << 20
EVAL_EVERY = 500


@dataclass(frozen=True, slots=True, kw_only=True)
class Validation:
    """What is evaluated during the training, and when."""

    data: PackedDataset
    """The packed data set <data>/validation."""
    batches: EvalPlan
    """Its packs by rank."""
    every: int
    """Due at every label that is a multiple of this, and at the last."""


def check_pair(
    data: PackedDataset, model: ModelFiles | None, recipe: Recipe, notes: list[str]
) -> None:
    """What the data and the model must agree on: token ids and the length of a row.

    Raises ConfigError or DataError where they do not; a model that is not here yet is a note.
    """
    if model is None:
        if _offline():
            raise ConfigError(
                f"--model-id {recipe.model_id} is not in the Hub's cache of this machine, and "
                "HF_HUB_OFFLINE forbids to fetch it: name a directory, or download it first"
            )
        notes.append(
            f"model {recipe.model_id} is neither a directory nor in the Hub's cache of this "
            "machine: its checks (vocabulary, length, parameters, disk) are skipped"
        )
        return
    low, high, whole = token_range(data)
    if low < 0 or high >= model.vocab_size:
        raise DataError(
            f"{data.path} holds token id {low if low < 0 else high}, but {recipe.model_id} has "
            f"{model.vocab_size} (0 to {model.vocab_size - 1}): prepare the data with the "
            f"model's own tokenizer"
        )
    if not whole:
        notes.append("token ids were checked in a sample of the packs only")
    longest = model.max_position_embeddings
    if longest is not None and data.max_seq_len > longest:
        raise DataError(
            f"{data.path} has rows of {data.max_seq_len} tokens, but {recipe.model_id} was made "
            f"for {longest} (max_position_embeddings): prepare with --max-seq-len {longest}"
        )


def open_validation(
    run: RunConfig, data: PackedDataset, model: ModelFiles | None, world_size: int
) -> Validation | None:
    """The validation set that belongs to `data`; None where nothing is to be evaluated.

    Raises ConfigError when --eval-every asks for one that is not there, DataError when it does not
    fit to the data and the model.
    """
    path = data.path / VALIDATION_DIR
    if run.eval_every == 0:
        return None
    if not path.exists():
        if data.manifest.get("validation"):
            raise DataError(
                f"{data.path} was prepared with a validation set, but {path} is not there: copy "
                "it too, or use --eval-every 0"
            )
        if run.eval_every is None:
            return None
        raise ConfigError(
            f"--eval-every {run.eval_every}, but {path} does not exist: prepare the data with "
            "--validation-fraction or --validation-input, or drop the flag"
        )
    validation = PackedDataset.open(path)
    _check_validation(validation, data, model)
    batches = EvalPlan(
        num_packs=validation.num_packs, world_size=world_size, per_device_batch=run.per_device_batch
    )
    return Validation(data=validation, batches=batches, every=run.eval_every or EVAL_EVERY)


def _check_validation(
    validation: PackedDataset, data: PackedDataset, model: ModelFiles | None
) -> None:
    path = validation.path
    if validation.max_seq_len != data.max_seq_len:
        raise DataError(
            f"{path} has rows of {validation.max_seq_len} tokens and {data.path} of "
            f"{data.max_seq_len}: prepare both together"
        )
    if int(validation.assistant_counts.sum()) == 0:
        raise DataError(
            f"{path} has no trained token in its {validation.num_packs} packs, so it has no loss: "
            "prepare it with other rows, or use --eval-every 0"
        )
    for key in ("tokenizer_hash", "chat_template_sha256"):
        ours, theirs = data.manifest.get(key), validation.manifest.get(key)
        if None not in (ours, theirs) and ours != theirs:
            raise DataError(
                f"{path} was prepared with another {key.rpartition('_')[0]} than {data.path}: "
                "prepare both together"
            )
    low, high, _ = token_range(validation)
    if model is not None and (low < 0 or high >= model.vocab_size):
        raise DataError(
            f"{path} holds token id {low if low < 0 else high}, but the model has "
            f"{model.vocab_size} (0 to {model.vocab_size - 1}): prepare it with the model's own "
            "tokenizer"
        )


def token_range(data: PackedDataset) -> tuple[int, int, bool]:
    """Smallest and largest token id, and whether all tokens were looked at."""
    packs = data.tokens
    rows = max(1, _CHUNK_TOKENS // data.max_seq_len)
    starts = range(0, len(packs), rows)
    stride = max(1, -(-packs.size // _MAX_SCANNED_TOKENS))
    chunks = [packs[start : start + rows] for start in starts[::stride]]
    return (
        min(int(chunk.min()) for chunk in chunks),
        max(int(chunk.max()) for chunk in chunks),
        stride == 1,
    )


def check_tokenizers(
    run: RunConfig, data: PackedDataset, model: ModelFiles | None, notes: list[str]
) -> Path | None:
    """The directory whose tokenizer the exports get; None when only the absent model has one.

    Raises ConfigError or DataError unless data, model and exports have the same tokenizer, by
    tokens and merges; `<|padding_i|>` tokens that exports add do not count.
    """
    models = None if model is None else model.tokenizer_dir
    chosen = _given_tokenizer(run) if run.tokenizer else data.tokenizer_dir or models
    if chosen is None and model is not None:
        raise ConfigError(
            f"exports would have no tokenizer: neither {data.path} nor {model.directory} holds "
            "one: name it with --tokenizer"
        )
    if chosen is not None:
        notes += _check_exportable(chosen, model)
    if "tokenizer_hash" not in data.manifest and data.tokenizer_dir is None:
        notes.append(f"{data.path} does not say which tokenizer made it: that check is skipped")
        return chosen
    given = chosen if run.tokenizer else None
    for what, directory in (("--tokenizer", given), ("the model's", models)):
        if directory not in (None, data.tokenizer_dir) and not _same_tokenizer(data, directory):
            raise DataError(
                f"{data.path} was prepared with another tokenizer than {what} in {directory}: "
                "prepare it again with that one, or train the model it was made for"
            )
    return chosen


def _given_tokenizer(run: RunConfig) -> Path:
    """The directory that --tokenizer names, as a path or as a Hub id in the cache."""
    given = Path(run.tokenizer).expanduser()
    if not given.is_dir():
        if run.tokenizer.startswith(("/", ".", "~")) or run.tokenizer.count("/") != 1:
            raise ConfigError(f"--tokenizer {run.tokenizer} does not exist: check the path")
        cached = cached_revision(run.tokenizer)
        if cached is None or not (cached / "tokenizer.json").is_file():
            raise ConfigError(
                f"--tokenizer {run.tokenizer} is neither a directory nor in the Hub's cache: "
                "name a directory"
            )
        return cached
    if not (given / "tokenizer.json").is_file():
        raise ConfigError(f"--tokenizer {given} holds no tokenizer.json: name its directory")
    return given


def _check_exportable(directory: Path, model: ModelFiles | None) -> list[str]:
    """Refuse a tokenizer that no export could carry: too large for the model, or no template.

    Returns what is odd but allowed.
    """
    config = _json_object(directory / "tokenizer_config.json")
    if not has_chat_template(directory, config):
        raise ConfigError(
            f"the tokenizer in {directory} has no chat template: "
            "prepare the data with --chat-template FILE"
        )
    content = _json_object(directory / "tokenizer.json")
    try:
        size = _num_tokens(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{directory}/tokenizer.json is not a tokenizer ({error}): copy it again, or run "
            "`ds-sft prepare` again"
        ) from None
    if model is None or size <= model.vocab_size:
        return []
    if needs_more_rows(directory, content, model.vocab_size):
        raise ConfigError(
            f"the tokenizer in {directory} has {size} tokens but the model has only "
            f"{model.vocab_size} rows: prepare the data with the model's own tokenizer"
        )
    return [
        f"the tokenizer in {directory} has {size - model.vocab_size} special tokens without a row "
        "in the model, which no row of the data holds: exports keep them"
    ]


def _num_tokens(tokenizer: dict[str, Any]) -> int:
    """Largest id of a tokenizer.json, plus one."""
    vocab = tokenizer.get("model", {}).get("vocab", {})
    ids = vocab.values() if isinstance(vocab, dict) else range(len(vocab))
    added = (token["id"] for token in tokenizer.get("added_tokens", []))
    return 1 + int(max([*ids, *added]))


def _json_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_bytes())
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} is not a JSON object")
    return value


def _same_tokenizer(data: PackedDataset, directory: Path) -> bool:
    if data.tokenizer_dir is not None:
        ours, theirs = data.tokenizer_dir / "tokenizer.json", directory / "tokenizer.json"
        # Usually a copy, and comparing bytes is a hundred times faster than reading the vocabulary.
        if ours.is_file() and ours.read_bytes() == theirs.read_bytes():
            return True
    known = data.manifest.get("tokenizer_hash")
    return tokenizer_hash(directory) == (known or tokenizer_hash(data.path / TOKENIZER_DIR))


def note_template(recipe: Recipe, data: PackedDataset, notes: list[str]) -> None:
    """Note a data set that was not rendered with the template that the recipe names."""
    if recipe.chat_template not in SHIPPED:
        return
    known = data.manifest.get("chat_template_sha256")
    stored = data.path / TOKENIZER_DIR / TEMPLATE_FILE
    if known is None and stored.is_file():
        known = hashlib.sha256(stored.read_bytes()).hexdigest()
    named = hashlib.sha256(read_template(recipe.chat_template).encode("utf-8")).hexdigest()
    if known is None:
        notes.append(f"{data.path} does not say which chat template rendered it")
    elif known != named:
        notes.append(
            f"the recipe names the chat template {recipe.chat_template!r}, but {data.path} was "
            f"rendered with another one: prepare with --chat-template {recipe.chat_template}"
        )


def _offline() -> bool:
    names = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")
    return any(os.environ.get(name, "").upper() in ("1", "ON", "YES", "TRUE") for name in names)

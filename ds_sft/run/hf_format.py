"""What a Hugging Face export directory is, apart from its weights.

Owns config.json (the source's, with dtype and tie flag as they are in the files), the tokenizer
(the data's, padded to the model's vocabulary), generation_config.json (only when asked, verbatim)
and the list of files. Invariants: the source's files are changed only where this module says so;
everything that can be wrong with them is found by `check_source`, before any training.

Leaves the weights to `shards`, reading a finished export to `verify`.
"""

from __future__ import annotations

import itertools
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ds_sft.errors import CheckpointError

# Everything a fast tokenizer is read from. Not added_tokens.json: only slow tokenizers read it, and
# it would not know the padding tokens.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "chat_template.jinja",
    "chat_template.json",
)
_TEMPLATES_DIR = "additional_chat_templates"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportSource:
    """Where the files of an export come from that training does not change."""

    config: dict[str, Any]
    """The model's config.json as read from its source."""
    tokenizer_dir: Path
    """Directory of the tokenizer with the chat template as rendered (the data's)."""
    generation_config: Path | None
    """File that becomes generation_config.json, copied verbatim; None writes none."""


def read_json_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that must hold an object; raises CheckpointError that names the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def vocab_size(config: dict[str, Any]) -> int:
    """Return the number of embedding rows that a config.json states."""
    size = config.get("vocab_size", config.get("text_config", {}).get("vocab_size"))
    if not isinstance(size, int):
        raise CheckpointError("the model's config.json has no vocab_size")
    return size


def check_source(source: ExportSource) -> None:
    """Raise CheckpointError for whatever would make an export fail later, or be unusable.

    Cheap (one read of the tokenizer), for rank 0 before training starts.
    """
    padded_tokenizer(source.tokenizer_dir, vocab_size(source.config))
    config = read_json_object(source.tokenizer_dir / "tokenizer_config.json")
    if not has_chat_template(source.tokenizer_dir, config):
        raise CheckpointError(
            f"the tokenizer in {source.tokenizer_dir} has no chat template: "
            "prepare the data with --chat-template FILE"
        )
    if source.generation_config is not None:
        read_json_object(source.generation_config)


def write_unchanging_files(
    directory: Path, source: ExportSource, *, dtype: str, tied: bool
) -> None:
    """Write every file of an export but the weights.

    `tied` says whether the weights have no `lm_head.weight` of their own.
    """
    config = exported_config(source.config, dtype=dtype, tied=tied)
    _write_json(directory / "config.json", config)
    write_tokenizer(source.tokenizer_dir, directory, vocab_size(source.config))
    if source.generation_config is not None:
        # Not through Transformers: its saving refuses configs that it loads, such as a temperature
        # without do_sample.
        shutil.copyfile(source.generation_config, directory / "generation_config.json")


def exported_config(config: dict[str, Any], *, dtype: str, tied: bool) -> dict[str, Any]:
    """Return the source's config.json with dtype and tie flag as they are in the files.

    `torch_dtype` is the name before Transformers 4.56, `dtype` the one after; both are read by
    somebody. Raises CheckpointError if the source claims the other tie.
    """
    claimed = config.get("tie_word_embeddings")
    if claimed is not None and claimed != tied:
        raise CheckpointError(
            f"config.json says tie_word_embeddings={str(claimed).lower()} but the weights "
            f"{'have no lm_head.weight' if tied else 'have an lm_head.weight'}: "
            "the tie was lost or made on the way"
        )
    return {**config, "tie_word_embeddings": tied, "dtype": dtype, "torch_dtype": dtype}


def write_tokenizer(source: Path, directory: Path, size: int) -> None:
    """Copy a tokenizer, padded to `size` tokens, without changing how it encodes or renders."""
    content = padded_tokenizer(source, size)
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, directory / name)
    if (source / _TEMPLATES_DIR).is_dir():
        shutil.copytree(source / _TEMPLATES_DIR, directory / _TEMPLATES_DIR)
    config = portable_tokenizer_config(read_json_object(source / "tokenizer_config.json"))
    if content is not None:
        _write_json(directory / "tokenizer.json", content)
        if "added_tokens_decoder" in config:
            # Where this older list exists, some classes read added tokens from it and nowhere else.
            config["added_tokens_decoder"] = {
                str(token["id"]): {key: value for key, value in token.items() if key != "id"}
                for token in content["added_tokens"]
            }
    _write_json(directory / "tokenizer_config.json", config)


def padded_tokenizer(source: Path, size: int) -> dict[str, Any] | None:
    """Return tokenizer.json with `<|padding_i|>` tokens up to `size`, None if it has so many.

    The file is edited as JSON and not rewritten by a library, so that everything else in it stays
    as it was. Numbers that are taken are passed over: training may start from a padded tokenizer.
    Raises CheckpointError if the tokenizer has more tokens than the model has rows, unless those
    beyond are of no use: Gemma 3's text models come with a tokenizer that knows an image token.
    """
    path = source / "tokenizer.json"
    content = read_json_object(path)
    try:
        vocabulary = content["model"]["vocab"]  # {token: id}, or for Unigram [[token, score], ...]
        if isinstance(vocabulary, list):
            vocabulary = {token: i for i, (token, _) in enumerate(vocabulary)}
        vocabulary = vocabulary | {
            token["content"]: token["id"] for token in content["added_tokens"]
        }
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} is not a tokenizer of the tokenizers library") from error
    count = max(vocabulary.values(), default=-1) + 1
    if count > size and needs_more_rows(source, content, size):
        raise CheckpointError(
            f"the tokenizer in {source} has {count} tokens but the model has only {size} rows: "
            "prepare the data with the model's own tokenizer"
        )
    if len(set(vocabulary.values())) != count:
        raise CheckpointError(
            f"the tokenizer in {source} has gaps in its ids ({len(vocabulary)} tokens, largest id "
            f"{count - 1}): it cannot be padded to {size} tokens"
        )
    if count >= size:
        return None
    free = (name for i in itertools.count() if (name := f"<|padding_{i}|>") not in vocabulary)
    content["added_tokens"] += [_padding_token(i, next(free)) for i in range(count, size)]
    return content


def needs_more_rows(directory: Path, content: dict[str, Any], size: int) -> bool:
    """Whether the tokenizer in `directory` has a token of use without a row among `size`.

    Of no use is a special token that begins, ends and fills no text and is in no chat template:
    nothing but a program that feeds images writes it. `content` is tokenizer.json.
    """
    config = read_json_object(directory / "tokenizer_config.json")
    template = str(config.get("chat_template"))
    for file in (directory / "chat_template.jinja", directory / "chat_template.json"):
        template += file.read_text(encoding="utf-8") if file.is_file() else ""
    vocabulary = content["model"]["vocab"]
    ids = vocabulary.values() if isinstance(vocabulary, dict) else range(len(vocabulary))
    named = [config.get(f"{name}_token") for name in ("bos", "eos", "pad", "unk", "sep", "cls")]
    used = {token.get("content") if isinstance(token, dict) else token for token in named}
    of_no_use = {
        token["id"]
        for token in content["added_tokens"]
        if token.get("special") and token["content"] not in used
        if token["content"] not in template
    }
    added = {token["id"] for token in content["added_tokens"]}
    return any(token_id >= size and token_id not in of_no_use for token_id in {*ids, *added})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    """Write JSON as tokenizers and Transformers do: indented, characters as they are."""
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _padding_token(token_id: int, name: str) -> dict[str, Any]:
    """Return an added token with the flags that Levanter's padding tokens have in its exports."""
    return {
        "id": token_id,
        "content": name,
        "single_word": False,
        "lstrip": False,
        "rstrip": False,
        "normalized": True,
        "special": False,
    }


def portable_tokenizer_config(config: dict[str, Any]) -> dict[str, Any]:
    """Return a tokenizer_config.json that Transformers 4 reads too, as evaluation tools may run it.

    Version 5 writes two things on which version 4 stops: a list under `extra_special_tokens`
    (there a dictionary), and class names of its own for tokenizers without a class.
    """
    portable = dict(config)
    extra = portable.get("extra_special_tokens")
    if isinstance(extra, list):
        del portable["extra_special_tokens"]
        portable.setdefault("additional_special_tokens", extra)
    if portable.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerBase"):
        portable["tokenizer_class"] = "PreTrainedTokenizerFast"
    return portable


def has_chat_template(directory: Path, tokenizer_config: dict[str, Any]) -> bool:
    """Say whether a tokenizer directory carries a chat template in any of the known places."""
    files = (directory / "chat_template.jinja", directory / "chat_template.json")
    return bool(tokenizer_config.get("chat_template")) or any(f.is_file() for f in files)

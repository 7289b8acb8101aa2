"""The tokenizer: loading it as inference will, storing it with its template, telling two apart.

Owns the tokenizer's identity (`tokenizer_hash`) and the bytes behind each token id. transformers is
imported only to load and to store; worker processes read the stored `tokenizer.json` alone. torch
comes in only where transformers' own choice of a tokenizer class needs it.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ds_sft.data import hub
from ds_sft.data.hub import cached_revision
from ds_sft.errors import DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TEMPLATE_FILE = "chat_template.jinja"
PADDING_TOKEN = re.compile(r"<\|padding_\d+\|>")
"""Tokens that exports add to match the model's vocabulary; they are no part of the identity."""

# AutoTokenizer imports torch (a second) to look at the model's configuration first. These classes
# are what it settles on by tokenizer_config.json alone.
_CLASSES_WITHOUT_TORCH = {
    "Qwen2Tokenizer": "Qwen2Tokenizer",
    "Qwen2TokenizerFast": "Qwen2Tokenizer",
    "PreTrainedTokenizerFast": "PreTrainedTokenizerFast",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Borrowed:
    """A chat template and where it is from."""

    template: str
    """Its text."""
    donor: str
    """The tokenizer that it comes with."""
    reason: str
    """What to print of it; empty if it is the tokenizer's own."""


def load_tokenizer(source: str, *, flag: str = "--tokenizer") -> Any:
    """The transformers tokenizer of a directory or a Hub id. Raises DataError, naming `flag`.

    No code that comes with the tokenizer is run.
    """
    _refuse_empty_path(source, flag)
    place = source if Path(source).is_dir() else _place_of_id(source, flag)
    import transformers

    name = _class_without_torch(Path(place))
    try:
        loader = getattr(transformers, name) if name else transformers.AutoTokenizer
        tokenizer = loader.from_pretrained(place)
    # Whatever is wrong with the files or the network, the person needs the same line.
    except Exception as error:
        reason = " ".join(str(error).split())[:200]
        raise DataError(
            f"{flag} {source} cannot be loaded ({reason}): give a directory with "
            "tokenizer.json or the id of a model"
        ) from None
    if getattr(tokenizer, "backend_tokenizer", None) is None:
        raise DataError(
            f"{flag} {source} is a {type(tokenizer).__name__} without a tokenizer.json: "
            "choose one that the tokenizers library can run"
        )
    return tokenizer


def _refuse_empty_path(source: str, flag: str) -> None:
    """Say at once what transformers would look for on the network first."""
    path = Path(source).expanduser()
    if path.is_dir():
        wrong = "" if any(path.glob("tokenizer*")) else "holds no tokenizer"
    else:
        local = source.startswith(("/", ".", "~")) or source.count("/") > 1
        wrong = "is not a directory" if local or path.exists() else ""
    if wrong:
        raise DataError(
            f"{flag} {source} {wrong}: give a directory with tokenizer.json or a model's id"
        )


def _place_of_id(source: str, flag: str) -> str:
    """From where a model's id is loaded: the Hub, or its cache when the Hub cannot be asked.

    Raises DataError if there is no such model, as far as can be known.
    """
    answer = hub.ask("model", source)
    if answer.state == "there":
        return source
    cached = cached_revision(source)
    if cached is not None and any(cached.glob("tokenizer*")):
        return str(cached)
    why = (
        "the Hub has no such model: check the name (a private one needs a login)"
        if answer.state == "absent"
        else f"as a model's id it is not in the Hub's cache and the Hub cannot be asked "
        f"({answer.reason}): check the path, or fetch the model first"
    )
    raise DataError(f"{flag} {source} is no directory here, and {why}")


def _class_without_torch(directory: Path) -> str | None:
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
    except (OSError, ValueError):
        return None
    if "auto_map" in config or not (directory / "tokenizer.json").is_file():
        return None
    return _CLASSES_WITHOUT_TORCH.get(config.get("tokenizer_class", ""))


def _template_of(tokenizer: Any) -> str:
    """Its chat template; empty if it has none."""
    template = tokenizer.chat_template
    if isinstance(template, dict):
        template = template.get("default")
    return template if isinstance(template, str) and template.strip() else ""


def borrowed_template(tokenizer: Any, source: str, chat_template_from: str = "") -> Borrowed:
    """The chat template that `tokenizer`, which is `source`, is given. Raises DataError.

    `chat_template_from` names the one to take it from. Empty: its own, or, where it has none, that
    of its tuned sibling: `<source>-it`, `<source>-Instruct`, or without a final `-Base` or `-pt`.
    """
    own = _template_of(tokenizer)
    if own and not chat_template_from:
        return Borrowed(template=own, donor=source, reason="")
    donor = chat_template_from or _tuned_sibling(source)
    flag = "--chat-template-from"
    lender = load_tokenizer(donor, flag=flag)
    template = _template_of(lender)
    if not template:
        raise DataError(f"{flag} {donor} has no chat template: name another tokenizer")
    special = [token.content for token in lender.added_tokens_decoder.values() if token.special]
    written = [token for token in special if token in template]
    known = tokenizer.backend_tokenizer.token_to_id
    strange = [token for token in written if known(token) is None]
    if strange:
        raise DataError(
            f"the chat template of {donor} writes {', '.join(strange)}, for which --tokenizer "
            f"{source} has no token: name another {flag}, or use the tokenizer of {donor}"
        )
    why = "--chat-template-from" if chat_template_from else f"{source} has none of its own"
    return Borrowed(
        template=template, donor=donor, reason=f"chat template: that of {donor} ({why})"
    )


def _tuned_sibling(source: str) -> str:
    """The name under which the tuned model of a base model is found. Raises DataError."""
    stem = re.sub(r"-(pt|base)$", "", source.rstrip("/"), flags=re.IGNORECASE)
    names = [f"{stem}-it", f"{stem}-Instruct", *([stem] if stem != source else [])]
    if Path(source).is_dir():
        found, why = next((name for name in names if Path(name).is_dir()), ""), "no such directory"
    else:
        found, why = _first_on_hub(names)
    if not found:
        raise DataError(
            f"--tokenizer {source} has no chat template, and none of {', '.join(names)} can "
            f"lend it one ({why}): add --chat-template-from ID, --chat-template FILE, or "
            "--chat-template qwen3 for the one that is shipped"
        )
    return found


def _first_on_hub(names: list[str]) -> tuple[str, str]:
    """The first model that is in the local cache or on the Hub; else empty, and why."""
    from huggingface_hub import try_to_load_from_cache

    for name in names:
        if isinstance(try_to_load_from_cache(name, "tokenizer_config.json"), str):
            return name, ""
    for name in names:
        answer = hub.ask("model", name)
        if answer.state == "unreachable":  # asking again for the next name would not help
            return "", f"the Hub cannot be asked: {answer.reason}"
        if answer.state == "there":
            return name, ""
    return "", "not on the Hub"


def save_tokenizer(tokenizer: Any, template: str, directory: Path) -> None:
    """Store the tokenizer with `template` as its only chat template."""
    tokenizer.chat_template = template
    try:
        tokenizer.save_pretrained(str(directory))
    except OSError:
        raise
    # The tokenizers library reports a full disk as a plain Exception.
    except Exception as error:
        raise DataError(f"the tokenizer cannot be stored in {directory} ({error})") from None
    stored = directory / TEMPLATE_FILE
    if not stored.is_file() or stored.read_bytes() != template.encode("utf-8"):
        stored.write_bytes(template.encode("utf-8"))


def tokenizer_hash(source: str | os.PathLike[str] | Any) -> str:
    """What tells two tokenizers apart: sha256 over their tokens by id and their merges.

    `source` is a directory with tokenizer.json, that file, or a loaded transformers tokenizer. The
    same for a tokenizer that transformers has saved again, and for one to which an export has added
    `<|padding_i|>` tokens. Raises DataError if there is no readable tokenizer.json.
    """
    if isinstance(source, str | os.PathLike):
        path = Path(source)
        path = path / "tokenizer.json" if path.is_dir() else path
        try:
            raw: str | bytes = path.read_bytes()
        except OSError as error:
            raise DataError(f"{path} cannot be read ({error.strerror})") from None
    else:
        path, raw = Path("tokenizer"), source.backend_tokenizer.to_str()
    try:
        return _identity(json.loads(raw))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(f"{path} is not a tokenizer.json ({error})") from None


def _identity(config: dict[str, Any]) -> str:
    vocab = config["model"]["vocab"]
    entries = (
        vocab.items()
        if isinstance(vocab, dict)
        else ((token, number) for number, (token, _) in enumerate(vocab))
    )
    tokens = {number: token for token, number in entries}
    tokens.update({added["id"]: added["content"] for added in config.get("added_tokens", [])})
    kept = [item for item in sorted(tokens.items()) if not PADDING_TOKEN.fullmatch(item[1])]
    merges = [
        merge if isinstance(merge, str) else " ".join(merge)
        for merge in config["model"].get("merges") or []
    ]
    identity = json.dumps([config["model"].get("type"), kept, merges], ensure_ascii=False)
    return hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()


def load_backend(tokenizer_file: Path) -> Tokenizer:
    """The tokenizer as the tokenizers library runs it, neither cutting nor padding.

    Raises DataError if the file is not there or not whole.
    """
    from tokenizers import Tokenizer

    try:
        backend = Tokenizer.from_file(str(tokenizer_file))
    # The library knows no other exception.
    except Exception as error:
        raise DataError(
            f"{tokenizer_file} cannot be read ({error}): copy the data set again, or run "
            "`ds-sft prepare` again"
        ) from None
    backend.no_truncation()
    backend.no_padding()
    return backend


def token_bytes(backend: Tokenizer) -> list[bytes] | None:
    """The UTF-8 bytes behind each token id; None unless the tokenizer is a byte-level BPE.

    Byte-level vocabularies spell each byte as one printable character (the alphabet of GPT-2). That
    the bytes of a row's tokens are the bytes of its text is for the caller to check, row by row: a
    normalizer or a token that swallows blanks may change them.
    """
    config = json.loads(backend.to_str())
    if config["model"].get("type") != "BPE" or "ByteLevel" not in json.dumps(config["decoder"]):
        return None
    added = {entry["id"]: entry["content"] for entry in config["added_tokens"]}
    byte_of = _byte_alphabet()
    vocab = {number: token for token, number in config["model"]["vocab"].items()}
    table = [b""] * (max([*vocab, *added]) + 1)
    for number, token in vocab.items():
        if number in added:
            continue
        try:
            table[number] = bytes([byte_of[character] for character in token])
        except KeyError:
            return None
    for number, token in added.items():
        table[number] = token.encode("utf-8")
    return table


def _byte_alphabet() -> dict[str, int]:
    """Character -> byte: printable Latin-1 stands for itself, the others follow from U+0100."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    alphabet.update({chr(0x100 + place): byte for place, byte in enumerate(others)})
    return alphabet

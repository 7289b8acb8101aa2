#!/usr/bin/env python3
"""Make a byte-level BPE tokenizer from a chat file and a small random model that uses it.

Owns the quickstart's starting point: a directory that loads like any pretrained model. The weights
are drawn on one process and saved: random initialisation under DeepSpeed's partitioned construction
starts from badly scaled weights, so a model must exist as files before ZeRO-3 loads it.
Invariants: same chats and seed, same tokenizer; every byte has a token, so any text can be encoded;
the special tokens and the splitting of text are Qwen3's; the directory appears only when whole.
The model is a Qwen3, or with --family a Llama or a Gemma 4 with what makes these different.
Leaves the chat template to `ds-sft prepare --chat-template`.

    python scripts/make_tiny_model.py --chats chats.jsonl --out model
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

# Qwen3's order. The second group is not "special" there either: such tokens survive
# `decode(skip_special_tokens=True)`, so a tool call stays readable in a reply.
CONTROL_TOKENS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>"),
    *("<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>"),
    *("<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"),
)
MARKUP_TOKENS = (
    *("<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
    *("<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>"),
    *("<think>", "</think>"),
)
# Contractions, words with one leading non-letter, single digits, punctuation, line ends, blanks.
QWEN3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def strings_in(value: Any) -> Iterator[str]:
    """Every string inside a parsed JSON value, keys too: what a template may render of it."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, inner in value.items():
            yield key
            yield from strings_in(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from strings_in(inner)


def chat_texts(chats: Path) -> Iterator[str]:
    """The text that the tokenizer is trained on: each row's strings, and its tools as JSON text."""
    with chats.open(encoding="utf-8") as stream:
        for line in stream:
            row = json.loads(line)
            yield "\n".join(strings_in(row["messages"]))
            if row.get("tools"):
                yield "\n".join(json.dumps(tool) for tool in row["tools"])


def make_tokenizer(chats: Path, vocab_size: int) -> Any:
    """Return a transformers fast tokenizer with at most `vocab_size` tokens, special ones included.

    Qwen3's real tokenizer has the special tokens after the learned ones; a trainer puts them first.
    Nothing depends on the order.
    """
    from tokenizers import (
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN3_SPLIT), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        min_frequency=2,
        show_progress=False,
        special_tokens=[*CONTROL_TOKENS, *MARKUP_TOKENS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    tokenizer.train_from_iterator(chat_texts(chats), trainer)
    # The trainer makes all of its added tokens special; the file format holds the difference.
    held = json.loads(tokenizer.to_str())
    for token in held["added_tokens"]:
        token["special"] = token["content"] in CONTROL_TOKENS
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(held)),
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def make_model(tokenizer: Any, args: argparse.Namespace) -> Any:
    """Return a bf16 model of --family with freshly drawn weights and the tokenizer's vocabulary.

    The vocabulary is rounded up to a multiple of 64, as real checkpoints do it: an export then has
    to pad its tokenizer, and the quickstart shows that this works.
    """
    import torch
    import transformers

    torch.manual_seed(args.seed)
    name, config_name, own = FAMILIES[args.family]
    vocab_size = -(-len(tokenizer) // 64) * 64
    config = getattr(transformers, config_name)(
        vocab_size=vocab_size,
        hidden_size=args.hidden_size,
        intermediate_size=3 * args.hidden_size,
        num_hidden_layers=args.layers,
        num_attention_heads=args.hidden_size // 64,
        num_key_value_heads=max(1, args.hidden_size // 128),
        head_dim=64,
        max_position_embeddings=4096,
        tie_word_embeddings=not args.untied,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **own(vocab_size, args.layers),
    )
    return getattr(transformers, name)(config).to(torch.bfloat16)


def of_theta(theta: float) -> dict[str, Any]:
    """One rotary embedding for all layers."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta}}


def of_gemma4(vocab_size: int, layers: int) -> dict[str, Any]:
    """Windows, larger heads in the other layers, embeddings for each layer, capped logits.

    From four layers on the second half shares keys and values, with an MLP twice as wide.
    """
    types = ["full_attention" if i % 2 else "sliding_attention" for i in range(layers)]
    return {
        "global_head_dim": 128,
        "sliding_window": 128,
        "layer_types": [*types[:-1], "full_attention"],
        "hidden_size_per_layer_input": 32,
        "vocab_size_per_layer_input": vocab_size,
        "num_kv_shared_layers": layers // 2 if layers >= 4 else 0,
        "use_double_wide_mlp": True,
        "final_logit_softcapping": 30.0,
    }


FAMILIES = {
    "qwen3": ("Qwen3ForCausalLM", "Qwen3Config", lambda vocab, layers: of_theta(1e6)),
    "llama": ("LlamaForCausalLM", "LlamaConfig", lambda vocab, layers: of_theta(5e5)),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", of_gemma4),
}


def parse_args() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Make a tokenizer and a small random model.")
    parser.add_argument("--chats", type=Path, required=True, help="JSON lines of OpenAI messages")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    parser.add_argument("--family", choices=FAMILIES, default="qwen3", help="its architecture")
    parser.add_argument("--vocab-size", type=int, default=2048, help="tokens at most")
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 128")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--untied", action="store_true", help="an output head of its own")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if not args.chats.is_file():
        parser.error(f"--chats {args.chats} is not a file")
    if args.out.exists():
        parser.error(f"--out {args.out} exists: remove it or name another directory")
    if args.hidden_size < 128 or args.hidden_size % 128:
        parser.error(f"--hidden-size {args.hidden_size} must be a multiple of 128")
    return args


def main() -> None:
    """Make both and save them together."""
    args = parse_args()
    partial = args.out.with_name(args.out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    tokenizer = make_tokenizer(args.chats, args.vocab_size)
    model = make_model(tokenizer, args)
    tokenizer.save_pretrained(partial)
    model.save_pretrained(partial)
    partial.rename(args.out)
    print(
        f"wrote {args.out}: {model.num_parameters() / 1e6:.1f} M parameters, "
        f"{len(tokenizer)} tokens"
    )


if __name__ == "__main__":
    main()

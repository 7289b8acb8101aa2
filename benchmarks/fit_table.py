"""The README's table: which Qwen3 on which card with which JSON, as `ds-sft fit` predicts it.

    python benchmarks/fit_table.py

One GPU, a node with --host-gib of memory, NVMe as large as it has to be. No weights are read: the
models are their public config.json. Nothing here is measured on a GPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from ds_sft.engine import rates, tuning
from ds_sft.engine.memory import GIB
from ds_sft.fit import measured, model_of, read_configs
from ds_sft.fit_question import CONFIGS, FitFlags, Machine, Question
from ds_sft.fit_rows import row, usable

_SHAPES = {
    "1.7B": (2048, 28, 16, 6144, True),
    "4B": (2560, 36, 32, 9728, True),
    "8B": (4096, 36, 32, 12288, False),
    "32B": (5120, 64, 64, 25600, False),
}
MODELS: dict[str, dict[str, Any]] = {
    name: {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": 151936,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960,
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": inner, "tie_word_embeddings": tied,
    }
    for name, (hidden, layers, heads, inner, tied) in _SHAPES.items()
}  # fmt: skip
LENGTHS = (4096, 16384, 32768)
# Gigabytes on the box, and GiB that a driver leaves to programs, rounded down.
CARDS = {12: 11.7, 16: 15.7, 24: 23.5, 48: 47.0, 80: 79.0, 141: 139.0}
NO_LIMIT = 1 << 62


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host-gib", type=int, default=128)
    parser.add_argument("--small", action="store_true",
                        help="with --offload-activations and --mlp-tiles auto")  # fmt: skip
    args = parser.parse_args()
    host = args.host_gib * GIB
    print("| model, tokens | " + " | ".join(f"{card} GB" for card in CARDS) + " |")
    print("| --- |" + " --- |" * len(CARDS))
    for name, config in MODELS.items():
        for length in LENGTHS:
            cells = cells_of(config, length, host, args.small)
            print(f"| {name}, {length // 1024}k | " + " | ".join(cells) + " |", flush=True)


def cells_of(config: dict[str, Any], length: int, host: int, small: bool) -> list[str]:
    """A cell for each card."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(config))
        flags = FitFlags(
            model_id=folder, max_seq_len=length, offload_activations=small,
            mlp_tiles="auto" if small else 0,
        )  # fmt: skip
        model = model_of(folder)
    question = Question(model=model, flags=flags, activations=measured(model, flags))
    return [cell(question, card, host) for card in CARDS]


def cell(question: Question, card: int, host: int) -> str:
    """The fastest file for a card: its name, peak in GiB, and host memory if that is short.

    A file with sizes for the model (`--write`) counts where the one as shipped does not fit.
    """
    memory = int(CARDS[card] * GIB)
    machine = Machine(gpu_memory=memory, host_memory=NO_LIMIT, nvme=NO_LIMIT)
    speeds = rates.assumed(memory, several_nodes=False)
    found = []
    for name, value in usable(question, read_configs(CONFIGS))[0].items():
        for star, sizes in (("", value), ("*", tuning.tuned(value, question.setup(), roomy=False))):
            result = row(question, name, sizes, machine, speeds)
            if not result.short:
                short_of = max(0, result.need.host - host)
                found.append((short_of, result.seconds.total, star, name, result.need))
    if not found:
        return "-"
    short_of, _, star, name, need = min(found, key=lambda f: f[:3])
    what = name.removeprefix("zero3").removeprefix("_offload_") or "on GPU"
    text = f"{what}{star} {need.gpu.total / GIB:.1f}"
    return f"{text} (host {need.host / GIB:.0f})" if short_of else text


if __name__ == "__main__":
    main()

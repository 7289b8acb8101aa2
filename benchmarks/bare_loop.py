"""The ceiling: a plain PyTorch loop over the same model, packs, attention kernel and optimizer.

One process, no DeepSpeed, no gathers: bf16 weights over fp32 masters, layer recomputation, chunked
cross-entropy in checkpoints, AdamW. Prints a JSON line per step: document tokens and seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint
from transformers import AutoModelForCausalLM

from ds_sft.data.collate import collate
from ds_sft.data.packed import PackedDataset
from ds_sft.model import attention


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--batch", type=int, default=4)
    args = parser.parse_args()
    data = PackedDataset.open(args.data)
    attention.register("sdpa")
    model = AutoModelForCausalLM.from_pretrained(
        args.model, attn_implementation=attention.NAME, dtype=torch.bfloat16
    )
    model.train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    masters = [p.detach().float().clone() for p in model.parameters()]
    optimizer = torch.optim.AdamW(masters, lr=1e-4)
    for step in range(args.steps):
        started = time.monotonic()
        packs = [(step * args.batch + i) % data.num_packs for i in range(args.batch)]
        targets = sum(int(data.assistant_counts[p]) for p in packs)
        for pack in packs:
            (summed_loss(model, data, pack) / targets).backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, 1.0)
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        tokens = sum(sum(data.doc_lengths(p)) for p in packs)
        row = {"tokens": tokens, "step_time_s": time.monotonic() - started}
        print(json.dumps(row), flush=True)


def summed_loss(model: torch.nn.Module, data: PackedDataset, pack: int) -> torch.Tensor:
    """Cross-entropy of one pack, over checkpointed chunks of 2048 tokens."""
    host = collate(data, [pack], 1)
    bounds = torch.from_numpy(host.cu_seq_lens)
    hidden = model.model(
        input_ids=torch.from_numpy(host.input_ids),
        position_ids=torch.from_numpy(host.position_ids),
        use_cache=False,
        cu_seq_lens_q=bounds,
        max_length_q=host.max_length,
        segment_lengths=host.segment_lengths,
    ).last_hidden_state[0]
    targets = torch.from_numpy(host.targets)

    def chunk_loss(part: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        logits = model.lm_head(part).float()
        return F.cross_entropy(logits, wanted, ignore_index=-100, reduction="sum")

    chunks = zip(hidden.split(2048), targets.split(2048), strict=True)
    return sum(checkpoint(chunk_loss, h, t, use_reentrant=False) for h, t in chunks)


if __name__ == "__main__":
    main()

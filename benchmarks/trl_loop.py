"""TRL's SFTTrainer with packing, on the same chats: what people use today.

Started by `step.py`, alone or under torch's launcher. Prints a JSON line per step: document tokens
of this process' packs and seconds.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

from datasets import Dataset
from transformers import TrainerCallback
from trl import SFTConfig, SFTTrainer


class Timer(TrainerCallback):
    """Prints seconds per optimizer step."""

    def on_step_begin(self, args, state, control, **_) -> None:
        self.started = time.monotonic()

    def on_step_end(self, args, state, control, **_) -> None:
        if state.is_world_process_zero:
            print(json.dumps({"step_time_s": time.monotonic() - self.started}), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--chats", type=Path, required=True)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--out", required=True)
    args = parser.parse_args()
    rows = [json.loads(line) for line in args.chats.read_text().splitlines()]
    config = SFTConfig(
        output_dir=args.out, max_length=args.length, packing=True, use_cpu=True, bf16=True,
        per_device_train_batch_size=1, gradient_accumulation_steps=args.accumulate,
        gradient_checkpointing=True, max_steps=args.steps, learning_rate=1e-4, logging_steps=10**6,
        save_strategy="no", report_to="none", model_init_kwargs={"dtype": "float32"},
    )  # fmt: skip
    data = Dataset.from_list([{"messages": row["messages"]} for row in rows])
    trainer = SFTTrainer(args.model, args=config, train_dataset=data, callbacks=[Timer()])
    packed = trainer.train_dataset
    fill = sum(len(ids) for ids in packed["input_ids"]) / (len(packed) * args.length)
    print(json.dumps({"fill": fill}), flush=True)
    trainer.train()


if __name__ == "__main__":
    main()

"""One rank of the export tests, started with others by `launch`.

    deepspeed --num_gpus 2 --no_local_rank export_worker.py MODE SPEC.json

That is how memory is measured; the others are forks that share their imports. Writes what the tests
compare into the spec's `out` directory.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
TOKENIZER = ROOT / "tests" / "golden" / "tiny_tokenizer"

# No size but q_proj's divides by 2 or 3, so that every rank's last part is padded.
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 301,
    "hidden_size": 23,
    "intermediate_size": 37,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 10,
    "max_position_embeddings": 64,
    "rope_theta": 1000000.0,
    "eos_token_id": 256,
    "an_unknown_key": [1, 2],
}


def launch(mode: str, world_size: int, timeout_s: int = 300, **spec: object) -> str:
    """Run this file's `main` on so many ranks; return its output, raise if it fails."""
    import harness

    out = Path(str(spec["out"]))
    out.mkdir(parents=True, exist_ok=True)
    spec_file = out / f"{mode}.json"
    spec_file.write_text(json.dumps(spec, default=str))
    if mode == "memory":
        return launch_alone(mode, world_size, spec_file, timeout_s)
    words = [mode, spec_file, "--out", out]
    ranks = [harness.Training(words, module="export_worker")]
    (done,) = harness.launch_many(world_size, ranks, out, timeout=timeout_s)
    if any(done.codes):
        raise AssertionError(f"{mode} exited {done.codes}:\n{done.text[-6000:]}")
    return done.text


def launch_alone(mode: str, world_size: int, spec_file: Path, timeout_s: int) -> str:
    """The same under the real launcher: nothing of another process is in the ranks' memory."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "deepspeed.launcher.runner"]
    command += ["--num_gpus", str(world_size), "--master_port", str(port), "--no_local_rank"]
    command += [__file__, mode, str(spec_file)]
    env = os.environ | {
        "DS_ACCELERATOR": "cpu",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    }
    process = subprocess.Popen(
        command,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        raise AssertionError(f"{mode} ran past {timeout_s} s:\n{output[-6000:]}") from None
    if process.returncode != 0:
        raise AssertionError(f"{mode} exited {process.returncode}:\n{output[-6000:]}")
    return output


def make_engine(spec: dict):
    """Return a ZeRO-3 engine of a Qwen3 with Hugging Face names, in several groups."""
    import deepspeed
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    class Model(torch.nn.Module):
        def __init__(self, config) -> None:
            super().__init__()
            causal = AutoModelForCausalLM.from_config(config)
            self.model = causal.model
            self.lm_head = causal.lm_head

        def forward(self, ids):
            return self.lm_head(self.model(input_ids=ids, use_cache=False).last_hidden_state)

    config = {k: v for k, v in spec["config"].items() if k != "an_unknown_key"}
    bf16 = spec["compute"] == "bfloat16"
    ds_config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": bf16},
        "data_types": {"grad_accum_dtype": "fp32"},
        "communication_data_type": "fp32",
        "zero_force_ds_cpu_optimizer": False,
        "zero_optimization": {
            "stage": 3,
            "sub_group_size": spec.get("sub_group_size", 3000),
            "stage3_param_persistence_threshold": spec.get("persistence", 1000),
        },
    }
    if spec.get("offload"):
        ds_config["zero_optimization"]["offload_optimizer"] = {"device": "cpu"}
        ds_config["zero_optimization"]["offload_param"] = {"device": "cpu"}
    torch.manual_seed(0)
    hf_config = AutoConfig.for_model(**config)
    import torch._dynamo  # imported inside zero.Init it fails

    if spec.get("zero_init"):
        AutoModelForCausalLM.from_config(AutoConfig.for_model(**TINY | {"an_unknown_key": 0}))
        with deepspeed.zero.Init(config_dict_or_path=ds_config):
            model = Model(hf_config)
    else:
        model = Model(hf_config)
    if "huge" in spec:
        model.get_parameter(spec["huge"]).data.view(-1)[-1] = 1e5
    decayed = [p for p in model.parameters() if len(getattr(p, "ds_shape", p.shape)) > 1]
    kept = {id(p) for p in decayed}
    others = [p for p in model.parameters() if id(p) not in kept]
    groups = [{"params": others, "weight_decay": 0.0}, {"params": decayed, "weight_decay": 0.1}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2)
    return deepspeed.initialize(model=model, optimizer=optimizer, config=ds_config)[0]


def train(engine, steps: int, seed: int) -> list[float]:
    """Do a few optimizer steps on random tokens, different ones on each rank."""
    import torch

    generator = torch.Generator().manual_seed(1000 * seed + engine.global_rank)
    losses = []
    for _ in range(steps):
        ids = torch.randint(0, 301, (1, 16), generator=generator)
        loss = torch.nn.functional.cross_entropy(engine(ids)[0].float(), ids[0])
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def make_source(spec: dict):
    """Return where the export's other files come from."""
    from ds_sft.run.hf_format import ExportSource

    return ExportSource(
        config=spec["config"], tokenizer_dir=Path(spec["tokenizer"]), generation_config=None
    )


def save_native(engine, parent: Path, spec: dict) -> None:
    """Write a native checkpoint `step-1` as the run directory keeps them."""
    import torch.distributed as dist

    engine.save_checkpoint(str(parent), tag="step-1", client_state={"completed": 2})
    if dist.get_rank() == 0:
        step = parent / "step-1"
        (step / "model").mkdir()
        (step / "model" / "config.json").write_text(json.dumps(spec["config"]))
        shutil.copytree(spec["tokenizer"], step / "model" / "tokenizer")
        meta = {"format": 1, "label": 1, "completed": 2, "world_size": dist.get_world_size()}
        meta |= {"compute_dtype": spec["compute"]}
        (step / "meta.json").write_text(json.dumps(meta))
    dist.barrier()


def roundtrip(spec: dict, out: Path, barrier) -> None:
    """Train, export in each dtype, save natively, train on; record losses and logits."""
    import torch

    from ds_sft.run.export import export_live

    engine = make_engine(spec)
    losses = train(engine, 2, seed=1)
    if not spec.get("no_export"):
        for dtype in ("bfloat16", "float32", "float16"):
            export_live(
                engine,
                out / f"live-{dtype}",
                dtype=dtype,
                source=make_source(spec),
                barrier=barrier,
                max_shard_bytes=spec["max_shard_bytes"],
            )
        save_native(engine, out / "native", spec)
    with torch.no_grad():
        logits = engine(torch.arange(40).view(1, -1)).float()
    losses += train(engine, 2, seed=2)
    if engine.global_rank == 0:
        torch.save({"logits": logits, "losses": losses}, out / "engine.pt")


def failures(spec: dict, out: Path, barrier) -> None:
    """Let rank 0 fail in three ways; record what each rank saw, then export for real."""
    import errno

    from ds_sft.errors import CheckpointError
    from ds_sft.run import export as module
    from ds_sft.run.export import export_live
    from ds_sft.run.shards import WeightsWriter

    engine = make_engine(spec)
    seen = []

    def attempt(name: str, dtype: str) -> None:
        try:
            export_live(engine, out / name, dtype=dtype, source=make_source(spec), barrier=barrier)
            seen.append("written")
        except CheckpointError as error:
            seen.append(str(error))
        seen.append(sorted(p.name for p in out.iterdir() if p.name.startswith(name)))

    def full_disk(*_args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    attempt("overflow", "float16")
    write = WeightsWriter.write
    WeightsWriter.write = lambda self, s, p: full_disk() if "norm" in s.name else write(self, s, p)
    attempt("full", "bfloat16")
    WeightsWriter.write = write
    publish = module.publish
    module.publish = full_disk
    attempt("late", "bfloat16")
    module.publish = publish
    attempt("good", "bfloat16")
    (out / f"seen-{engine.global_rank}.json").write_text(json.dumps(seen))


def slow_writer(spec: dict, out: Path, barrier) -> None:
    """Export while rank 0 needs longer for one tensor than the default group's timeout."""
    import torch.distributed as dist

    from ds_sft.run.export import export_live
    from ds_sft.run.shards import WeightsWriter

    engine = make_engine(spec)
    dist.distributed_c10d._set_pg_timeout(timedelta(seconds=3), dist.group.WORLD)
    write = WeightsWriter.write

    def slow(self, tensor_spec, pieces) -> None:
        if tensor_spec.name == "model.norm.weight":
            time.sleep(5)
        write(self, tensor_spec, pieces)

    WeightsWriter.write = slow
    wait = (lambda: None) if spec.get("no_barrier") else barrier
    export_live(engine, out / "slow", dtype="bfloat16", source=make_source(spec), barrier=wait)


def memory(spec: dict, out: Path, barrier) -> None:
    """Record each rank's peak of anonymous memory over its start, for both kinds of export."""
    from ds_sft.run.export import export_live

    engine = make_engine(spec)
    result = {}
    for dtype in ("float32", "bfloat16"):
        barrier()
        with AnonymousPeak() as peak:
            export_live(
                engine,
                out / f"live-{dtype}",
                dtype=dtype,
                source=make_source(spec),
                barrier=barrier,
                max_shard_bytes=spec["max_shard_bytes"],
            )
        result[dtype] = {"mb": peak.over_start / 1e6, "seconds": peak.seconds}
    (out / f"peak-{engine.global_rank}.json").write_text(json.dumps(result))
    save_native(engine, out / "native", spec)


class AnonymousPeak:
    """Polls this process's RssAnon in a thread; `over_start` in bytes."""

    def __enter__(self) -> AnonymousPeak:
        self.start = self.now()
        self.peak = self.start
        self.began = time.monotonic()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._poll, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self.seconds = time.monotonic() - self.began

    @property
    def over_start(self) -> int:
        return self.peak - self.start

    def _poll(self) -> None:
        while not self._stop.wait(0.002):
            self.peak = max(self.peak, self.now())

    @staticmethod
    def now() -> int:
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) * 1024
        raise RuntimeError("no RssAnon in /proc/self/status")


def main(words: list[str]) -> None:
    import deepspeed
    import torch.distributed as dist

    mode, spec_file = words[:2]
    spec = json.loads(Path(spec_file).read_text())
    from ds_sft.engine.build import skip_inference_op

    skip_inference_op()
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    long_group = dist.new_group(backend="gloo", timeout=timedelta(hours=2))
    out = Path(spec["out"])
    {"roundtrip": roundtrip, "failures": failures, "slow_writer": slow_writer, "memory": memory}[
        mode
    ](spec, out, lambda: dist.barrier(group=long_group))
    dist.destroy_process_group()


if __name__ == "__main__":
    from ds_sft.engine.leaving import leave

    main(sys.argv[1:])
    leave()

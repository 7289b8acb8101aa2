"""Liger's kernels on a CPU: Triton's interpreter with its gaps closed, and counts of the launches.

Only with TRITON_INTERPRET=1 in the environment before Triton is imported; in a process of its own.
As a program: compare a patched model with the plain one, `interpreted_triton.py MODEL_TYPE`, and
print a JSON object of relative differences.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from typing import Any

launches: Counter[str] = Counter()


def close_gaps() -> None:
    """Two things that compiled Triton does: float arguments are values, rsqrt is a function."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    import liger_kernel.ops.rms_norm as rms_norm
    import numpy as np
    import triton.language as tl
    from triton.runtime import interpreter

    real = interpreter._implicit_cvt

    def convert(argument: Any) -> Any:
        if type(argument) is float:
            values = np.array([argument], dtype=np.float32)
            return tl.tensor(interpreter.TensorHandle(values, tl.float32), tl.float32)
        return real(argument)

    interpreter._implicit_cvt = convert
    rms_norm.rsqrt = lambda value: tl.rsqrt(value)  # tl is patched while a kernel runs
    launch = interpreter.GridExecutor.__call__

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        launches[self.fn.__name__] += 1
        return launch(self, *args, **kwargs)

    interpreter.GridExecutor.__call__ = counted


def main(model_type: str) -> None:
    import torch
    import transformers

    from ds_sft.model import attention, layers, liger
    from ds_sft.model.layers import LayerChoices
    from ds_sft.model.sft import DeviceBatch, SftModel

    attention.register("sdpa")
    name = {"qwen3": "Qwen3", "qwen2": "Qwen2", "llama": "Llama"}[model_type]
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
             "vocab_size": 64}  # fmt: skip
    if name == "Qwen2":
        del shape["head_dim"]  # it has none of its own: 32 / 4
    config = getattr(transformers, f"{name}Config")(**shape, attn_implementation=attention.NAME)
    cpu = torch.device("cpu")
    close_gaps()
    assert liger.obstacle(config.to_dict(), cpu) is None

    lengths = [7, 1, 12]
    generator = torch.Generator().manual_seed(2)
    batch = DeviceBatch(
        input_ids=torch.randint(0, 64, (1, 20), generator=generator),
        position_ids=torch.arange(20)[None] + 5,
        positions=torch.arange(0, 19),
        labels=torch.randint(0, 64, (19,), generator=generator),
        cu_seq_lens=torch.tensor([0, 7, 8, 20], dtype=torch.int32),
        segment_lengths=lengths,
        max_length=12,
    )

    def run(dtype: torch.dtype, **choices: Any) -> dict[str, torch.Tensor]:
        """Loss, hidden states in training and in evaluation, and the gradients."""
        torch.manual_seed(0)
        causal_lm = getattr(transformers, f"{name}ForCausalLM")(config)
        with torch.no_grad():
            for parameter in causal_lm.parameters():  # norms of ones would hide a wrong weight
                parameter.copy_(torch.randn_like(parameter) * 0.2 + (parameter.ndim == 1))
        causal_lm = causal_lm.to(dtype)
        layers.apply(causal_lm, LayerChoices(**choices), cpu)
        model = SftModel(causal_lm, loss_chunk_size=7)
        with torch.no_grad():
            evaluated = model.eval().hidden_states(batch).clone()
        loss = model.train()(batch)
        (loss * 0.37).backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        return {"loss": loss.detach(), "evaluated": evaluated, **gradients}

    def apart(got: dict[str, torch.Tensor], want: dict[str, torch.Tensor]) -> float:
        assert got.keys() == want.keys()
        return max(
            ((got[n].double() - want[n].double()).norm() / want[n].double().norm()).item()
            for n in want
        )

    # The interpreter computes in numpy, which has no bfloat16; the kernels' roundings are the same.
    plain = {dtype: run(dtype) for dtype in (torch.float32, torch.float16)}
    assert not launches.keys() - {"_double"}, launches
    said: dict[str, Any] = {}
    patched = run(torch.float32, liger=True)  # rotation is patched for good from here on
    said["launches"] = dict(launches)
    said["float32"] = apart(patched, plain[torch.float32])
    launches.clear()
    tiled = run(torch.float32, liger=True, mlp_tiles=3, recompute_every=2)
    said["launches tiled"] = dict(launches)
    said["float32 tiled"] = apart(tiled, plain[torch.float32])
    half = run(torch.float16, liger=True)
    said["float16"] = apart(half, plain[torch.float16])
    said["float16 to float32"] = apart(half, plain[torch.float32])
    said["plain float16 to float32"] = apart(plain[torch.float16], plain[torch.float32])
    config.rms_norm_eps *= 1000
    said["float32 with another epsilon"] = apart(
        run(torch.float32, liger=True), plain[torch.float32]
    )
    print(json.dumps(said))


if __name__ == "__main__":
    main(sys.argv[1])

"""What a microbatch holds beside the model's states: measured on the real modules, without memory.

Owns one measurement: our own model, cut to few layers, runs forward and backward on fake tensors
(shapes without values), and every storage that lives is counted. Invariants: nothing here is a rule
of thumb: what the modules, the attention, the recomputation and the loss keep is what is counted;
parameters and their gradients after accumulation are not counted, ZeRO-3 has them in its own
buffers. Leaves states, buckets and gathered weights to `engine.memory`. CPU only, seconds.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoConfig,
    AutoModelForCausalLM,
)
from transformers.initialization import no_init_weights

from ds_sft.data import geometry
from ds_sft.model import attention
from ds_sft.model.layers import LayerChoices
from ds_sft.model.sft import DeviceBatch, SftModel, arrange

_NAME = "ds_sft_measured"
FORWARD, HEAD, LAYERS, EMBEDDING = "forward", "head", "layers", "embedding"
PHASES = (FORWARD, HEAD, LAYERS, EMBEDDING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """Bytes of one microbatch on one rank."""

    num_layers: int
    """Layers of the model that was run."""
    kept: int
    """Alive when the last layer is done: what the layers keep for the backward pass."""
    forward: int
    """Most bytes alive in the forward pass of the layers."""
    head: int
    """... in the head, forward and backward, `kept` included."""
    layers: int
    """... in the backward pass of the layers, weight gradients on their way included."""
    embedding: int
    """... in the backward pass of the embedding."""


def cuts(
    config: dict[str, Any], tokens: int, *, period: int = 1, **how: Any
) -> tuple[Measured, Measured]:
    """Two models cut to few layers, from which `engine.memory.extrapolated` makes the whole one.

    They differ by `period` layers, after which the layers repeat (as with one recomputed in so
    many), and end as the whole model does. `how` is that of `measure`. A model whose layers differ
    is measured whole, in the place of both.
    """
    layers = config["num_hidden_layers"]
    if not _alike(config, how.get("kernel", "varlen")):
        whole = measure(config, layers, tokens, **how)
        return replace(whole, num_layers=layers - 1), whole
    first = min(layers, period + layers % period)
    return tuple(measure(config, n, tokens, **how) for n in (first, first + period))  # type: ignore[return-value]


def _alike(config: dict[str, Any], kernel: str) -> bool:
    """Whether all layers keep the same; a window changes what the loop over documents holds."""
    kinds = geometry.layers(config)
    if kernel == "varlen":
        kinds = [replace(kind, window=None) for kind in kinds]
    return len(set(kinds)) == 1


def of_choices(
    config: dict[str, Any], tokens: int, choices: LayerChoices, **how: Any
) -> tuple[Measured, Measured]:
    """`cuts` of a model whose layers run as chosen.

    Liger's kernels cannot be traced: the plain ones stand in for them, which keep no less. Inputs
    that wait in host memory are counted as if they stayed: `engine.memory.parked` moves them.
    """
    traced = replace(choices, liger=False, offload_activations=False)
    return cuts(
        config,
        tokens,
        period=max(1, choices.recompute_every),
        arranged=lambda causal_lm, chunk: arrange(causal_lm, chunk, traced),
        **how,
    )


def measure(
    config: dict[str, Any],
    num_layers: int,
    tokens: int,
    *,
    targets: int | None = None,
    dtype: torch.dtype = torch.bfloat16,
    loss_chunk_size: int = 2048,
    kernel: str = "varlen",
    arranged: Callable[[Any, int], SftModel] = arrange,
) -> Measured:
    """Run `num_layers` of the architecture in `config` on a row of `tokens`, `targets` trained.

    `kernel` is "varlen" (a GPU's, flash-attn's included) or "sdpa" (a CPU's); one document fills
    the row, the worst case of both. `arranged` makes the trained model of a causal language model.
    """
    cut = {**copy.deepcopy(config), "num_hidden_layers": num_layers}
    if num_layers != config["num_hidden_layers"]:
        cut.pop("layer_types", None)  # one entry a layer, derived again from the new number
    auto = AutoConfig.for_model(**cut)
    auto.use_cache = False
    AttentionInterface.register(_NAME, _on_gpu if kernel == "varlen" else _on_cpu)
    AttentionMaskInterface.register(_NAME, lambda *_, **__: None)
    model_class: Any = AutoModelForCausalLM._model_mapping[type(auto)]
    with FakeTensorMode(), no_init_weights():
        causal_lm = model_class._from_config(auto, attn_implementation=_NAME, dtype=dtype)
        causal_lm.tie_weights()
        model = arranged(causal_lm, loss_chunk_size)
        model.train()
        counter = _Counter(t for t in [*model.parameters(), *model.buffers()])
        _drop_gradients(model)
        _mark_phases(model, counter)
        with counter:
            model(_batch(tokens, tokens if targets is None else targets)).backward()
    return Measured(num_layers=num_layers, kept=counter.kept, **counter.peaks)


def _batch(tokens: int, targets: int) -> DeviceBatch:
    return DeviceBatch(
        input_ids=torch.zeros(1, tokens, dtype=torch.int64),
        position_ids=torch.zeros(1, tokens, dtype=torch.int64),
        positions=torch.zeros(targets, dtype=torch.int64),
        labels=torch.zeros(targets, dtype=torch.int64),
        cu_seq_lens=torch.zeros(2, dtype=torch.int32),
        segment_lengths=[tokens],
        max_length=tokens,
    )


class _Counter(TorchDispatchMode):
    """Counts the bytes of every storage made while it is on, from its making to its end."""

    def __init__(self, known: Any) -> None:
        super().__init__()
        self.phase = FORWARD
        self.live = 0
        self.kept = 0
        self.peaks = dict.fromkeys(PHASES, 0)
        self._alive: dict[int, weakref.ref[Any]] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is torch.ops.aten.logsumexp.default:
            with self:
                return _logsumexp(*args, **(kwargs or {}))
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._see(tensor.untyped_storage())
        self.peaks[self.phase] = max(self.peaks[self.phase], self.live)
        return out

    def _see(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key in self._known or key in self._alive:
            return

        def gone(_: object) -> None:
            del self._alive[key]
            self.live -= size

        self._alive[key] = weakref.ref(storage, gone)
        self.live += size


def _logsumexp(values: torch.Tensor, dim: list[int], keepdim: bool = False) -> torch.Tensor:
    """What the kernel does inside, where no dispatch is seen: a copy as large as its input."""
    most = values.amax(dim, keepdim=True)
    total = (values - most).exp_().sum(dim, keepdim=keepdim).log_()
    return total.add_(most if keepdim else most.squeeze(dim))


def _mark_phases(model: SftModel, counter: _Counter) -> None:
    """Tell the counter what is running: forward, the head, the layers backwards, the embedding."""

    def enter(phase: str) -> Callable[[torch.Tensor], None]:
        def hook(_: torch.Tensor) -> None:
            counter.phase = phase

        return hook

    def before_head(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        counter.kept, counter.phase = counter.live, HEAD
        inputs[0].register_hook(enter(LAYERS))

    model.lm_head.register_forward_pre_hook(before_head)
    model.model.embed_tokens.register_forward_hook(
        lambda _, __, out: out.register_hook(enter(EMBEDDING)) and None
    )


def _drop_gradients(model: SftModel) -> None:
    """A gradient is gone once it is whole: ZeRO-3 copies it into its bucket and frees it."""

    def drop(parameter: torch.Tensor) -> None:
        parameter.grad = None

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(drop)


def _on_cpu(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None,
    *, scaling: float, segment_lengths: list[int], cu_seq_lens_q: torch.Tensor, max_length_q: int,
    sliding_window: int | None = None, **_: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    out = attention._per_document(
        query, key, value, scaling, sliding_window, segment_lengths, cu_seq_lens_q, max_length_q
    )
    return out, None


def _on_gpu(
    module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: None, **_: Any
) -> tuple[torch.Tensor, None]:
    if query.shape[-1] > geometry.LARGEST_HEAD:  # sdpa, which wants as many key heads
        groups = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    return _Varlen.apply(q, k, v)[None], None


class _Varlen(torch.autograd.Function):
    """What a varlen flash kernel allocates; it computes nothing.

    Forward: the output and a float32 log-sum per head and token. Backward: a float32 accumulator of
    the query's gradient, and key and value gradients of all query heads before they are summed.
    """

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        tokens, heads, _ = query.shape
        out = torch.empty_like(query, memory_format=torch.contiguous_format)  # [T, heads, dim]
        log_sum = query.new_empty((heads, tokens), dtype=torch.float32)
        ctx.save_for_backward(query, key, value, out, log_sum)
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        query, key, value, _, log_sum = ctx.saved_tensors
        accumulator = torch.empty_like(query, dtype=torch.float32)
        delta = torch.empty_like(log_sum)
        expanded = [torch.empty_like(query) for _ in range(2 if key.shape != query.shape else 0)]
        grads = tuple(torch.empty_like(x) for x in (query, key, value))
        del accumulator, delta, expanded
        return grads

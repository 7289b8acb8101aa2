"""What a run needs on a GPU, in host memory, on NVMe and on disk: bytes from sizes.

Owns the arithmetic of DeepSpeed 0.19's ZeRO-3 as ds_sft sets it up: which buffer of which precision
exists where, and which of them are alive together. Numbers in, numbers out: no torch, no files.
What offloading takes of host memory is `host_memory`'s; what the model itself keeps is measured
elsewhere (`model.activations`). The constants at the top are the only estimates, and `ASSUMPTIONS`
says them. Sizes are per rank unless the name says node.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from ds_sft.engine import gathering, host_memory
from ds_sft.engine.gathering import EMBEDDING, HEAD, LAYERS
from ds_sft.engine.host_memory import device, rounding
from ds_sft.engine.setup import Setup
from ds_sft.recipe import low_rank

GIB = 2**30
CONTEXT = int(0.6 * GIB)  # CUDA context, cuBLAS workspace, kernels
NETWORK = int(0.5 * GIB)  # NCCL's channels, with more than one rank
FRAGMENTATION = 0.05  # of what comes and goes within a step
PROCESS = 2 * GIB  # host memory of a rank before any state: Python, torch, CUDA, DeepSpeed
UPDATE, EXPORT = "update", "export"
ASSUMPTIONS = (
    f"{CONTEXT / GIB:.1f} GiB of a GPU for the CUDA context, {NETWORK / GIB:.1f} GiB for NCCL with "
    f"more than one rank, {FRAGMENTATION:.0%} of what comes and goes for the allocator; "
    f"{PROCESS / GIB:.0f} GiB of host memory for a process; torch rounds pinned host memory up to "
    "a power of two"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Activations:
    """Bytes that one microbatch of the whole model holds beside its states."""

    kept: int
    """What all layers keep for the backward pass."""
    forward: int
    """Most bytes alive in the forward pass of the layers, `kept` so far included."""
    head: int
    """Most bytes alive in the head, `kept` included."""
    layers: int
    """Most bytes alive in the backward pass of the layers, `kept` included."""
    embedding: int
    """Most bytes alive in the backward pass of the embedding."""
    parked: tuple[int, int] = (0, 0)
    """Layers whose inputs wait in host memory, and bytes of one input."""


def parked(activations: Activations, layers: int, size: int) -> Activations:
    """`activations` with the inputs of `layers` layers in host memory, `size` bytes each.

    Two of them are on the GPU all the same: one that is used, one on its way.
    """
    moved = max(0, layers - 2) * size
    return replace(
        activations, parked=(layers, size), kept=max(0, activations.kept - moved),
        forward=max(0, activations.forward - moved), head=max(0, activations.head - moved),
        layers=max(0, activations.layers - moved),
    )  # fmt: skip


def extrapolated(small: Any, large: Any, num_layers: int) -> Activations:
    """Activations of `num_layers` from two models cut to fewer, which differ by equal layers."""
    ratio = (num_layers - large.num_layers) / (large.num_layers - small.num_layers)

    def at(name: str) -> int:
        one, two = getattr(small, name), getattr(large, name)
        return round(two + ratio * (two - one))

    return Activations(
        kept=at("kept"), forward=at("forward"), head=at("head"), layers=at("layers"),
        embedding=at("embedding"),
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """Bytes of one rank at its peak, by what they are for."""

    phase: str
    """Where the peak is: forward, head, layers, embedding, update or export."""
    parameters: int
    """This rank's part of the weights for computing, and the small ones that are never split."""
    gradients: int
    """This rank's part of the summed gradients."""
    optimizer: int
    """Masters and Adam's moments."""
    activations: int
    """What the layers keep for the backward pass."""
    working: int
    """What the phase computes with on top: a layer, the head's logits, the update's copies."""
    gathered: int
    """Whole weights of the layers at work, and those fetched ahead."""
    buckets: int
    """The reduction bucket and the copies that a reduction makes."""
    slack: int
    """CUDA context, NCCL and the allocator's losses."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(getattr(self, f.name) for f in fields(self) if f.name != "phase")


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """Everything that a configuration needs."""

    gpu: Gpu
    """One rank, at its peak."""
    host_states: int
    """Host memory of a node: states that live there."""
    host_buffers: int
    """Host memory of a node: swap buffers, and what pinning rounds up."""
    host_processes: int
    """Host memory of a node: the processes themselves and one export shard."""
    nvme: int
    """Swap files of a node."""
    checkpoint: int
    """One native checkpoint, on the disk of the run."""
    export: int
    """One bfloat16 export."""

    @property
    def host(self) -> int:
        """Host memory of a node."""
        return self.host_states + self.host_buffers + self.host_processes


def need(setup: Setup, ds_config: Mapping[str, Any], activations: Activations) -> Need:
    """Bytes of a run with the complete `ds_config` (what `engine_config` returns)."""
    setup = setup.at_precision(ds_config)
    zero = {**DEFAULTS, **ds_config["zero_optimization"]}
    host = host_memory.of_rank(setup, zero)
    inputs, size = activations.parked
    here = min(setup.gpus_per_node, setup.world_size)
    home, params = device(zero, "offload_optimizer"), device(zero, "offload_param")
    swapped = (16 if home == "nvme" else 0) + (setup.compute_bytes if params == "nvme" else 0)
    return Need(
        gpu=_gpu(setup, zero, activations),
        host_states=host.states * here,
        host_buffers=(host.buffers + inputs * (size + rounding(size, pinned=True))) * here,
        host_processes=PROCESS * here + min(5 * 10**9, 2 * setup.total),
        nvme=swapped * setup.own * here,
        checkpoint=setup.checkpoint_bytes,
        export=2 * setup.total,
    )


DEFAULTS: dict[str, Any] = {
    "reduce_bucket_size": 500_000_000,
    "sub_group_size": 1_000_000_000,
    "stage3_prefetch_bucket_size": 50_000_000,
    "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 1_000_000_000,
    "stage3_max_reuse_distance": 1_000_000_000,
    "zero_hpz_partition_size": 1,
}
"""DeepSpeed's, where a file says nothing."""


def _gpu(setup: Setup, zero: Mapping[str, Any], activations: Activations) -> Gpu:
    """The phase in which most is alive."""
    phases = [_phase(setup, zero, activations, name) for name in _PHASES]
    return max(phases, key=lambda gpu: gpu.total)


_PHASES = (HEAD, LAYERS, EMBEDDING, UPDATE, EXPORT)


def _phase(setup: Setup, zero: Mapping[str, Any], acts: Activations, phase: str) -> Gpu:
    optimizer_here = device(zero, "offload_optimizer") == "none"
    params_here = device(zero, "offload_param") == "none"
    largest = max(setup.numels.values())
    resident = _resident(setup, zero)
    gathered, kept, working, copies = 0, 0, 0, 0
    if phase in (HEAD, LAYERS, EMBEDDING):
        kept = 0 if phase == EMBEDDING else acts.kept
        working = getattr(acts, phase) - kept
        gathered = _gathered(setup, zero, phase)
        copies = _reduction(setup, zero, layers_only=phase == LAYERS)
        if phase == HEAD and not setup.tied:
            # The head's gradient is reduced after its backward pass, when only that gradient is
            # left of what the head worked with.
            whole = setup.compute_bytes * largest
            if kept + whole + copies > acts.head:
                working = whole
            else:
                copies = 0
        elif phase == HEAD:
            copies = 0  # a tied head's gradient waits for the embedding's
    elif phase == UPDATE and optimizer_here:
        part = setup.part(largest)
        sub_group = min(setup.own, zero["sub_group_size"] + part)
        # The flat gradient of a sub-group; a norm in float64.
        working = max(setup.master_bytes * sub_group, 8 * part)
        if setup.moments:  # gradients projected and reduced, their direction, a root
            working += 4 * 4 * min(low_rank.BUCKET, setup.moments * setup.world_size)
    elif phase == EXPORT:
        working = 8 * largest  # one whole master at a time, and the copy that is written
    moving = kept + working + gathered + copies
    slack = CONTEXT + (NETWORK if setup.world_size > 1 else 0) + FRAGMENTATION * moving
    return Gpu(
        phase=phase,
        parameters=setup.compute_bytes * (setup.own if params_here else 0) + resident,
        gradients=4 * setup.own if optimizer_here else 0,
        optimizer=setup.state_bytes if optimizer_here else 0,
        activations=kept,
        working=working,
        gathered=gathered,
        buckets=setup.reduce_bytes * zero["reduce_bucket_size"] + copies,
        slack=math.ceil(slack),
    )


def _resident(setup: Setup, zero: Mapping[str, Any]) -> int:
    """Bytes of weights that a rank has beside its part: small ones, and hpZ's second partition."""
    if setup.world_size == 1 and device(zero, "offload_param") == "none":
        return 0  # gathering is a view of the only part
    threshold = zero["stage3_param_persistence_threshold"]
    small = sum(n for n in setup.numels.values() if n < threshold)
    group = zero["zero_hpz_partition_size"]
    return setup.compute_bytes * (small + (-(-setup.total // group) if group > 1 else 0))


def _gathered(setup: Setup, zero: Mapping[str, Any], phase: str) -> int:
    if setup.world_size == 1 and device(zero, "offload_param") == "none":
        return 0
    uses = gathering.trace(list(setup.numels), setup.tied)
    elements = gathering.peaks(uses, setup.numels, zero)[phase]
    if setup.world_size > 1:  # a group fetched together is a flat buffer first, then a copy
        elements += min(elements, zero["stage3_prefetch_bucket_size"])
    return setup.compute_bytes * elements


def _reduction(setup: Setup, zero: Mapping[str, Any], layers_only: bool) -> int:
    """Bytes of the copies that one reduction makes beside the bucket.

    Gradients in the bucket are laid out by rank in a copy. One that is larger than the bucket is
    cast to the reduction's precision, and copied too unless it divides by the ranks.
    """
    bucket = zero["reduce_bucket_size"]
    numels = [n for name, n in setup.numels.items() if not layers_only or ".layers." in name]
    largest = max(numels)
    together = setup.reduce_bytes * min(bucket, sum(numels))
    if largest <= bucket:
        return together
    cast = setup.reduce_bytes if setup.reduce_bytes != setup.compute_bytes else 0
    laid_out = setup.reduce_bytes if largest % setup.world_size else 0
    return max(together, (cast + laid_out) * largest)

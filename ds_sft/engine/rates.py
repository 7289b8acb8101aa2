"""How long a step takes: bytes and operations over rates.

Owns a model of one optimizer step: every microbatch is as slow as the slowest of its overlapping
streams (computing, network, PCIe, NVMe), then the update follows. It is an estimate that puts
configurations in an order, not a promise; it knows no latencies. Rates are assumed for a card of
that size, or measured (`fit_measure`). Numbers in, numbers out: no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ds_sft.data.geometry import width_times_context
from ds_sft.engine.host_memory import device
from ds_sft.engine.memory import DEFAULTS, GIB
from ds_sft.engine.setup import Setup

GRADIENT_BYTES = 4  # of the sum over microbatches, per parameter
WEIGHT_FETCHES = 3  # of a microbatch: forward, recomputation, backward


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """What a machine does in a second; bytes unless the name says otherwise."""

    gpu_flops: float
    """bf16 operations of one GPU in matrix products, as reached in training."""
    gpu_memory: float
    """GPU memory, read and written."""
    pcie: float
    """Between host and one GPU, one direction."""
    network: float
    """Between ranks, of one rank."""
    node_network: float
    """Between ranks of one node, of one rank."""
    host_memory: float
    """Host memory of a node, as CPU Adam reaches it."""
    nvme_read: float
    """Swap disk of a node."""
    nvme_write: float
    """Swap disk of a node."""
    measured: tuple[str, ...] = ()
    """Names of the fields that were measured; the others are assumed."""


# Up to so much memory: reached bf16 FLOP/s and memory bytes/s. From 24 GB on, 40 to 50 % of the
# dense peaks in NVIDIA's data sheets (A10G 70, L40S 362, A100 312, H200 989 TFLOP/s).
_CARDS = (
    (20 * GIB, 25e12, 0.3e12),
    (40 * GIB, 35e12, 0.6e12),
    (64 * GIB, 145e12, 0.8e12),
    (100 * GIB, 140e12, 2.0e12),
    (1 << 62, 400e12, 4.0e12),
)
_FAST_LINKS = 64 * GIB  # cards above it are assumed to have NVLink


def assumed(gpu_memory: int, *, several_nodes: bool) -> Rates:
    """Rates of a usual machine with a card of `gpu_memory` bytes."""
    _, flops, memory = next(card for card in _CARDS if gpu_memory <= card[0])
    inside = 100e9 if gpu_memory > _FAST_LINKS else 10e9
    return Rates(
        gpu_flops=flops, gpu_memory=memory, pcie=12e9, host_memory=40e9, nvme_read=3e9,
        nvme_write=1.5e9, network=min(inside, 12e9) if several_nodes else inside,
        node_network=inside,
    )  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What one step computes."""

    microbatches: int
    """Of one rank in an optimizer step."""
    micro_flops: float
    """Of one microbatch, recomputation included."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Seconds:
    """Of one optimizer step."""

    compute: float
    """Computing, all microbatches."""
    exposed: float
    """What network, PCIe and NVMe take longer than computing."""
    update: float
    """The optimizer."""
    bound: str
    """The slowest stream of a microbatch: compute, network, pcie or nvme."""

    @property
    def total(self) -> float:
        """The whole step."""
        return self.compute + self.exposed + self.update


def micro_flops(
    config: Mapping[str, Any], setup: Setup, tokens: int, context: float, again: float = 1.0
) -> float:
    """Operations of a microbatch of `tokens`: 8 a parameter of the layers, 6 of the head.

    `context` is the mean length of a token's document. The share `again` of the layers is computed
    forward twice.
    Source of the terms: PaLM (arXiv:2204.02311), appendix B.
    """
    layers = sum(n for name, n in setup.numels.items() if ".layers." in name)
    attention = width_times_context(config, [context])
    head = 6.0 * config["vocab_size"] * config["hidden_size"]
    return tokens * ((6.0 + 2.0 * again) * (layers + attention) + head)


def seconds(setup: Setup, ds_config: Mapping[str, Any], rates: Rates, work: Work) -> Seconds:
    """Estimated time of one optimizer step."""
    setup = setup.at_precision(ds_config)
    zero = {**DEFAULTS, **ds_config["zero_optimization"]}
    home, params = device(zero, "offload_optimizer"), device(zero, "offload_param")
    own, here = setup.own, min(setup.gpus_per_node, setup.world_size)
    weights = WEIGHT_FETCHES * setup.compute_bytes * own
    streams = {
        "compute": work.micro_flops / rates.gpu_flops,
        "network": _network(setup, zero["zero_hpz_partition_size"], rates),
        # An offloaded sum of gradients is read, added to on the GPU, and written back.
        "pcie": ((weights if params != "none" else 0) + (8 * own if home != "none" else 0))
        / rates.pcie,
        "nvme": weights * here / rates.nvme_read if params == "nvme" else 0.0,
    }
    bound = max(streams, key=lambda name: streams[name])
    compute = work.microbatches * streams["compute"]
    return Seconds(
        compute=compute,
        exposed=work.microbatches * streams[bound] - compute,
        update=_update(setup, home, params, rates, here),
        bound=bound,
    )


def _network(setup: Setup, group: int, rates: Rates) -> float:
    """Seconds of one microbatch's gathers and its reduction.

    With hpZ the weights are gathered over all ranks once a step, which many microbatches hide; the
    other gathers stay in a group of ranks.
    """
    gathers, rate, ranks = WEIGHT_FETCHES * setup.compute_bytes, rates.network, setup.world_size
    if group > 1:
        ranks = group
        rate = rates.node_network if group <= setup.gpus_per_node else rates.network
    return setup.total * (
        gathers * (ranks - 1) / ranks / rate
        + setup.reduce_bytes * (setup.world_size - 1) / setup.world_size / rates.network
    )


def _update(setup: Setup, home: str, params: str, rates: Rates, here: int) -> float:
    own, gradients = setup.own, GRADIENT_BYTES * setup.own
    # Masters and moments are read and written; gradients are read, and clipped in place.
    moved = 2 * (setup.state_bytes + gradients)
    if home == "none":
        return moved / rates.gpu_memory
    time = moved * here / rates.host_memory + (gradients + setup.compute_bytes * own) / rates.pcie
    if home == "nvme":
        time += moved / 2 * here * (1 / rates.nvme_read + 1 / rates.nvme_write)
    if params == "nvme":
        time += setup.compute_bytes * own * here / rates.nvme_write
    return time

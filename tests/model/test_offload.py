"""Inputs in host memory: what comes back, what is held meanwhile, and the buffers."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from ds_sft.model.offload import HostParking

LAYERS, SHAPE = 4, (1, 6, 8)


class Stack:
    """Layers that each double-use their input, checkpointed through a HostParking."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.parking = HostParking(torch.device("cpu"))
        self.weights = [torch.randn(8, 8, requires_grad=True) for _ in range(LAYERS)]
        self.inputs: list[weakref.ref[torch.UntypedStorage]] = []
        self.addresses: list[int] = []

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            self.inputs.append(weakref.ref(hidden.untyped_storage()))
            hidden = self.parking.checkpoint(self._layer(weight), hidden)
        return hidden.square().sum()

    def _layer(self, weight: torch.Tensor):  # type: ignore[no-untyped-def]
        def layer(hidden: torch.Tensor) -> torch.Tensor:
            self.addresses.append(hidden.data_ptr())
            return hidden + (hidden @ weight).tanh()

        return layer

    def buffers(self) -> int:
        return sum(len(kind) for kind in self.parking.free.values())

    def plain(self, hidden: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            hidden = hidden + (hidden @ weight).tanh()
        return hidden.square().sum()


@pytest.fixture
def stack() -> Stack:
    return Stack()


def start() -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(1)) * 1.0


def gradients(loss: torch.Tensor, stack: Stack) -> tuple[torch.Tensor, ...]:
    return torch.autograd.grad(loss, stack.weights)


def test_gradients_are_bit_equal(stack: Stack) -> None:
    want = gradients(stack.plain(start()), stack)
    got = gradients(stack(start()), stack)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def test_between_forward_and_backward_only_the_newest_input_is_on_the_device(stack: Stack) -> None:
    loss = stack(start())
    gc.collect()
    assert [ref() is not None for ref in stack.inputs] == [False] * (LAYERS - 1) + [True]
    loss.backward()


def test_the_newest_input_is_used_where_it_is(stack: Stack) -> None:
    loss = stack(start())
    forward, stack.addresses = stack.addresses, []
    gradients(loss, stack)
    assert len(stack.addresses) == LAYERS
    assert stack.addresses[0] == forward[-1]


def test_damage_in_a_buffer_reaches_the_gradients(stack: Stack) -> None:
    """The values of all but the newest really travel through host memory."""
    want = gradients(stack.plain(start()), stack)
    loss = stack(start())
    newest = stack.parking._newest
    assert newest is not None
    parked = newest()
    assert parked is not None
    assert parked.below is not None
    below = parked.below()
    assert below is not None
    below.host.add_(1.0)
    got = gradients(loss, stack)
    assert not torch.equal(got[LAYERS - 2], want[LAYERS - 2])
    assert torch.equal(got[LAYERS - 1], want[LAYERS - 1])


def test_the_next_microbatch_uses_the_same_buffers(stack: Stack) -> None:
    seen = set()
    for _ in range(3):
        stack(start()).backward()
        gc.collect()
        assert stack.buffers() == LAYERS
        seen |= {b.data_ptr() for kind in stack.parking.free.values() for b in kind}
    assert len(seen) == LAYERS


def test_a_graph_that_is_dropped_gives_its_buffers_back(stack: Stack) -> None:
    loss = stack(start())
    assert stack.buffers() == 0
    del loss
    gc.collect()
    assert stack.buffers() == LAYERS
    want = gradients(stack.plain(start()), stack)
    assert all(
        torch.equal(a, b) for a, b in zip(gradients(stack(start()), stack), want, strict=True)
    )


def test_two_graphs_at_a_time_do_not_share_buffers(stack: Stack) -> None:
    want = [gradients(stack.plain(start() * k), stack) for k in (1, 2)]
    losses = [stack(start() * k) for k in (1, 2)]
    got = [gradients(loss, stack) for loss in losses]
    for one, other in zip(got, want, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_backward_twice_over_one_graph_is_possible(stack: Stack) -> None:
    loss = stack(start())
    first = torch.autograd.grad(loss, stack.weights, retain_graph=True)
    second = torch.autograd.grad(loss, stack.weights)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_without_gradients_nothing_is_copied(stack: Stack) -> None:
    with torch.no_grad():
        stack(start())
    assert stack.buffers() == 0
    assert stack.parking._newest is None

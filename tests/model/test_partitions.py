"""Parts of parameters in DeepSpeed's swap files, with a stand-in for its swapper."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.swap_tensor.partitioned_param_swapper import PartitionedParamStatus

from ds_sft.model.partitions import fetch_once, fill_part, resident_sub_groups


class Swapper:
    def __init__(self) -> None:
        self.buffer = torch.zeros(3, dtype=torch.bfloat16)
        self.asked: list[list[int]] = []
        self.written: list[Any] = []

    def get_buffer(self, param: Any, numel: int) -> torch.Tensor:
        assert numel == 3
        return self.buffer

    def swap_out_and_release(self, params: list[Any]) -> None:
        self.written += params

    def swap_in(self, params: list[Any], async_op: bool = True) -> bool:
        self.asked.append([param.ds_id for param in params])
        return async_op


def parameter(status: PartitionedParamStatus, swapper: Swapper | None = None) -> Any:
    part = torch.zeros(3, dtype=torch.bfloat16)
    part.status = status  # type: ignore[attr-defined]
    return SimpleNamespace(ds_tensor=part, nvme_swapper=swapper)


def test_a_part_in_memory_is_filled_there_and_one_in_a_file_through_the_swapper() -> None:
    values = torch.tensor([1.0, 2.0, 3.0])
    here = parameter(PartitionedParamStatus.AVAILABLE)
    fill_part(here, values)
    assert here.ds_tensor.tolist() == [1.0, 2.0, 3.0]
    swapper = Swapper()
    away = parameter(PartitionedParamStatus.NOT_AVAILABLE, swapper)
    fill_part(away, values)
    assert swapper.buffer.tolist() == [1.0, 2.0, 3.0]
    assert swapper.written == [away]
    assert away.ds_tensor.tolist() == [0.0, 0.0, 0.0]


def test_a_parameter_that_is_listed_twice_is_swapped_in_once_and_in_order() -> None:
    swapper = Swapper()
    model = torch.nn.Linear(2, 2)
    model.weight.nvme_swapper = swapper  # type: ignore[assignment]
    fetch_once(model)
    head, other = SimpleNamespace(ds_id=24), SimpleNamespace(ds_id=3)
    assert swapper.swap_in([head, other, head], async_op=False) is False
    assert swapper.asked == [[24, 3]]


def test_each_swapped_sub_group_is_written_back_before_the_next_is_read() -> None:
    said: list[str] = []
    zero = SimpleNamespace(
        fp32_partitioned_groups_flat=["a", "b", "c"],
        _swappable_optimizer_subgroup=lambda index: index != 1,
        _optimizer_states_and_gradient_swap_in=lambda index: said.append(f"in {index}"),
        _optimizer_states_and_gradient_swap_out=lambda index: said.append(f"out {index}"),
    )
    for index, flat in resident_sub_groups(zero):
        said.append(f"{index}={flat}")
    assert said == ["in 0", "0=a", "out 0", "1=b", "in 2", "2=c", "out 2"]

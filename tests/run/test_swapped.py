"""What a checkpoint holds of swapped state, from swap files written by hand."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ds_sft.run.swapped import full_master, no_copy_of_swap_files, with_swapped

NUMEL = 1000


def swapped(folder: Path) -> tuple[Any, dict[str, Any], dict[str, torch.Tensor]]:
    """A swapper with one sub-group in files and one in memory, its state dict, and the values."""
    values = {key: torch.randn(NUMEL) for key in ("master", "exp_avg", "exp_avg_sq")}
    empty = {key: torch.empty(0) for key in values}
    contexts = []
    for key, value in values.items():
        file = folder / f"{key}.swp"
        file.write_bytes(value.numpy().tobytes() + bytes(24))  # aligned: longer than the values
        contexts.append(SimpleNamespace(compute_tensor=empty[key], swap_path=str(file)))
    info = SimpleNamespace(tensors=contexts, numel=lambda: NUMEL)
    zero = SimpleNamespace(optimizer_swapper=SimpleNamespace(swap_params_info={"0_1": info}))
    moments = {key: empty[key] for key in ("exp_avg", "exp_avg_sq")}
    resident = {"step": 7, "exp_avg": torch.ones(3), "exp_avg_sq": torch.ones(3)}
    adam = {"state": {0: {"step": 7, **moments}, 1: resident}, "param_groups": []}
    inner = {
        "optimizer_state_dict": adam,
        "fp32_flat_groups": [empty["master"], torch.zeros(3)],
        "partition_count": 2,
    }
    return zero, {"optimizer_state_dict": inner, "ds_version": "x"}, values


def test_files_stand_in_for_empty_tensors_and_the_rest_is_as_it_was(tmp_path: Path) -> None:
    zero, states, values = swapped(tmp_path)
    torch.save(with_swapped(zero, states), tmp_path / "saved.pt")
    saved = torch.load(tmp_path / "saved.pt")
    inner = saved["optimizer_state_dict"]
    state = inner["optimizer_state_dict"]["state"]
    assert torch.equal(inner["fp32_flat_groups"][0], values["master"])
    assert torch.equal(state[0]["exp_avg"], values["exp_avg"])
    assert torch.equal(state[0]["exp_avg_sq"], values["exp_avg_sq"])
    assert state[0]["step"] == state[1]["step"] == 7
    assert torch.equal(state[1]["exp_avg"], torch.ones(3))
    assert torch.equal(inner["fp32_flat_groups"][1], torch.zeros(3))
    assert (inner["partition_count"], saved["ds_version"]) == (2, "x")


def test_what_deepspeed_goes_on_with_is_not_touched(tmp_path: Path) -> None:
    zero, states, _ = swapped(tmp_path)
    with_swapped(zero, states)
    inner = states["optimizer_state_dict"]
    assert inner["fp32_flat_groups"][0].numel() == 0
    assert inner["optimizer_state_dict"]["state"][0]["exp_avg"].numel() == 0


def test_other_files_and_other_optimizers_pass_unchanged(tmp_path: Path) -> None:
    zero, states, _ = swapped(tmp_path)
    model_states = {"module": {}}
    assert with_swapped(zero, model_states) is model_states
    assert with_swapped(SimpleNamespace(optimizer_swapper=None), states) is states


@pytest.mark.parametrize("damage", ["gone", "short"])
def test_a_swap_file_that_is_not_whole_fails_the_save(tmp_path: Path, damage: str) -> None:
    zero, states, _ = swapped(tmp_path)
    file = tmp_path / "exp_avg.swp"
    if damage == "gone":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[: NUMEL * 2])
    with pytest.raises(RuntimeError):
        with_swapped(zero, states)


def test_deepspeed_copies_swap_files_again_after_the_save() -> None:
    class Engine:
        def zero_nvme_offload_optimizer(self) -> bool:
            return True

    engine = Engine()
    with no_copy_of_swap_files(engine):
        assert not engine.zero_nvme_offload_optimizer()
    assert engine.zero_nvme_offload_optimizer()


def test_a_master_for_an_export_is_read_from_its_own_place_in_the_file(tmp_path: Path) -> None:
    """Not through DeepSpeed, which would read the whole sub-group: the stand-in has no way to."""
    zero, _, values = swapped(tmp_path)
    (info,) = zero.optimizer_swapper.swap_params_info.values()
    gathered: list[torch.Tensor] = []

    def all_gather(parameter: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
        gathered.append(part)
        return torch.cat([part, part])

    zero.fp32_partitioned_groups_flat = [info.tensors[0].compute_tensor]
    zero.grad_position = {"weight": [0, 200, 300]}
    zero.get_param_id = lambda parameter: "weight"
    zero._swappable_optimizer_subgroup = lambda group: group == 0
    zero._fp32_state_allgather = all_gather
    weight = torch.nn.Parameter(torch.empty(0))
    weight._z3_optimizer = zero  # type: ignore[attr-defined]
    whole = full_master(weight)
    assert torch.equal(gathered[0], values["master"][200:500])
    assert torch.equal(whole, torch.cat([gathered[0], gathered[0]]))

"""A swap file has its blocks before anything is written into it, or the run ends with a line."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ds_sft.engine.aio import reserve, reserving
from ds_sft.errors import ConfigError


def test_a_reserved_file_has_its_blocks_and_keeps_what_is_in_it(tmp_path: Path) -> None:
    file = tmp_path / "a.swp"
    file.write_bytes(b"kept")
    reserve(str(file), 1 << 20)
    assert file.stat().st_size == 1 << 20
    assert file.stat().st_blocks * 512 >= 1 << 20
    assert file.read_bytes()[:5] == b"kept\0"
    reserve(str(file), 1 << 10)
    assert file.stat().st_size == 1 << 20


def test_a_full_disk_is_said_in_one_line_before_the_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    written: list[str] = []
    swap_out = reserving(lambda handle, tensors, paths: written.extend(paths))
    tensor = SimpleNamespace(numel=lambda: 1 << 18, element_size=lambda: 4)
    swap_out(None, [tensor], [str(tmp_path / "one")])
    monkeypatch.setattr(os, "posix_fallocate", full)
    swap_out(None, [tensor], [str(tmp_path / "one")])  # has its blocks
    with pytest.raises(ConfigError, match="No space left on device: make room") as caught:
        swap_out(None, [tensor], [str(tmp_path / "two")])
    assert "\n" not in str(caught.value)
    assert written == [str(tmp_path / "one")] * 2


def test_deepspeed_writes_swap_files_only_through_the_function_that_is_replaced() -> None:
    """All places that name it; a new one in another version would write without a reservation."""
    import deepspeed

    runtime = Path(deepspeed.__file__).parent / "runtime"
    using = {
        path.stem for path in runtime.rglob("*.py") if "pwrite(" in path.read_text(encoding="utf-8")
    }
    assert using == {"utils"} | (using & {"fast_file_writer"})
    named = {
        path.stem
        for path in (runtime / "swap_tensor").glob("*.py")
        if "import" in path.read_text() and " swap_out_tensors" in path.read_text()
    }
    assert named == {
        "async_swapper", "optimizer_utils", "partitioned_optimizer_swapper",
        "partitioned_param_swapper", "pipelined_optimizer_swapper", "utils",
    }  # fmt: skip

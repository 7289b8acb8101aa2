"""What the allocators of a CUDA machine raise is told apart, and measured by what they count."""

from __future__ import annotations

import pytest

from ds_sft.engine import used_memory
from ds_sft.run import doctor_checks

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
MORE_THAN_THERE_IS = 1 << 46


def test_a_full_gpu_is_named_with_allocated_reserved_and_peak() -> None:
    held = torch.empty(256 << 20, dtype=torch.uint8, device="cuda")
    with pytest.raises(torch.OutOfMemoryError) as caught:
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8, device="cuda")
    assert used_memory.ran_out(caught.value) == "gpu"
    assert used_memory.peak_memory_gb() >= held.numel() / 1e9
    said = used_memory.measured()
    for word in ("GB allocated", "GB reserved", "peak", "of "):
        assert word in said


def test_page_locked_memory_that_is_not_there_is_no_other_error() -> None:
    with pytest.raises((RuntimeError, MemoryError)) as caught:
        torch.empty(MORE_THAN_THERE_IS, dtype=torch.uint8, pin_memory=True)
    assert used_memory.ran_out(caught.value) in ("cuda", "host")


def test_the_doctor_sees_the_gpu_and_a_kernel_for_it() -> None:
    gpu = doctor_checks.gpu()
    assert gpu.state == "ok"
    assert torch.cuda.get_device_properties(0).name in gpu.detail
    assert "sdpa" not in doctor_checks.attention().detail

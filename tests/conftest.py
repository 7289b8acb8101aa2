from collections.abc import Iterator
from pathlib import Path

import harness
import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden untied tiny Qwen3 (float32) in Hugging Face format, with a tokenizer."""
    return harness.copy_tiny_model(tmp_path_factory.mktemp("model") / "untied")


@pytest.fixture(scope="session")
def tiny_tied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden tied tiny Qwen3."""
    return harness.copy_tiny_model(tmp_path_factory.mktemp("model") / "tied", "tied")


@pytest.fixture(scope="session")
def tiny_data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The golden packs as a packed data set, max_seq_len 64."""
    return harness.write_golden_data(tmp_path_factory.mktemp("data") / "packed")


@pytest.fixture
def process_group() -> Iterator[None]:
    """A group of this one process, over which real collectives run."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()

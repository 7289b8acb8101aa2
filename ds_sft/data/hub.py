"""What the Hub's cache on this machine holds, and whether the Hub has a name.

The Hub is asked once, with a short wait: a mistyped path looks like a Hub id, and the libraries
that load models and data sets try a Hub that cannot be reached for up to a minute. Left to others:
what is loaded (`tokenizer`, `tables`, `model_files`).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ds_sft.data.records import shorten

TIMEOUT_S = 5
"""For connecting, and for the answer: a network that drops packets gives no error of its own."""

Kind = Literal["model", "dataset"]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the Hub says of a name."""

    state: Literal["there", "absent", "unreachable"]
    """`there` also where the Hub says neither: the loader then has the word."""
    reason: str = ""
    """Why the Hub cannot be asked, in a few words."""


def ask(kind: Kind, name: str) -> Answer:
    """Whether there is such a model or data set, by its id. Honours HF_ENDPOINT and proxies."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        OfflineModeIsEnabled,
        RepositoryNotFoundError,
    )

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=TIMEOUT_S)
    except GatedRepoError:
        return Answer("there")
    except (RepositoryNotFoundError, HFValidationError):
        return Answer("absent")
    except OfflineModeIsEnabled:
        return Answer("unreachable", "HF_HUB_OFFLINE is set")
    except HfHubHTTPError:
        return Answer("there")
    # Any way in which a network can fail.
    except Exception as error:
        return Answer("unreachable", shorten(str(error) or type(error).__name__, 100))
    return Answer("there")


def cached_revision(repository: str) -> Path | None:
    """Directory of the Hub's `main` revision in the cache, whole or not; None if there is none."""
    root = hub_cache() / f"models--{repository.replace('/', '--')}"
    try:
        commit = (root / "refs" / "main").read_text(encoding="utf-8").strip()
    except OSError:
        return None
    snapshot = root / "snapshots" / commit
    return snapshot if commit and snapshot.is_dir() else None


def hub_cache() -> Path:
    """The Hub's cache directory, as huggingface_hub finds it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(name):
            return Path(os.environ[name]).expanduser()
    return hub_home() / "hub"


def hub_home() -> Path:
    """Where the Hub's libraries keep their caches."""
    home = os.environ.get("HF_HOME")
    if not home:
        home = os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    return Path(home).expanduser()

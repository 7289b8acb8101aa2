"""Whether the Hub has a name, asked once and with a short wait.

A mistyped path looks like a Hub id, and the libraries that load models and data sets try a Hub that
cannot be reached for up to a minute. So it is asked here first. Left to others: what is loaded, and
what is in the cache (`tokenizer`, `tables`).
"""

from __future__ import annotations

from dataclasses import dataclass
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

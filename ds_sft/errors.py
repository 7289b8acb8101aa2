"""The errors that ds_sft raises on purpose, as one tree.

    DsSftError
    ├── ConfigError        a flag, a recipe or a DeepSpeed JSON is wrong
    ├── DataError          the chats or the packed data set are wrong
    ├── CheckpointError    a checkpoint or an export cannot be used, or cannot be written
    │   └── SavingFailed   ... several times in a row: the run stops
    ├── PreflightError     a start-up proof failed: machine or library do not do what we rely on
    ├── OutOfMemory        a rank needs more memory than it has, or than its budget
    └── TrainingDiverged   the loss or the gradient is not finite

`exit_code` is what the process ends with. 2 means that the person has to change something before
starting again, and is reported as one line without a traceback; 1 means that the run itself failed.
"""

from __future__ import annotations


class DsSftError(Exception):
    """Base of every error raised on purpose; the message is one line: what is wrong, what to do."""

    exit_code = 2


class ConfigError(DsSftError):
    """A flag, a recipe or a DeepSpeed JSON is wrong."""


class DataError(DsSftError):
    """The chats or the packed data set are wrong."""


class CheckpointError(DsSftError):
    """A checkpoint or an export cannot be used, or cannot be written."""


class SavingFailed(CheckpointError):
    """Native checkpoints could not be written, several times in a row."""

    exit_code = 1


class PreflightError(DsSftError):
    """A start-up proof failed: the machine or a library does not do what we rely on."""


class OutOfMemory(DsSftError):
    """A rank needs more memory than it has, or than --memory-budget-gb; the same start fails again.

    Weights of completed steps are as good as ever.
    """


class TrainingDiverged(DsSftError):
    """The loss or the gradient is not finite; raised before any weight is changed."""

    exit_code = 1

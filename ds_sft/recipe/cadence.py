"""When something is saved: Levanter's labels, and its timer for temporary checkpoints.

`completed` counts optimizer steps done; the label on disk is `completed - 1`. Exports and native
checkpoints are due when `label >= 1 and label % every == 0`, and at the last label (Levanter skips
the last native checkpoint and a run of one step; people want both results). Source: Levanter
`callbacks/_core.py`, `checkpoint.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from ds_sft.recipe.recipe import Recipe


@dataclass(frozen=True, slots=True, kw_only=True)
class Due:
    """What has to be written after a step."""

    label: int
    """Number in the directory names."""
    export: bool
    """A Hugging Face export."""
    checkpoint: bool
    """A permanent native checkpoint."""
    temporary: bool
    """A temporary native checkpoint (never together with a permanent one)."""


def is_due(label: int, num_steps: int, every: int) -> bool:
    """Whether the hook with period `every` fires at `label` of a run of `num_steps`."""
    return label == num_steps - 1 or (label >= 1 and label % every == 0)


def due_after(completed: int, num_steps: int, recipe: Recipe, *, timer_fired: bool) -> Due:
    """What is due once `completed` optimizer steps are done."""
    label = completed - 1
    checkpoint = is_due(label, num_steps, recipe.steps_per_checkpoint)
    return Due(
        label=label,
        export=is_due(label, num_steps, recipe.steps_per_hf_export),
        checkpoint=checkpoint,
        temporary=timer_fired and not checkpoint and label >= 1,
    )


def labels(num_steps: int, every: int) -> list[int]:
    """Every label at which a hook of period `every` fires in a run of `num_steps`.

    >>> labels(2000, 500)
    [500, 1000, 1500, 1999]
    """
    return sorted({*range(every, num_steps, every), num_steps - 1})


def timer_fired(now: float, last_save: float, minutes: float) -> bool:
    """Levanter's timer: due once `minutes` passed since any save; the times are in seconds."""
    return minutes > 0 and now - last_save >= minutes * 60

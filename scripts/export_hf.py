#!/usr/bin/env python3
"""Turn a native checkpoint into a Hugging Face model directory.

    python scripts/export_hf.py --checkpoint RUN/checkpoints/step-1999 --out RUN/hf/step-1999

The same code as `ds-sft export`, for machines where ds_sft is a checkout and not installed.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import tyro

from ds_sft.errors import DsSftError
from ds_sft.run.commands import ExportFlags, export


def main() -> int:
    """Parse the flags, export, and turn an expected error into one line."""
    flags = tyro.cli(ExportFlags)
    try:
        export(flags)
    except DsSftError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())

#!/usr/bin/env python3
"""Build DeepSpeed's compiled operators once, in this one process, before anything needs them.

    python scripts/build_ops.py cpu_adam async_io

The same code as `ds-sft doctor --build`, for machines where ds_sft is a checkout and not installed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from ds_sft.cli import reporting
from ds_sft.engine.ops import BUILDERS, build_all


def main() -> None:
    """Clear stale locks, then build each operator that was asked for."""
    parser = argparse.ArgumentParser(description="Build DeepSpeed's operators ahead of use.")
    parser.add_argument("ops", nargs="+", choices=sorted(BUILDERS))
    with reporting():
        build_all(parser.parse_args().ops)


if __name__ == "__main__":
    main()

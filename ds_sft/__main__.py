"""`python -m ds_sft` is the `ds-sft` command."""

from ds_sft.cli import main

if __name__ == "__main__":
    main()

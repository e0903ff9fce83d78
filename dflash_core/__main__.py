"""`python -m dflash_core`."""

from dflash_core.cli import exit_process, main

if __name__ == "__main__":
    exit_process(main())

"""The laptop half: deploy, launch and watch DFlash training inside a container.

Never imports torch or `dflash_core`; the two halves meet in files only (docs/formats.md).
"""

__version__ = "0.1.0"

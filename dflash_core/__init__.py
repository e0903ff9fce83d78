"""Training, evaluation and export of DFlash drafters. Importing the package itself loads no torch."""

__version__ = "0.1.0"

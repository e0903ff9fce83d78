"""Stands in for the trainer in tests of runs: real processes that do what run.yaml says."""

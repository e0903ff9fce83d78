"""Runs: launching, states and reasons, logs, stopping, and copying results back."""

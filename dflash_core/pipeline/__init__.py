"""Threads that turn batches into features and features into gradients."""

"""Triton kernels of the drafter's step, each beside a few lines of torch that say what it computes."""

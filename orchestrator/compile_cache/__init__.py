"""Compile caches as things one owns: looked at, saved to this machine, put into a fresh target, removed when told to.

status     the caches of a target, and what each recorded warm-up is still worth
archive    a saved cache on this machine: an archive and its manifest
transfer   save and restore
removal    which caches a `dfo cache prune` means, and their removal
"""

"""Tests against the Proxmox bench (tests/bench/README.md says what its fixtures are) and against a fake of the API."""

from bench.fixtures import bench_machine, ct, faulty_ssh, lab, node, pytest_collection_modifyitems, relay
from support.fake_api import connect, guest, pve

__all__ = [
    "bench_machine",
    "connect",
    "ct",
    "faulty_ssh",
    "guest",
    "lab",
    "node",
    "pve",
    "pytest_collection_modifyitems",
    "relay",
]

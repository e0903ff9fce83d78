"""`pvecm status` of the bench: whether the cluster has a quorum."""

import sys

from . import world


def main():
    if sys.argv[1:] != ["status"]:
        world.warn("ERROR: the bench knows only 'pvecm status'")
        raise SystemExit(255)
    quorate = "No" if world.switch("no-quorum") is not None else "Yes"
    print("Quorum information\n------------------")
    print(f"Nodes:            {1 if quorate == 'No' else 2}")
    print(f"Quorate:          {quorate}")

"""`pveversion` of the bench."""

import sys


def main():
    print("pve-manager/9.2.11/0000000000000000 (running kernel: 7.0.0-1-pve)")
    if sys.argv[1:] in (["-v"], ["--verbose"]):
        print("pve-container: 6.1.10\nlxc-pve: 7.0.0-1")

"""How an argv survives the way to a program: quoted once for the login shell, and with a receipt for its status.

The other side runs `sh -c RECEIPT name VARIABLE=… argv…`. The script prints the status of the command as a last line
on stderr, which tells the command's own 255 from one of ssh, sudo or pct, and survives an lxc-attach that loses it
(lxc#4203), and its own process id as a first one. stdout and stdin are the command's alone.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

#: A status above 128 is a signal for the shell; higher ones than this are not.
_LAST_SIGNAL = 64
RECEIPT = r"""printf '\036%s pid %d\n' "$0" $$ >&2; env "$@"; s=$?; printf '\036%s %d\n' "$0" "$s" >&2; exit $s"""
#: Perl's pct damages every byte above 127 of its argv in the C locale; Python would guess.
LOCALE: Mapping[str, str] = {"LC_ALL": "C.UTF-8"}


def with_receipt(argv: Sequence[str], name: str, environment: Mapping[str, str] = LOCALE) -> tuple[str, ...]:
    """An argv that runs `argv` with these variables and leaves a receipt called `name`."""
    assert argv and argv[0] and not argv[0].startswith("-") and "=" not in argv[0], "this is no program"
    assert all("\0" not in word for word in argv), "no argv can hold a NUL"
    return ("sh", "-c", RECEIPT, name, *(f"{k}={v}" for k, v in environment.items()), *argv)


def read_receipt(name: str, stderr: bytes) -> tuple[int, bytes] | None:
    """The status in the last receipt called `name`, negative for a signal, and stderr without it; None without one."""
    mark = re.escape(name.encode())
    receipts = list(re.finditer(rb"\x1e%s ([0-9]{1,3})\n" % mark, stderr))
    if not receipts:
        return None
    found = receipts[-1]
    code = int(found[1])
    status = 128 - code if 128 < code <= 128 + _LAST_SIGNAL else code
    rest = stderr[: found.start()] + stderr[found.end() :]
    return status, re.sub(rb"\x1e%s pid [0-9]+\n" % mark, b"", rest, count=1)


def as_shell_says(status: int) -> int:
    """The exit status of a shell that passes this status on: 128+N for signal N."""
    return status if status >= 0 else 128 - status


def read_pid(name: str, stderr: bytes) -> int | None:
    """The process group of the command, as long as stderr has not pushed it out."""
    found = re.search(rb"\x1e%s pid ([0-9]{1,10})\n" % re.escape(name.encode()), stderr)
    return int(found[1]) if found else None


def without_marks(stderr: bytes) -> bytes:
    """stderr for people, whoever's marks are left in it."""
    return re.sub(rb"\x1e[a-z-]+ (pid )?[0-9]+\n", b"", stderr)


def shell_line(argv: Sequence[str]) -> str:
    """For the login shell, which reads it once."""
    return shlex.join(argv)

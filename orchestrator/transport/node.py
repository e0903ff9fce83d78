"""The Proxmox VE node: `pct`, a private folder, and what pct's words mean."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager

from orchestrator.errors import DfoError, PreflightError
from orchestrator.transport.base import Completed, Stream
from orchestrator.transport.link import GOODBYE, Link
from orchestrator.transport.pct_words import Asker, explain
from orchestrator.transport.shell import RemoteTransport
from orchestrator.transport.streaming import IdleStdin, too_late

#: One pct call takes 0.6 s; this is for a node that is busy (seconds).
ASK_DEADLINE = 60.0
#: Where private folders are made: on the disk, so that they do not take memory as /tmp may.
FOLDERS = "/var/tmp"
_FOLDER = re.compile(rb"^(/var/tmp/dfo-[A-Za-z0-9]{10})$", re.MULTILINE)
#: Lives as long as its stdin: if the laptop dies or the line breaks, sshd closes it, and the folder is gone. A folder
#: that outlived its guard (a power cut) is known by its free lock, and removed by the next guard. It is renamed before
#: it goes: a file that an orphan of ours makes at that moment would keep it alive.
_GUARD = (
    f"find {FOLDERS} -maxdepth 1 -type d -name 'dfo-??????????*' -user \"$(id -u)\" -mmin +1 "
    "-exec flock -n {} rm -rf {} \\; 2>/dev/null; "
    f'd=$(mktemp -d {FOLDERS}/dfo-XXXXXXXXXX) || exit; exec 9<"$d"; flock 9; '
    'trap \'mv "$d" "$d.gone" && rm -rf "$d.gone"\' EXIT; trap \'exit 1\' HUP INT TERM PIPE; '
    'printf "\\n%s\\n" "$d"; cat >/dev/null'
)
_WRITE = 'umask 077; set -C; cat > "$1"'
_VERSION = "PATH=$PATH:/usr/sbin:/sbin; pveversion"
_ELSEWHERE = 'ls -d /etc/pve/nodes/*/lxc/"$1".conf'
_DISK = {
    "No space left on device": ("disk_full", "free space there, or let the archive go past it (`stream`)"),
    "Disk quota exceeded": ("disk_full", "free space there, or let the archive go past it (`stream`)"),
    "Read-only file system": ("read_only", "look at the disk of the node: `dmesg`"),
    "Permission denied": ("not_permitted", "correct the rights of the folder"),
}


class Node:
    """One node, reached through one link. `sudo`: pct, and nothing else, runs with `sudo -n`."""

    def __init__(self, link: Link, *, sudo: bool = False, pct: str = "/usr/sbin/pct") -> None:
        self.link = link
        self._host = RemoteTransport(link)
        self._pct = pct
        self._sudo = sudo

    @property
    def label(self) -> str:
        return self.link.label

    @property
    def pct_command(self) -> tuple[str, ...]:
        """How pct is called here, by its full path: a user's PATH has no /usr/sbin."""
        return (*(("sudo", "-n", "--") if self._sudo else ()), self._pct)

    def run(self, argv: Sequence[str], *, stdin: Iterable[bytes] = (), deadline: float) -> Completed:
        """Run on the node as the login user. An exit status is no error."""
        return self._host.run(argv, stdin=stdin, deadline=deadline)

    def pct(self, *words: str, stdin: Iterable[bytes] = (), deadline: float) -> Completed:
        """`pct words…` as root. An exit status is no error, and 0 is no proof: `pct push` and `pull` lie."""
        return self.run((*self.pct_command, *words), stdin=stdin, deadline=deadline)

    def failed(self, vmid: int, ended: Completed) -> DfoError:
        """The error that a pct call for a container stands for, with the node that has it if this one does not."""
        return explain(Asker(self.label, self._pct, self._sudo), vmid, ended, lambda: self._elsewhere(vmid))

    def version(self) -> str | None:
        """Of Proxmox VE, such as `9.2.11`; None where nothing says it."""
        said = self.run(("sh", "-c", _VERSION), deadline=ASK_DEADLINE).stdout.decode(errors="replace")
        found = re.search(r"^pve-manager/([0-9][0-9.]*)", said, re.MULTILINE)
        return found[1] if found else None

    def status(self, vmid: int) -> str:
        """`running` or `stopped`. Raises PreflightError `container_missing`, `not_permitted`, …"""
        answer = self._ask(vmid, "status")
        found = re.search(r"^status: ([a-z]+)$", answer, re.MULTILINE)
        if found is None:
            raise self._nonsense(vmid, "status", answer)
        return found[1]

    def config(self, vmid: int) -> dict[str, str]:
        """`pct config` by key (`hostname`, `lock`, `unprivileged`, `dev0`, …); raw `lxc.*` lines are left out."""
        lines = self._ask(vmid, "config").splitlines()
        pairs = (line.partition(": ") for line in lines if not line.startswith("lxc"))
        return {key: value for key, colon, value in pairs if colon}

    def push(self, vmid: int, source: str, destination: str, *, deadline: float) -> str:
        """`pct push` of a file of the node to an absolute path inside. Returns what pct said, lock chatter left out.

        Raises what `failed` makes of a non-zero exit. Silence and exit 0 prove nothing: compare a hash inside.
        """
        assert source.startswith("/") and destination.startswith("/"), "pct takes relative paths from anywhere"
        ended = self.pct("push", str(vmid), source, destination, deadline=deadline)
        if ended.returncode != 0:
            raise self.failed(vmid, ended)
        said = ended.stderr.decode(errors="replace").replace("trying to acquire lock...", "").strip()
        return said.removeprefix("OK").strip()

    @contextmanager
    def private_folder(self) -> Iterator[str]:
        """An empty folder on the node that only the login user can read, gone after the block, whatever happens.

        Raises PreflightError `disk_full` and the like.
        """
        stdin = IdleStdin()
        with self._host.stream(("sh", "-c", _GUARD), stdin=stdin) as guard:
            try:
                yield self._folder_of(guard)
            finally:
                stdin.end()
                with contextlib.suppress(DfoError):
                    guard.finish(GOODBYE)

    def _folder_of(self, guard: Stream) -> str:
        """What mktemp says, behind whatever a login profile says first."""
        limit = time.monotonic() + ASK_DEADLINE
        said = b""
        for chunk in guard:
            said += chunk
            if found := _FOLDER.search(said):
                return found[1].decode()
            if time.monotonic() > limit:
                raise too_late(("mktemp",), ASK_DEADLINE, f"`{self.label}` makes no folder")
        raise self._cannot_write(FOLDERS, guard.finish())

    def put(self, path: str, chunks: Iterable[bytes], *, deadline: float) -> None:
        """Write a new file (mode 0600) on the node. Raises PreflightError `disk_full`, `read_only`, `not_permitted`."""
        ended = self.run(("sh", "-c", _WRITE, "put", path), stdin=chunks, deadline=deadline)
        if ended.returncode != 0:
            raise self._cannot_write(path, ended)

    def _cannot_write(self, path: str, ended: Completed) -> PreflightError:
        said = ended.last_words
        kind, fix = next((told for sign, told in _DISK.items() if sign in said), ("remote_failed", "look at the node"))
        return PreflightError(kind, f"cannot write {path} on `{self.label}`", why=said, fix=fix)

    def _ask(self, vmid: int, word: str) -> str:
        ended = self.pct(word, str(vmid), deadline=ASK_DEADLINE)
        if ended.returncode != 0:
            raise self.failed(vmid, ended)
        return ended.stdout.decode(errors="replace")

    def _nonsense(self, vmid: int, word: str, answer: str) -> PreflightError:
        return PreflightError(
            "remote_failed",
            f"`pct {word} {vmid}` on `{self.label}` makes no sense",
            why=f"it says: {answer.strip()[:200] or 'nothing'}",
            fix="run it by hand there; if it looks right, report it",
        )

    def _elsewhere(self, vmid: int) -> str | None:
        """The node of the cluster that has the container, as far as the login user may know."""
        with contextlib.suppress(DfoError):
            listed = self.run(("sh", "-c", _ELSEWHERE, "where", str(vmid)), deadline=ASK_DEADLINE).stdout
            if found := re.search(rb"/etc/pve/nodes/([A-Za-z0-9.-]+)/lxc/", listed):
                return found[1].decode()
        return None

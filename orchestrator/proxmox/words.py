"""What the API says when it refuses or fails, and what that means.

Statuses are few and say little: a container that is not there is a 500, and so is one that is locked. The text is in
the reason phrase, which proxmoxer keeps as `content`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import requests
from proxmoxer import ResourceException
from urllib3.exceptions import NameResolutionError, NewConnectionError, ProtocolError, ReadTimeoutError

from orchestrator.errors import ConnectError, DeadlineError, DfoError, LockError, PreflightError
from orchestrator.proxmox.rights import REFUSAL, forbidden
from orchestrator.proxmox.tls import shown_by, spelled
from orchestrator.transport.pct_words import CLUSTER, LOCKED, MISSING

if TYPE_CHECKING:
    from orchestrator.inventory.reach import ApiConfig

#: Statuses that the node in between invents when it cannot reach the container's node.
NODE_UNREACHABLE = (595, 596)
#: TCP and TLS must be there this soon (seconds), however long an answer may take.
CONNECT_LIMIT = 10.0
_UNKNOWN_NODE = re.compile(r"hostname lookup '(?P<node>[^']*)' failed")
_WORDS = (
    (
        re.compile(r"snapshot feature is not available"),
        "api_failed",
        "its storage takes no snapshots: move its disks to zfs, lvm-thin, btrfs or ceph, or go without",
    ),
    (
        re.compile(r"Device /dev/\S+ does not exist"),
        "device_missing",
        "load the driver on the node (`nvidia-smi` does); `dfo gpu plan` shows what to set",
    ),
    (re.compile(r"No space left on device|out of space|Disk quota exceeded"), "disk_full", "free space on the node"),
)


@dataclass(frozen=True)
class Asked:
    """Which API was asked, and as whom."""

    host: str
    port: int
    token_id: str
    timeout: float
    fingerprint: str | None

    @classmethod
    def of(cls, config: ApiConfig) -> Asked:
        assert config.host is not None and config.token_id is not None
        return cls(config.host, config.port, config.token_id, config.timeout, config.fingerprint)

    @property
    def label(self) -> str:
        return f"{self.host}:{self.port}"


def passes(error: BaseException) -> bool:
    """Whether the same question may be answered a moment later."""
    if isinstance(error, ResourceException):
        return error.status_code in NODE_UNREACHABLE
    return isinstance(error, requests.exceptions.ChunkedEncodingError) or _was_cut(error)


def _was_cut(error: BaseException) -> bool:
    """A connection that had been there: reset, or closed without an answer."""
    return isinstance(error, requests.ConnectionError) and isinstance(_cause(error), ProtocolError)


def _cause(error: requests.RequestException) -> object:
    inner = error.args[0] if error.args else None
    return getattr(inner, "reason", None) or inner


def explain(error: ResourceException | requests.RequestException, asked: Asked, about: str, seconds: float) -> DfoError:
    """The error of dfo. `about`: what was asked for, such as `container 101`; it took `seconds`."""
    if isinstance(error, ResourceException):
        return _answered(error, asked, about, seconds)
    if isinstance(error, requests.exceptions.SSLError):
        return _untrusted(str(_cause(error)), asked)
    if isinstance(error, requests.exceptions.ReadTimeout) or isinstance(_cause(error), ReadTimeoutError):
        return DeadlineError(
            "deadline",
            f"the API at `{asked.label}` did not answer in {asked.timeout:g} s",
            why=f"it was asked about {about}; the connection stands, but no answer came",
            fix="`systemctl status pveproxy pvedaemon` on the node; a slow cluster wants more `pct.api.timeout`",
        )
    if passes(error):
        return ConnectError(
            "connection_lost",
            f"the connection to the API at `{asked.label}` broke",
            why=f"{_last_words(_cause(error))}, while it was asked about {about}",
            fix="run the command again; if it repeats, `systemctl status pveproxy` on the node",
        )
    why, fix = _unreached(error, asked)
    return ConnectError("unreachable", f"cannot reach the API at `{asked.label}`", why=why, fix=fix, host=asked.host)


def _unreached(error: requests.RequestException, asked: Asked) -> tuple[str, str]:
    cause = _cause(error)
    if isinstance(error, requests.exceptions.TooManyRedirects):
        return "it answers with a redirection, which the API never does", "correct `pct.api.host` and `port`"
    if isinstance(cause, NameResolutionError):
        return f"the name `{asked.host}` is not known here", "set `pct.api.host`; a Host alias of ssh is none"
    if isinstance(cause, NewConnectionError) and "refused" in str(cause):
        return "the connection was refused", "start its pveproxy, or correct `pct.api.host` and `port`"
    if isinstance(error, requests.exceptions.ConnectTimeout):
        limit = min(CONNECT_LIMIT, asked.timeout)
        return f"no answer in {limit:g} s", "check the network or VPN, then run the command again"
    return _last_words(cause), "check the network or VPN, then run the command again"


def _untrusted(said: str, asked: Asked) -> DfoError:
    if found := re.search(r'Expected "[0-9a-f]+", got "(?P<got>[0-9a-f]{64})"', said):
        got, expected = spelled(found["got"]), spelled(asked.fingerprint or "")
        return ConnectError(
            "certificate_untrusted",
            f"the certificate of `{asked.label}` is not the pinned one",
            why=f"its SHA-256 fingerprint is {got}, `pct.api.fingerprint` is {expected}; the token was not sent",
            fix="`pvenode cert info` on the node: if it shows the first, set `pct.api.fingerprint` to it; "
            "if not, somebody may be in between: stop and ask",
            got=got,
            expected=expected,
        )
    if found := re.search(r"certificate verify failed: (?P<why>[^(]*)", said):
        got_now = shown_by(asked.host, asked.port, min(CONNECT_LIMIT, asked.timeout))
        return ConnectError(
            "certificate_untrusted",
            f"nobody vouches for the certificate of `{asked.label}`",
            why=f"{found['why'].strip()}; its SHA-256 fingerprint is {got_now or 'unknown'}; the token was not sent",
            fix="compare that with `pvenode cert info` on the node, then set `pct.api.fingerprint` to it; "
            "or set `pct.api.ca` to a copy of the node's /etc/pve/pve-root-ca.pem",
            got=got_now,
        )
    return ConnectError(
        "unreachable",
        f"`{asked.label}` does not speak TLS with us",
        why=_last_words(said),
        fix="correct `pct.api.host` and `port`: the API is HTTPS, usually on 8006",
        host=asked.host,
    )


def _answered(error: ResourceException, asked: Asked, about: str, seconds: float) -> DfoError:
    said, status = _text(error), error.status_code
    if status == 401:
        user, _, name = asked.token_id.partition("!")
        return ConnectError(
            "api_refused",
            f"the API at `{asked.label}` refused the token `{asked.token_id}`",
            why=f"401 {said}, after {seconds:.1f} s: it is unknown or expired, or its secret is another one",
            fix=f"`pveum user token list {user}` on the node; a lost secret is replaced by "
            f"`pveum user token remove {user} {name}` and `pveum user token add {user} {name}`",
        )
    if status == 403:
        found = REFUSAL.search(said)
        path = found["path"] if found else "/vms"
        first = re.split(r"[|, ]+", found["privileges"])[:1] if found else []
        return forbidden(asked.label, asked.token_id, path, first, why=f"403 {said}")
    if status in NODE_UNREACHABLE:
        return ConnectError(
            "unreachable",
            f"`{asked.label}` cannot reach the node of {about}",
            why=f"{status} {said}, also when asked again",
            fix="`pvecm status` on the node; or set `pct.api.host` to the container's own node",
            host=asked.host,
        )
    if status == 501:
        fix = "it needs Proxmox VE 8 or 9; `pct.api.host` must be a node of it"
        return PreflightError("api_failed", f"`{asked.label}` does not know that call", why=f"501 {said}", fix=fix)
    return told(said, asked.label, about) or PreflightError(
        "api_failed",
        f"the API at `{asked.label}` failed for {about}",
        why=f"{status} {said}",
        fix="read the why; `journalctl -u pvedaemon -u pveproxy` on the node has the rest",
    )


def told(said: str, label: str, about: str) -> DfoError | None:
    """What a text of Proxmox VE stands for, be it of an answer or of a task. None: nothing that we know."""
    if MISSING.search(said):
        fix = "`pct list` on its node shows those it has; correct `pct.container`"
        what = f"{about} does not exist on `{label}`"
        return PreflightError("container_missing", what, why=said, fix=fix)
    if LOCKED.search(said):
        fix = "wait for the task to end (the task list of the node shows it), then run the command again"
        return LockError("lock_held", f"{about} is locked on `{label}`", why=said, fix=fix)
    if CLUSTER.search(said):
        fix = "`pvecm status` and `systemctl status pve-cluster corosync` on the node"
        what = f"the cluster of `{label}` is not ready"
        return PreflightError("cluster_not_ready", what, why=said, fix=fix)
    if found := _UNKNOWN_NODE.search(said):
        fix = "`/etc/hosts` of the node must name every member of the cluster"
        what = f"`{label}` does not know the node `{found['node']}`"
        return PreflightError("cluster_not_ready", what, why=said, fix=fix)
    for pattern, kind, fix in _WORDS:
        if pattern.search(said):
            return PreflightError(kind, f"`{label}` cannot do that with {about}", why=said, fix=fix)
    return None


def _text(error: ResourceException) -> str:
    fields = error.errors if isinstance(error.errors, dict) else {}
    named = [f"{key}: {value}" for key, value in fields.items() if isinstance(value, str)]
    return _last_words(" ".join([str(error.content or "").strip(), *named]))


def _last_words(said: object) -> str:
    return " ".join(str(said).split())[:300] or "no message"

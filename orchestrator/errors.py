"""Every failure a user can meet.

    DfoError
    ├── UsageError        2    command line or inventory
    ├── SourceError       3    the sources do not pass the checks
    ├── ConnectError      4    network, host key, login
    ├── PreflightError    5    container, rights, space, Python, devices
    ├── LockError         6    somebody else holds the lock
    ├── TransferError     7    transfer or verification; the target is unchanged
    ├── RunError          8    the run ended badly
    ├── DifferenceFound   9    a comparison found something
    ├── WarmupError      10    warm-up failed, training was not started
    ├── DeadlineError   124    our own deadline passed
    └── Interrupted     130    Ctrl-C; a detached run goes on

An error says *what* happened, *why* (a measured fact), and how to *fix* it (something to paste).
`kind` is the stable name for programs: `KINDS` is the whole list, and a test freezes it.
"""

from __future__ import annotations

from typing import ClassVar


class DfoError(Exception):
    """What / why / fix, a stable kind and an exit code."""

    exit_code: int = 1
    kinds: ClassVar[frozenset[str]] = frozenset({"bug"})

    def __init__(self, kind: str, what: str, *, why: str, fix: str, **details: object) -> None:
        assert kind in self.kinds, f"{kind!r} is not a kind of {type(self).__name__}"
        super().__init__(what)
        self.kind = kind
        self.what = what
        self.why = why
        self.fix = fix
        self.details = details

    def as_dict(self) -> dict[str, object]:
        """The `error` object of `--json` output."""
        return {"kind": self.kind, "what": self.what, "why": self.why, "fix": self.fix, **self.details}


class UsageError(DfoError):
    """The command line or the inventory is wrong; nothing was contacted."""

    exit_code = 2
    kinds = frozenset(
        {
            "usage",
            "inventory_missing",
            "inventory_invalid",
            "unknown_target",
            "unknown_run",
            "unknown_release",
            "unknown_cache",
            "archive_invalid",
            "config_invalid",
            "file_exists",
            "secret_missing",
            "snapshot_invalid",
            "template_invalid",
        }
    )


class SourceError(DfoError):
    """The sources fail a check; nothing was sent."""

    exit_code = 3
    kinds = frozenset(
        {
            "syntax_error",
            "missing_module",
            "unsafe_path",
            "too_many_files",
            "too_large",
            "no_sources",
            "unreadable_source",
        }
    )


class ConnectError(DfoError):
    """The target cannot be reached."""

    exit_code = 4
    kinds = frozenset(
        {
            "unreachable",
            "host_key_mismatch",
            "host_key_unknown",
            "login_refused",
            "connection_lost",
            "certificate_untrusted",
            "api_refused",
        }
    )


class PreflightError(DfoError):
    """The target is reachable but not fit for the step."""

    exit_code = 5
    kinds = frozenset(
        {
            "container_stopped",
            "container_missing",
            "cluster_not_ready",
            "not_permitted",
            "no_python",
            "old_python",
            "disk_full",
            "read_only",
            "device_in_use",
            "device_missing",
            "cache_busy",
            "cache_exists",
            "cache_elsewhere",
            "run_alive",
            "nothing_deployed",
            "release_broken",
            "resume_impossible",
            "remote_failed",
            "root_unusable",
            "api_forbidden",
            "api_failed",
            "target_unfit",
        }
    )


class LockError(DfoError):
    """Another deploy or launch holds the target's lock."""

    exit_code = 6
    kinds = frozenset({"lock_held", "lock_not_held"})


class TransferError(DfoError):
    """Bytes did not arrive as sent; `current` is as it was."""

    exit_code = 7
    kinds = frozenset({"damaged", "truncated", "stage_failed", "pull_failed", "plan_stale"})


class RunError(DfoError):
    """The run itself ended badly."""

    exit_code = 8
    kinds = frozenset({"run_failed", "run_stopped", "run_lost", "run_not_stopped", "report_incomplete"})


class DifferenceFound(DfoError):
    """A comparison found a difference; not a failure of ours."""

    exit_code = 9
    kinds = frozenset({"environment_differs", "deploy_pending"})


class WarmupError(DfoError):
    """Warm-up failed, so training was not started."""

    exit_code = 10
    kinds = frozenset({"warmup_failed"})


class DeadlineError(DfoError):
    """A step took longer than its deadline."""

    exit_code = 124
    kinds = frozenset({"deadline"})


class Interrupted(DfoError):
    """The user pressed Ctrl-C; a detached run goes on."""

    exit_code = 130
    kinds = frozenset({"interrupted"})


def _family(root: type[DfoError]) -> list[type[DfoError]]:
    return [root, *(cls for child in root.__subclasses__() for cls in _family(child))]


#: kind → exception class, for errors that arrive from a remote program as data.
KINDS: dict[str, type[DfoError]] = {kind: cls for cls in _family(DfoError) for kind in sorted(cls.kinds)}


def from_dict(data: dict[str, object]) -> DfoError:
    """Rebuild an error that a remote program reported (`kind`, `what`, `why`, `fix`, details)."""
    details = {k: v for k, v in data.items() if k not in {"kind", "what", "why", "fix"}}
    kind = str(data.get("kind"))
    cls = KINDS.get(kind)
    if cls is None:
        cls, kind = PreflightError, "remote_failed"
    return cls(kind, str(data.get("what")), why=str(data.get("why")), fix=str(data.get("fix")), **details)

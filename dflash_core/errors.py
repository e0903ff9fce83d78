"""The errors a user of the trainer can meet: what happened, why, and what to do about it."""

from __future__ import annotations

from typing import ClassVar


class CoreError(Exception):
    """Base of every error meant for the user.

    ``what`` names the place (file, line, key path), ``why`` the cause, ``fix`` the next step. ``kind`` is
    stable and machine-readable; ``exit_code`` is what the command line returns.
    """

    kind: ClassVar[str] = "internal"
    exit_code: ClassVar[int] = 1

    def __init__(self, what: str, why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        lines = [self.what]
        if self.why:
            lines.append(f"  why: {self.why}")
        if self.fix:
            lines.append(f"  fix: {self.fix}")
        return "\n".join(lines)


class ConfigError(CoreError):
    """A setting is missing, unknown, mistyped or out of range. ``key`` is its dotted path, if it has one."""

    kind = "config"
    exit_code = 2

    def __init__(self, what: str, why: str = "", fix: str = "", *, key: str = "") -> None:
        super().__init__(what, why, fix)
        self.key = key


class DataError(CoreError):
    """A chat file, prompt file or feature store cannot be used."""

    kind = "data"
    exit_code = 3


class CheckpointError(CoreError):
    """A checkpoint is absent, damaged or does not belong to this model."""

    kind = "checkpoint"
    exit_code = 5


class TargetError(CoreError):
    """The target model cannot be loaded or does not have the parts that a drafter needs."""

    kind = "target"
    exit_code = 5


class WorkerError(CoreError):
    """A target or drafter worker stopped during the run."""

    kind = "worker"
    exit_code = 8


class PreflightError(CoreError):
    """The machine or the run directory is not fit for this run."""

    kind = "preflight"
    exit_code = 5


class WarmupError(CoreError):
    """The warm-up failed; training was not started."""

    kind = "warmup"
    exit_code = 10

"""A value that is fetched as late as possible and never shown."""

from __future__ import annotations

import os
import shlex
import stat
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from orchestrator.errors import UsageError

COMMAND_DEADLINE = 30.0
MASK = "***"


@dataclass(frozen=True, slots=True, repr=False)
class Secret:
    """Where a secret is to be found: exactly one of a variable, a private file, a command.

    The object holds the source only, so that no accident with it can leak the value.
    """

    env: str | None = None
    file: str | None = None
    command: tuple[str, ...] | None = None

    def __repr__(self) -> str:
        return MASK

    __str__ = __repr__

    @property
    def source(self) -> str:
        """For people: `environment variable HF_TOKEN`."""
        if self.env is not None:
            return f"environment variable {self.env}"
        if self.file is not None:
            return f"file {self.file}"
        return f"command {shlex.join(self.command or ())}"

    def reveal(self, name: str, *, project: Path, environ: Mapping[str, str] | None = None) -> str:
        """The value itself. `name` is the variable it is for, `project` where a relative file starts.

        Raises UsageError `secret_missing`; no message ever quotes what was read.
        """
        if self.env is not None:
            value = (os.environ if environ is None else environ).get(self.env, "")
            if not value:
                raise _missing(self, name, "it is not set here", f"`export {self.env}=…` in this shell")
        elif self.file is not None:
            value = _read_private(self, name, project / Path(self.file).expanduser())
        else:
            value = _ask(self, name)
        if not value or "\0" in value:
            raise _missing(self, name, "it gave no usable text", f"put the value of {name} there")
        return value


def _missing(secret: Secret, name: str, why: str, fix: str) -> UsageError:
    return UsageError("secret_missing", f"no value for `{name}` from {secret.source}", why=why, fix=fix)


def _read_private(secret: Secret, name: str, path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            # Asked of the open file, not of the path: they could be two different ones.
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            if mode & 0o077:
                why = f"its mode is {mode:04o}, so other users of this machine may read it"
                raise _missing(secret, name, why, f"`chmod 600 {shlex.quote(str(path))}`")
            return file.read().strip()
    except UnicodeDecodeError as error:
        raise _missing(secret, name, "it is not UTF-8 text", "store the value as text") from error
    except OSError as error:
        why = error.strerror or str(error)
        raise _missing(secret, name, why, "create it with mode 0600, or correct the path in the inventory") from error


def _ask(secret: Secret, name: str) -> str:
    command = secret.command or ()
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=COMMAND_DEADLINE,
            check=True,
            encoding="utf-8",
        )
    except subprocess.CalledProcessError as error:
        # Its output is not quoted: a helpful tool may have printed the secret.
        raise _missing(secret, name, f"it ended with code {error.returncode}", "run it by hand once") from error
    except subprocess.TimeoutExpired as error:
        why = f"it did not end within {COMMAND_DEADLINE:g} s (it gets no terminal to ask on)"
        raise _missing(secret, name, why, "unlock the store first, then run the command again") from error
    except UnicodeDecodeError as error:
        raise _missing(secret, name, "its output is not UTF-8 text", "store the value as text") from error
    except OSError as error:
        raise _missing(secret, name, error.strerror or str(error), "correct `command` in the inventory") from error
    return done.stdout.strip()

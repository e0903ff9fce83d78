"""Proving who we are, with keys alone, and saying what was tried when nothing helped."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import paramiko
from paramiko.pkey import UnknownKeyType

from orchestrator.errors import ConnectError
from orchestrator.transport.route import Hop
from orchestrator.transport.trouble import refused


class Login:
    """What `SSHClient.connect` takes as `auth_strategy`: offers one key after the other, never asks for anything."""

    def __init__(self, hop: Hop) -> None:
        self._hop = hop
        self._offered: list[str] = []
        self._unusable: list[str] = []
        self._locked: Path | None = None

    def authenticate(self, transport: paramiko.Transport) -> None:
        """Raises ConnectError `login_refused`."""
        with contextlib.closing(_Agent()) if self._hop.agent else contextlib.nullcontext() as agent:
            for title, key in self._keys(agent):
                self._offered.append(title)
                try:
                    more = transport.auth_publickey(self._hop.user, key)
                except paramiko.BadAuthenticationType as error:
                    raise self._refused(f"it takes no keys, only {', '.join(error.allowed_types)}") from error
                except paramiko.AuthenticationException:
                    continue
                except (paramiko.SSHException, EOFError) as error:
                    if transport.is_active():
                        raise
                    raise self._refused("it hung up after that (MaxAuthTries of its sshd)") from error
                if not more:
                    return
                raise self._refused(f"it wants {', '.join(more)} as well, which needs `ssh.client: openssh`")
        raise self._refused()

    def _keys(self, agent: _Agent | None) -> Iterator[tuple[str, paramiko.PKey]]:
        """Those of files first, then those of the agent; each key once."""
        seen: set[bytes] = set()
        files = [self._from_file(path) for path in self._hop.keys]
        held = list(self._from_agent(agent)) if agent else []
        for found in [*files, *held]:
            if found is not None and found[1].asbytes() not in seen:
                seen.add(found[1].asbytes())
                yield found

    def _from_file(self, path: Path) -> tuple[str, paramiko.PKey] | None:
        try:
            return f"the key {path}", paramiko.PKey.from_path(path)
        except FileNotFoundError:
            self._unusable.append(f"there is no {path}")
        except (paramiko.PasswordRequiredException, TypeError):
            self._unusable.append(f"{path} has a passphrase")
            self._locked = self._locked or path
        except UnknownKeyType:
            self._unusable.append(f"{path} is of a kind that paramiko does not know")
        except (paramiko.SSHException, OSError, ValueError) as error:
            self._unusable.append(f"{path}: {error}")
        return None

    def _from_agent(self, agent: _Agent) -> Iterator[tuple[str, paramiko.PKey]]:
        """All its keys; with IdentitiesOnly those whose public half lies beside a key file."""
        allowed = {words[1] for path in self._hop.keys if len(words := _public_words(path)) > 1}
        for key in agent.get_keys():
            if not self._hop.only_keys or key.get_base64() in allowed:
                yield f"`{key.comment or key.fingerprint}` of the agent", key

    def _refused(self, *end: str) -> ConnectError:
        return refused(self._hop, self._offered, [*self._unusable, *end], locked=self._locked)


class _Agent(paramiko.Agent):
    """`paramiko.Agent`, whose constructor fails where the socket is not one of an agent."""

    def __init__(self) -> None:
        try:
            super().__init__()
        except (paramiko.SSHException, OSError, EOFError):
            self._keys = ()
            self._conn = None


def _public_words(path: Path) -> list[str]:
    try:
        return path.with_name(f"{path.name}.pub").read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        return []

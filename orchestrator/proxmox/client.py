"""The API as one token: proxmoxer over HTTPS with our certificate check, limits, second tries and words."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import requests
from proxmoxer import ProxmoxAPI, ResourceException
from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

from orchestrator.errors import PreflightError, UsageError
from orchestrator.inventory.secrets import MASK
from orchestrator.proxmox.tls import authority, secure
from orchestrator.proxmox.words import CONNECT_LIMIT, Asked, explain, passes

if TYPE_CHECKING:
    from pathlib import Path

    from orchestrator.inventory.reach import ApiConfig

#: How often a question is asked at all, and the first pause after which it is asked again (seconds, then doubled).
ATTEMPTS = 4
PAUSE = 0.5
_SECRET = re.compile(r"[A-Za-z0-9-]+")


def open_api(config: ApiConfig, project: Path) -> Api:
    """The API that `pct.api` of a target describes, with its token's secret fetched. Nothing is contacted yet.

    Raises UsageError `secret_missing` (the secret) and `inventory_invalid` (`pct.api.ca`).
    """
    assert config.token is not None, "the inventory has one beside `token_id`"
    secret = config.token.reveal("pct.api.token", project=project)
    if not _SECRET.fullmatch(secret):
        raise UsageError(
            "secret_missing",
            f"no usable value for `pct.api.token` from {config.token.source}",
            why="the secret of a token has letters, digits and dashes only",
            fix="store what `pveum user token add` prints as `value`, without the token's name",
        )
    return Api(config, secret)


class Api:
    """One cluster, asked through one node as one token. Not for several threads at once."""

    def __init__(self, config: ApiConfig, secret: str, *, pause: float = PAUSE) -> None:
        self.asked = Asked.of(config)
        self._secret = secret
        self._pause = pause
        user, _, name = self.asked.token_id.partition("!")
        self._proxmox = ProxmoxAPI(
            self.asked.host,
            port=config.port,
            user=user,
            token_name=name,
            token_value=secret,
            verify_ssl=authority(config.ca, config.fingerprint),
            timeout=(min(CONNECT_LIMIT, config.timeout), config.timeout),
        )
        self._session: requests.Session = self._proxmox._store["session"]
        secure(self._session, config.fingerprint)

    def __repr__(self) -> str:
        return f"Api({self.label}, {self.asked.token_id}={MASK})"

    @property
    def label(self) -> str:
        """`pve1:8006`."""
        return self.asked.label

    def get(self, *path: str | int, **parameters: object) -> object:
        """The `data` of an answer. Asked again after 595, 596 and cut connections, which nothing else is."""
        again = Retrying(
            retry=retry_if_exception(passes),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(multiplier=self._pause, max=8 * self._pause),
            reraise=True,
        )
        with self._in_our_words(path):
            return again(self._send, "get", path, parameters)

    def mapping(self, *path: str | int, **parameters: object) -> dict[str, Any]:
        """`get` of what must be an object. Raises PreflightError `api_failed` if it is not."""
        answer = self.get(*path, **parameters)
        if not isinstance(answer, dict):
            raise self._nonsense(path, answer)
        return answer

    def rows(self, *path: str | int, **parameters: object) -> list[dict[str, Any]]:
        """`get` of what must be a list of objects. An empty one may only mean missing rights (`rights.missing`)."""
        answer = self.get(*path, **parameters)
        if not isinstance(answer, list) or not all(isinstance(row, dict) for row in answer):
            raise self._nonsense(path, answer)
        return answer

    def post(self, *path: str | int, **values: object) -> object:
        """Change something, once. Most answers are the UPID of a task (`tasks.wait`)."""
        with self._in_our_words(path):
            return self._send("post", path, values)

    def delete(self, *path: str | int) -> object:
        """Remove something, once; as `post`."""
        with self._in_our_words(path):
            return self._send("delete", path, {})

    def close(self) -> None:
        self._session.close()

    def _send(self, method: str, path: tuple[str | int, ...], values: dict[str, Any]) -> object:
        resource = self._proxmox("/".join(map(str, path)))
        try:
            answer = getattr(resource, method)(**values)
        except (AttributeError, KeyError, TypeError) as error:  # proxmoxer looks into any JSON as if it were Proxmox's
            raise self._nonsense(path, None) from error
        if isinstance(answer, dict) and isinstance(answer.get("errors"), bytes):  # and packs what is no JSON so
            raise self._nonsense(path, answer["errors"][:80].decode(errors="replace"))
        return answer

    @contextmanager
    def _in_our_words(self, path: tuple[str | int, ...]) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        except (ResourceException, requests.RequestException) as error:
            if isinstance(error, ResourceException):
                error.content = str(error.content or "").replace(self._secret, MASK)
            raise explain(error, self.asked, spoken(path), time.monotonic() - started) from error

    def _nonsense(self, path: tuple[str | int, ...], answer: object) -> PreflightError:
        said = " ".join(str(answer).split())[:80].replace(self._secret, MASK)
        return PreflightError(
            "api_failed",
            f"`{self.label}` does not answer as Proxmox VE does",
            why=f"asked for {spoken(path)}, it says {said if answer is not None else 'something else'}",
            fix="correct `pct.api.host` and `port`; a proxy in between must leave the answers alone",
        )


def spoken(path: tuple[str | int, ...]) -> str:
    """`container 101`, or the path itself."""
    text = "/".join(map(str, path))
    found = re.match(r"nodes/[^/]+/lxc/(\d+)", text)
    return f"container {found[1]}" if found else f"`{text}`"

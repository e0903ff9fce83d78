"""The certificate of the API: pinned by fingerprint, or vouched for by an authority, but never just believed."""

from __future__ import annotations

import hashlib
import ssl
from typing import Any

import requests
from requests.adapters import HTTPAdapter

from orchestrator.errors import UsageError


class PinnedAdapter(HTTPAdapter):
    """HTTPS to the server whose certificate has this SHA-256 fingerprint, whoever signed it.

    requests knows no pins. urllib3, which it stands on, compares the fingerprint of each new connection before
    anything is sent through it.
    """

    def __init__(self, fingerprint: str) -> None:
        self._fingerprint = fingerprint
        super().__init__()

    def init_poolmanager(self, *args: Any, **kwargs: Any) -> None:
        super().init_poolmanager(*args, assert_fingerprint=self._fingerprint, **kwargs)


def secure(session: requests.Session, fingerprint: str | None) -> None:
    """Let a session speak to the pinned server only, follow nobody elsewhere, and take nothing from variables."""
    session.trust_env = False
    session.max_redirects = 0
    session.adapters.clear()
    session.mount("https://", PinnedAdapter(spelled(fingerprint)) if fingerprint else HTTPAdapter())


def authority(ca: str | None, fingerprint: str | None) -> bool | str:
    """What `verify` of requests has to be. `False` only beside a fingerprint, which then decides alone.

    Raises UsageError `inventory_invalid` for a file that holds no certificate.
    """
    if ca is None:
        return fingerprint is None
    try:
        ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise UsageError(
            "inventory_invalid",
            "`pct.api.ca` is no file of certificates",
            why=f"{ca}: {error.strerror or error}",
            fix="copy /etc/pve/pve-root-ca.pem of the node there, or set `pct.api.fingerprint` instead",
        ) from error
    return ca


def spelled(fingerprint: str) -> str:
    """As Proxmox VE prints it: `3F:0A:…`."""
    digits = fingerprint.removeprefix("SHA256:").replace(":", "").upper()
    return ":".join(digits[i : i + 2] for i in range(0, len(digits), 2))


def shown_by(host: str, port: int, timeout: float) -> str | None:
    """The fingerprint that a server shows, to tell a person; nothing but the handshake is sent. None: it shows none."""
    try:
        pem = ssl.get_server_certificate((host, port), timeout=timeout)
    except OSError:
        return None
    return spelled(hashlib.sha256(ssl.PEM_cert_to_DER_cert(pem)).hexdigest())

"""Proxmox VE's API as `fakepve` fakes it, and the way of the product to it.

What it does not have: the intersection of a user's and its token's rights, and the pause before a 401.
"""

from __future__ import annotations

import hashlib
import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from fakepve import FakePve
from fakepve.certs import make_cert

from orchestrator.errors import DfoError
from orchestrator.inventory.reach import ApiConfig
from orchestrator.proxmox.client import Api
from orchestrator.proxmox.container import Container
from orchestrator.proxmox.rights import CONTAINER
from support.https_answers import https_answers

TOKEN_ID = "dfo@pve!deploy"
SECRET = "0b5c7e8a-1d2f-4a6b-9c3d-5e7f8a9b0c1d"

Connect = Callable[..., Api]


def add_container(pve: FakePve, vmid: int) -> None:
    """A running container on pve1, and a token with what dfo needs there."""
    pve.apitokens[TOKEN_ID] = SECRET
    pve.grant(TOKEN_ID, f"/vms/{vmid}", *CONTAINER)
    disk = f"local-lvm:vm-{vmid}-disk-0,size=8G"
    pve.add_ct(vmid, "lab", status="running", config={"rootfs": disk, "cores": 2})


@pytest.fixture
def pve(fakepve: FakePve) -> FakePve:
    """A cluster with container 101."""
    add_container(fakepve, 101)
    return fakepve


@pytest.fixture
def connect(pve: FakePve, fakepve_cafile: str) -> Iterator[Connect]:
    """Factory of connections to `pve`; the arguments are keys of `pct.api`."""
    opened: list[Api] = []

    def make(*, secret: str = SECRET, pause: float = 0.01, **more: Any) -> Api:
        opened.append(Api(config(**{"port": pve.port, "ca": fakepve_cafile, **more}), secret, pause=pause))
        return opened[-1]

    yield make
    for api in opened:
        api.close()


@pytest.fixture
def guest(connect: Connect) -> Container:
    """Container 101 as the product sees it."""
    return Container(connect(), 101)


def config(**more: Any) -> ApiConfig:
    values = {"host": "127.0.0.1", "token_id": TOKEN_ID, "timeout": 5.0, **more}
    return ApiConfig.model_construct(**{**dict(ApiConfig()), **values})


@contextmanager
def fails(cls: type[DfoError], kind: str) -> Iterator[Any]:
    """The error must be of this class and kind, say what to do, and never have the secret."""
    with pytest.raises(cls) as caught:
        yield caught
    error = caught.value
    assert error.kind == kind, error.as_dict()
    assert error.what and error.why and error.fix
    assert SECRET not in json.dumps(error.as_dict())


def asked(pve: FakePve, method: str = "GET", end: str = "") -> int:
    """How many requests came, dropped ones left out."""
    return sum(verb == method and path.endswith(end) for verb, path, _ in pve.requests)


def fingerprint_of(cafile: str) -> str:
    return hashlib.sha256(ssl.PEM_cert_to_DER_cert(Path(cafile).read_text())).hexdigest()


@contextmanager
def answering(tmp_path: Path, **answer: Any) -> Iterator[Api]:
    """A connection to a server that has one answer for everything."""
    certificate, key, _ = make_cert(str(tmp_path))
    with (
        https_answers(certificate, key, **answer) as port,
        closing(Api(config(port=port, ca=certificate), SECRET, pause=0.01)) as api,
    ):
        yield api

"""How a target is reached: the sections `ssh` and `pct`."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from orchestrator.inventory.types import (
    EMPTY,
    AbsolutePath,
    CertificateFingerprint,
    Duration,
    Fingerprint,
    HopText,
    Host,
    Port,
    SecretValue,
    Section,
    Text,
    TokenId,
    User,
)


class SshTimeouts(Section):
    """How long each part of reaching a host may take."""

    connect: Duration = 10.0
    """The network: until TCP is connected, and for each exchange of keys."""
    banner: Duration = 15.0
    """Until the server has said what it is. A busy sshd makes newcomers wait."""
    auth: Duration = 20.0
    """Until the login is accepted or refused."""
    channel: Duration = 15.0
    """Until the server has opened a channel for a command and started it."""


class SshConfig(Section):
    """How to reach a host: the container itself for `transport: ssh`, its Proxmox VE node for `transport: pct`. What is
    unset here is as `ssh HOST` has it, ~/.ssh/config included."""

    host: Annotated[Host | None, Field(examples=["pve1"])] = None
    """Name, address, or a Host alias of ~/.ssh/config, which then gives HostName, Port, User, IdentityFile,
    IdentitiesOnly, ProxyJump, HostKeyAlias and the known_hosts files."""
    port: Annotated[Port | None, Field(examples=[22])] = None
    """Port of its sshd."""
    user: Annotated[User | None, Field(examples=["root"])] = None
    """User to log in as. A node wants root, or another user together with `sudo`."""
    keys: Annotated[list[Text], Field(examples=[["~/.ssh/id_ed25519"]])] = []
    """Private key files to log in with, relative to the project. One with a passphrase belongs into the agent."""
    agent: bool = True
    """Whether the keys of the ssh agent are offered too, after `keys`."""
    jump: Annotated[list[HopText] | None, Field(examples=[["ada@bastion.example.org:22"]])] = None
    """Hosts to go through, the nearest first: `user@host:port`. [] goes straight although ~/.ssh/config has a
    ProxyJump."""
    host_key: Annotated[
        list[Fingerprint], Field(examples=[["SHA256:uNiVztksCsDhcc0u9e8BgrJXVGDykyJTzPhDlMxqJrI"]])
    ] = []
    """Fingerprints that the key of the host must have one of; known_hosts files then do not count for it. For hosts of
    `jump` they do."""
    host_key_policy: Literal["accept-new", "strict"] = "accept-new"
    """What to do with a host that no known_hosts file has: `accept-new` remembers its key, `strict` refuses. A key that
    has changed is always refused; `dfo trust` shows and accepts it."""
    known_hosts: Annotated[Text | None, Field(examples=["inventory/known_hosts"])] = None
    """File of accepted host keys, relative to the project, in the format of ssh. Unset: `known_hosts` in your
    configuration folder of dfo. Those of ssh are read, never written."""
    config: Annotated[Text | None, Field(examples=["none"])] = None
    """Another file than ~/.ssh/config, relative to the project; `none` reads no such file."""
    client: Literal["auto", "paramiko", "openssh"] = "auto"
    """Who speaks the protocol: paramiko, or the ssh program of this machine for what paramiko cannot do (hardware keys,
    ProxyCommand, smart cards). `auto` takes the program where ~/.ssh/config asks for such a thing, and says why."""
    timeouts: Annotated[SshTimeouts, EMPTY] = SshTimeouts()
    """How long each part of reaching a host may take."""
    keepalive: Duration = 15.0
    """A sign of life is sent this often, so that no router forgets the connection."""
    sudo: bool = False
    """Whether to become root with `sudo -n`, which never asks: for everything with `transport: ssh`, for `pct` alone
    with `transport: pct`."""


class ApiConfig(Section):
    """The HTTP API of Proxmox VE, which `deploy --ct-snapshot` needs; `--start` takes it where it is set up."""

    token_id: Annotated[TokenId | None, Field(examples=["dfo@pve!deploy"])] = None
    """The API token, USER@REALM!NAME. Unset: the API is not used."""
    token: Annotated[SecretValue | None, Field(examples=[{"env": "DFO_PVE_TOKEN"}])] = None
    """Where its secret is: {env: NAME}, {file: PATH} with mode 0600, or {command: [PROGRAM, ARGUMENT]}."""
    host: Annotated[Host | None, Field(examples=["pve1.example.org"])] = None
    """Name or address of a node of the cluster, best the container's own. Unset: `ssh.host`."""
    port: Port = 8006
    """Port of its API."""
    fingerprint: Annotated[
        CertificateFingerprint | None, Field(examples=["12:34:56:78:9A:BC:DE:F0:" * 3 + "12:34:56:78:9A:BC:DE:F0"])
    ] = None
    """SHA-256 fingerprint that the certificate must have, whoever signed it; `pvenode cert info` on the node has it."""
    ca: Annotated[Text | None, Field(examples=["inventory/pve-root-ca.pem"])] = None
    """File with the authority that signs the certificate, relative to the project: a copy of /etc/pve/pve-root-ca.pem.
    With neither this nor `fingerprint`, a public authority must have signed it."""
    timeout: Duration = 30.0
    """How long one answer may take. The refusal of a wrong token takes 3 s, an unknown node 10 s."""
    keep_snapshots: Annotated[int, Field(ge=1)] = 3
    """How many snapshots of `deploy --ct-snapshot` stay; those of others are never touched."""


class PctConfig(Section):
    """The container, as its node knows it, for `transport: pct`."""

    container: Annotated[Annotated[int, Field(ge=100, le=999_999_999)] | None, Field(examples=[101])] = None
    """Its number (VMID)."""
    path: AbsolutePath = "/usr/sbin/pct"
    """The program `pct` on the node."""
    keep_env: bool = False
    """Whether the node's environment may leak into the container. A pct that does not know `--keep-env` needs true."""
    api: Annotated[ApiConfig, EMPTY] = ApiConfig()
    """The HTTP API of Proxmox VE, which `deploy --ct-snapshot` needs; `--start` takes it where it is set up."""

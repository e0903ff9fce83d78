"""The guest's root file system: built once with mmdebstrap, kept outside the checkout, never changed afterwards."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

CACHE = Path(os.environ.get("DFO_BENCH_CACHE", "/var/cache/dfo-bench"))
PACKAGES = ("systemd", "systemd-sysv", "dbus", "python3", "procps", "openssh-server", "libfaketime", "faketime")
REVISION = 1  # raise it when `_finish` changes
FIRST_ID = 100000  # where the ids of an unprivileged container begin on the node, as Proxmox does it


@dataclass(frozen=True)
class Image:
    """Two copies of the same tree; in `unprivileged` every owner is shifted by `FIRST_ID`."""

    privileged: Path
    unprivileged: Path


def guest_image() -> Image:
    """The image, built first if this machine has none of this recipe (half a minute).

    Raises `subprocess.CalledProcessError` when mmdebstrap fails.
    """
    recipe = repr((REVISION, _os_release("VERSION_CODENAME"), PACKAGES))
    folder = CACHE / hashlib.sha256(recipe.encode()).hexdigest()[:16]
    image = Image(folder / "privileged", folder / "unprivileged")
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.exists():
            with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
                Path(scratch).chmod(0o755)
                _build(Path(scratch) / "new")
                (Path(scratch) / "new").rename(folder)
    return image


def _os_release(key: str) -> str:
    lines = Path("/etc/os-release").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)[key].strip('"')


def _build(folder: Path) -> None:
    folder.mkdir()
    sources = folder / "sources.list"
    sources.write_text(_sources())
    privileged, unprivileged = folder / "privileged", folder / "unprivileged"
    include = f"--include={','.join(PACKAGES)}"
    # The machine's own apt configuration names the mirror, so that this file names none.
    command = ["mmdebstrap", "--quiet", "--variant=minbase", include, _os_release("VERSION_CODENAME")]
    subprocess.run([*command, str(privileged), str(sources)], check=True)
    _finish(privileged)
    subprocess.run(["cp", "-a", str(privileged), str(unprivileged)], check=True)
    _shift_owners(unprivileged)


def _sources() -> str:
    lines = ["--format", "deb $(REPO_URI) $(RELEASE) $(COMPONENT)"]
    own = ["Created-By: Packages", f"Origin: {_os_release('ID').capitalize()}"]
    targets = ["apt-get", "indextargets", *lines, *own]
    return subprocess.run(targets, check=True, capture_output=True, text=True).stdout


def _finish(root: Path) -> None:
    """A guest that boots fast and is the same at each boot: a fixed machine id, and no sshd before a test asks."""
    (root / "etc/machine-id").write_text("0123456789abcdef0123456789abcdef\n")
    for name in ("e2scrub_reap.service", "ssh.service", "remote-fs.target"):
        (root / "etc/systemd/system/multi-user.target.wants" / name).unlink(missing_ok=True)
    for folder in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / folder, ignore_errors=True)
        (root / folder).mkdir(parents=True)
    root.chmod(0o755)  # dbus fails under a tighter root folder, and systemd-run with it


def _shift_owners(root: Path) -> None:
    for folder, folders, files in os.walk(root):
        here = Path(folder)
        links = [name for name in folders if (here / name).is_symlink()]
        for path in (here, *(here / name for name in (*files, *links))):
            status = path.lstat()
            os.lchown(path, status.st_uid + FIRST_ID, status.st_gid + FIRST_ID)
            if not path.is_symlink():
                path.chmod(status.st_mode & 0o7777)  # chown took the setuid bits away


if __name__ == "__main__":
    print(guest_image().privileged.parent)

"""An OpenSSH server inside a container, for the plain way in: one `sshd -i` per connection, no network needed."""

from __future__ import annotations

import socket
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from bench import sweep
from bench.sshd import Endpoint, make_key

if TYPE_CHECKING:
    from bench.container import Container

OPTIONS = ("UsePAM=no", "PermitRootLogin=prohibit-password", "PasswordAuthentication=no")


class InnerSshd:
    """Listens on the machine's loopback; each connection becomes the stdin and stdout of an sshd in the container."""

    def __init__(self, container: Container) -> None:
        self.container = container
        self._folder = tempfile.TemporaryDirectory(prefix=sweep.name())
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._serving: list[subprocess.Popen[bytes]] = []
        self.endpoint = self._make_endpoint()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for process in self._serving:
            process.kill()
            process.wait()
        self._folder.cleanup()

    def _make_endpoint(self) -> Endpoint:
        folder = Path(self._folder.name)
        port = self._listener.getsockname()[1]
        public = make_key(folder / "id_ed25519")
        authorize = "mkdir -p -m 700 /root/.ssh /run/sshd; cat > /root/.ssh/authorized_keys"
        host_key_file = "/etc/ssh/ssh_host_ed25519_key.pub"
        answer = self.container.run(["sh", "-c", f"{authorize}; cat {host_key_file}"], input=public.encode())
        host_key = " ".join(answer.stdout.decode().split()[:2])
        (folder / "known_hosts").write_text(f"[127.0.0.1]:{port} {host_key}\n")
        return Endpoint("127.0.0.1", port, "root", folder / "id_ed25519", folder / "known_hosts", host_key)

    def _accept(self) -> None:
        options = [flag for option in OPTIONS for flag in ("-o", option)]
        attach = ["lxc-attach", "--name", str(self.container.vmid), "--clear-env", "--"]
        command = self.container.node.inside([*attach, "/usr/sbin/sshd", "-i", *options])
        with suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                with client:
                    process = subprocess.Popen(command, stdin=client, stdout=client, stderr=subprocess.DEVNULL)
                self._serving.append(process)

"""A project, a target and a transport that breaks things exactly where a test says.

Run as a program it is `dfo` itself, with such a transport: `deploy_bench.py TRICK_FILE dfo-arguments…`.
"""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.deploy import release
from orchestrator.deploy.facts import Facts, gather
from orchestrator.deploy.plan import DeployPlan
from orchestrator.deploy.release import Activated
from orchestrator.deploy.sources import collect
from orchestrator.inventory.models import DeployConfig
from orchestrator.owner import owner_for
from orchestrator.remote.wire import source_of
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

INVENTORY = """\
version: 1
targets:
  lab:
    transport: local
    python: {python}
    deploy: {{root: {root}, include: [pkg], keep: {keep}}}
"""

#: An action for `broken_deploy`: the program on the target is gone from one moment to the next.
REMOTE_DIES = "os.kill(os.getpid(), signal.SIGKILL)"


class TrickTransport(LocalTransport):
    """Adds `trick`, a piece of Python, to the end of the program named `program`, before it starts to work.

    The product knows nothing of it: the program's text is changed on its way to the target.
    """

    def __init__(self, program: str = "", trick: str = "") -> None:
        self.program, self.trick = program, trick

    def stream(self, argv: Sequence[str], *, stdin: Iterable[bytes] = ()):  # type: ignore[no-untyped-def]
        return super().stream(argv, stdin=self._changed(iter(stdin)))

    def _changed(self, chunks: Iterator[bytes]) -> Iterator[bytes]:
        head = next(chunks)
        length, _, rest = head.partition(b"\n")
        source, tail = rest[: int(length)], rest[int(length) :]
        if self.program and source == source_of(self.program):
            body, main, _ = source.rpartition(b"\n_main(work)")
            source = body + b"\n" + self.trick.encode() + main + b"\n"
        yield b"%d\n" % len(source) + source + tail
        yield from chunks


def before(function: str, action: str) -> str:
    """A trick: `action` happens each time right before `function` of the program runs."""
    return (
        f"_real_{function} = {function}\n"
        f"def {function}(*args, **kwargs):\n"
        + "".join(f"    {line}\n" for line in action.splitlines())
        + f"    return _real_{function}(*args, **kwargs)\n"
    )


@dataclass
class Bench:
    """A project on disk and a target root; helpers that go through the product's own functions."""

    project: Path
    root: Path
    config: DeployConfig = field(default_factory=lambda: DeployConfig(include=["pkg"], keep=3))

    def session(self, program: str = "", trick: str = "") -> Session:
        return Session("lab", TrickTransport(program, trick), str(self.root), sys.executable)

    def write(self, path: str, data: str | bytes) -> None:
        full = self.project / path
        full.parent.mkdir(parents=True, exist_ok=True)
        full.write_bytes(data.encode() if isinstance(data, str) else data)

    def plan(self, session: Session | None = None, *, lock_wait: float = 0.0) -> DeployPlan:
        sources, examined = release.read_sources(self.project, self.config)
        return release.plan_deploy(session or self.session(), sources, examined, self.config, lock_wait=lock_wait)

    def deploy(self, session: Session | None = None, *, lock_wait: float = 0.0) -> Activated:
        session = session or self.session()
        return release.apply(session, self.plan(session, lock_wait=lock_wait), lock_wait=lock_wait)

    def facts(self) -> Facts:
        session = self.session()
        return gather(session, owner_for(session, "test"), content=self.content)

    @property
    def content(self) -> str:
        return collect(self.project, self.config).content

    @property
    def current(self) -> str | None:
        with contextlib.suppress(FileNotFoundError):
            return (self.root / "current").readlink().name
        return None

    def current_content(self) -> str | None:
        """Content of the current release if every file in it is as its manifest says, else an assertion fails."""
        if self.current is None:
            return None
        facts = self.facts()
        assert facts.current is not None and facts.damaged[facts.current] == []
        return next(entry.content for entry in facts.releases if entry.id == facts.current)

    def tree(self) -> dict[str, bytes]:
        """The files of the current release."""
        folder = self.root / "current"
        return {
            str(path.relative_to(folder)): path.read_bytes()
            for path in sorted(folder.rglob("*"))
            if path.is_file() and path.name != ".dfo-manifest.json"
        }

    def traces(self) -> list[str]:
        """What a command that died may have left on the target."""
        found = [*self.root.glob("releases/*.partial"), *self.root.glob("tmp/lock-*"), *self.root.glob("current.*")]
        return [str(path.relative_to(self.root)) for path in [*found, *self.root.glob("lock")]]

    def dfo(self, *arguments: str, program: str = "", trick: str = "") -> list[str]:
        """argv that runs `dfo` on this bench in a process of its own."""
        self.write("inventory.yaml", INVENTORY.format(root=self.root, python=sys.executable, keep=self.config.keep))
        trick_file = self.project / "trick.json"
        trick_file.write_text(json.dumps([program, trick]))
        return [sys.executable, __file__, str(trick_file), *arguments, "-i", str(self.project / "inventory.yaml")]

    def broken_deploy(self, place: str, action: str) -> subprocess.CompletedProcess[str]:
        """`dfo deploy` with `action` right before the function `place` of the transaction."""
        argv = self.dfo("deploy", program="apply", trick=before(place, action))
        return subprocess.run(argv, capture_output=True, text=True, timeout=60)


def make_bench(folder: Path) -> Bench:
    bench = Bench(folder / "project", folder / "target")
    bench.write("pkg/__init__.py", "version = 1\n")
    bench.write("pkg/model.py", "from . import version\n")
    bench.write("pkg/old.py", "import json\n")
    bench.write('pkg/it\'s "a"\nname é.txt', "odd\n")
    return bench


def main() -> int:
    import orchestrator.transport
    from orchestrator.cli import main as dfo

    program, trick = json.loads(Path(sys.argv[1]).read_text())
    orchestrator.transport.open_transport = lambda target, **_: TrickTransport(program, trick)
    sys.argv = ["dfo", *sys.argv[2:]]
    return dfo()


if __name__ == "__main__":
    sys.exit(main())

__all__ = ["REMOTE_DIES", "Bench", "before", "make_bench"]

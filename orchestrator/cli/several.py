"""One command for several targets at once: each in a thread, with a block of output of its own."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TextIO

from orchestrator.cli.runtime import Runtime

if TYPE_CHECKING:
    from orchestrator.errors import DfoError

#: More than one container may live on a node, and its sshd turns newcomers away from ten at a time on.
AT_ONCE = 8

Work = Callable[[Runtime], Mapping[str, object]]


def chosen(rt: Runtime, *, group: str | None) -> list[str]:
    """The targets of the inventory, or those of a group. Raises UsageError `unknown_target`."""
    from orchestrator.errors import UsageError
    from orchestrator.hints import did_you_mean

    file = rt.inventory.file
    names = [name for name, target in file.targets.items() if group is None or group in target.groups]
    if not names:
        guess = did_you_mean(str(group), file.groups)
        raise UsageError(
            "unknown_target",
            f"no target is in group `{group}`",
            why=f"the inventory has the groups {', '.join(file.groups) or '(none)'}",
            fix=f"did you mean `{guess}`?" if guess and guess != group else "name it under `groups` of a target",
        )
    return names


@dataclass
class _Part:
    """One target: what it wrote, in order, and how it ended."""

    rt: Runtime
    written: list[tuple[TextIO, str]]
    result: Mapping[str, object] = field(default_factory=dict)
    error: DfoError | None = None

    @property
    def name(self) -> str:
        assert self.rt.target_option is not None
        return self.rt.target_option

    def run(self, work: Work) -> None:
        from orchestrator.errors import DfoError

        self.rt.console.say(f"`{self.name}`")
        try:
            self.result = work(self.rt)
        except DfoError as error:
            self.error = error
        except Exception as error:
            from orchestrator.cli.report_bug import bug

            self.error = bug(error, sys.argv[1:])
        finally:
            self.rt.close()

    def show(self) -> None:
        """The whole block at once, so that blocks do not mix."""
        if self.error is not None and not self.rt.console.json:
            self.rt.console.error(self.error)
        for stream, text in self.written:
            stream.write(text)
            stream.flush()

    def as_dict(self) -> dict[str, object]:
        code = self.error.exit_code if self.error else 0
        outcome = {"error": self.error.as_dict()} if self.error else {"result": dict(self.result)}
        return {"target": self.name, "ok": self.error is None, "exit_code": code, **outcome}


class _Recorder(io.StringIO):
    """A stream that remembers what is written, together with what other streams got meanwhile."""

    def __init__(self, written: list[tuple[TextIO, str]], stream: TextIO) -> None:
        super().__init__()
        self._written, self._stream = written, stream

    def write(self, text: str, /) -> int:
        self._written.append((self._stream, text))
        return len(text)


def for_each(rt: Runtime, names: Sequence[str], work: Work) -> None:
    """Do `work` for every target. Prints a block each, and one result; raises for the first target that failed."""
    parts = [_part(rt, name) for name in names]
    with ThreadPoolExecutor(AT_ONCE) as pool:
        running = {pool.submit(part.run, work): part for part in parts}
        try:
            for future in as_completed(running):
                future.result()
                running[future].show()
        except KeyboardInterrupt:
            # Without its connection each command ends, and what it did on its target is undone there.
            for future, part in running.items():
                future.cancel()
                part.rt.close()
            raise
    targets = [part.as_dict() for part in parts]
    failed = [part for part in parts if part.error is not None]
    if failed:
        raise _several_failed(failed, len(parts), targets)
    rt.console.say(f"all {len(parts)} targets done")
    rt.console.result(targets=targets)


def _part(rt: Runtime, name: str) -> _Part:
    written: list[tuple[TextIO, str]] = []
    console = replace(
        rt.console,
        progress=False,
        out=_Recorder(written, rt.console.out),
        err=_Recorder(written, rt.console.err),
    )
    return _Part(rt.beside(name, console), written)


def _several_failed(failed: Sequence[_Part], number: int, targets: list[dict[str, object]]) -> DfoError:
    first = failed[0].error
    assert first is not None
    names = ", ".join(f"`{part.name}`" for part in failed)
    return type(first)(
        first.kind,
        f"{len(failed)} of {number} targets failed: {names}",
        why=f"`{failed[0].name}`: {first.what}",
        fix="each block above says why and what to do; the other targets are done",
        targets=targets,
    )


__all__ = ["chosen", "for_each"]

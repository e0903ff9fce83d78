"""How a program and its answer travel through a bare `run argv` transport.

To the target, on stdin: `<n>\\n` + n bytes of Python source, `<m>\\n` + m bytes of JSON request, then the
payload until end of file. argv stays short, fixed and ASCII, because `pct` and a C locale damage anything else.

From the target, on stdout: JSON text sequences (RFC 7464: each record starts with the byte 0x1E), so that a
chatty login profile in front of them cannot be mistaken for an answer. A `data` record is followed by exactly
`n` raw bytes. The last record is `done` or `fail`; without one, the program did not finish, whatever its exit
code says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

RECORD = b"\x1e"
MAX_RECORD = 64 * 1024 * 1024

#: Reads its program and request from stdin; works on any Python 3.
BOOTSTRAP = (
    "import sys;r=sys.stdin.buffer;"
    "s=r.read(int(r.readline()));"
    "exec(compile(s,'dfo-remote','exec'),{'__name__':'__main__'})"
)


USES = b"# uses: "


@cache
def source_of(program: str) -> bytes:
    """The base every program shares, the fragments its first line names (`# uses: _lock`), and itself, as one source.

    A fragment may name others; each is included once, before whoever needs it.
    """
    return b"\n".join([_part("_base"), *(_part(name) for name in _with_fragments(program))])


def _with_fragments(name: str) -> list[str]:
    first = _part(name).partition(b"\n")[0]
    needs = first.removeprefix(USES).decode().split() if first.startswith(USES) else []
    order = [part for need in needs for part in _with_fragments(need)]
    return list(dict.fromkeys([*order, name]))


def _part(name: str) -> bytes:
    return (files("orchestrator.remote") / "programs" / f"{name}.py").read_bytes()


def argv_for(python: str) -> tuple[str, ...]:
    # -I: neither the folder we happen to start in nor PYTHON* variables decide what our imports mean.
    return (python, "-I", "-c", BOOTSTRAP)


def stdin_for(program: str, request: Mapping[str, object], payload: Iterable[bytes] = ()) -> Iterator[bytes]:
    source, body = source_of(program), json.dumps(request).encode()
    yield b"%d\n" % len(source) + source + b"%d\n" % len(body) + body
    yield from payload


@dataclass(slots=True)
class Record:
    """One record from the target: its JSON object, and raw bytes if its type is `data`."""

    fields: dict[str, object]
    data: bytes = b""

    @property
    def type(self) -> str:
        return str(self.fields.get("t"))


class WireError(Exception):
    """The answer is not what a program of ours writes."""


@dataclass
class Decoder:
    """Turns chunks of stdout into records. Bytes before the first record are kept as `noise`."""

    noise: bytearray = field(default_factory=bytearray)
    _buffer: bytearray = field(default_factory=bytearray)

    def feed(self, chunk: bytes) -> Iterator[Record]:
        self._buffer += chunk
        while (record := self._next()) is not None:
            yield record

    def _next(self) -> Record | None:
        start = self._buffer.find(RECORD)
        if start != 0:
            end = len(self._buffer) if start < 0 else start
            self.noise += self._buffer[:end][: 4096 - len(self.noise)]
            del self._buffer[:end]
        end = self._buffer.find(b"\n")
        if end < 0:
            if len(self._buffer) > MAX_RECORD:
                raise WireError("a record of more than 64 MiB")
            return None
        try:
            fields = json.loads(self._buffer[1:end])
        except ValueError as error:
            raise WireError(f"a record that is not JSON: {error}") from error
        if not isinstance(fields, dict):
            raise WireError("a record that is not an object")
        size = fields.get("n", 0) if fields.get("t") == "data" else 0
        if not isinstance(size, int) or not 0 <= size <= MAX_RECORD:
            raise WireError("a data record with an impossible size")
        if len(self._buffer) < end + 1 + size:
            return None
        data = bytes(self._buffer[end + 1 : end + 1 + size])
        del self._buffer[: end + 1 + size]
        return Record(fields, data)

"""Commands through a real sshd, and through it into a real container: bytes, words, ends."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from bench.node import Node
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.errors import DeadlineError
from orchestrator.transport import Transport

from .reach import CLIENTS, pct_to, served, ssh_to

ECHO = ("python3", "-c", "import json, sys; print(json.dumps(sys.argv[1:]))")
BLOB = os.urandom(1_000_000) * 50
HASH = hashlib.sha256(BLOB).hexdigest().encode()
WAYS = [f"{way} {client}" for way in ("ssh", "pct") for client in CLIENTS]


@pytest.fixture(scope="module", params=WAYS)
def way(request: pytest.FixtureRequest, lab: Node) -> Iterator[Transport]:
    """Each transport through each client, on one connection for all tests here."""
    kind, client = request.param.split()
    with (ssh_to if kind == "ssh" else pct_to)(lab.ssh, client=client) as transport:
        yield transport


words = st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=20)
strange = ["", "-", "--", "--keep-env", "$(id)", "`id`", "'", '"', "\\", "\n", "\r\n", " a  b ", "*", "é", "日本", "%s"]


@pytest.fixture(scope="module")
def echo(way: Transport) -> Callable[[list[str]], list[str]]:
    def through(argv: list[str]) -> list[str]:
        done = way.run((*ECHO, *argv), deadline=30)
        assert (done.returncode, done.stderr) == (0, b"")
        answer: list[str] = json.loads(done.stdout)
        return answer

    return through


@given(argv=st.lists(words | st.sampled_from(strange), max_size=5))
@settings(max_examples=25)
def test_every_argv_arrives_unchanged(echo: Callable[[list[str]], list[str]], argv: list[str]) -> None:
    assert echo(argv) == argv


@given(name=words.filter(lambda name: "/" not in name and name not in ("", ".", "..") and len(name.encode()) < 250))
@settings(max_examples=10)
def test_every_file_name_arrives_unchanged(way: Transport, name: str) -> None:
    path = f"/tmp/names/{name}"
    script = 'mkdir -p /tmp/names && cat > "$1" && cat "$1" && rm -r /tmp/names'
    done = way.run(("sh", "-c", script, "sh", path), stdin=[name.encode()], deadline=30)
    assert (done.returncode, done.stdout.decode()) == (0, name)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 3", 3), ("exit 255", 255), ("kill -9 $$", -9)])
def test_the_status_is_that_of_the_command(way: Transport, script: str, code: int) -> None:
    assert way.run(("sh", "-c", script), deadline=30).returncode == code


def test_a_program_that_is_not_there(way: Transport) -> None:
    done = way.run(("/no/such/program",), deadline=30)
    assert done.returncode == 127 and b"/no/such/program" in done.stderr


def test_50_MB_up(way: Transport) -> None:
    assert way.run(("sha256sum",), stdin=[BLOB], deadline=60).stdout[:64] == HASH


def test_50_MB_down(way: Transport) -> None:
    with way.stream(("cat",), stdin=[BLOB]) as stream:
        digest = hashlib.sha256()
        for chunk in stream:
            digest.update(chunk)
        assert stream.finish().returncode == 0
    assert digest.hexdigest().encode() == HASH


def test_empty_input_ends(way: Transport) -> None:
    assert way.run(("cat",), deadline=10).stdout == b""
    assert way.run(("cat",), stdin=[b"", b""], deadline=10).stdout == b""


def test_a_command_that_reads_nothing_is_no_trouble(way: Transport) -> None:
    assert way.run(("true",), stdin=[BLOB], deadline=30).returncode == 0


def test_a_flood_of_stderr_neither_blocks_nor_fills_memory(way: Transport) -> None:
    script = "yes noise | head -c 20000000 >&2; echo done; echo last words >&2; exit 4"
    done = way.run(("sh", "-c", script), deadline=60)
    assert (done.returncode, done.stdout) == (4, b"done\n")
    assert len(done.stderr) <= 64 * 1024 and done.last_words.endswith("last words")


def test_output_comes_as_it_is_written_and_silence_ticks(way: Transport) -> None:
    with way.stream(("sh", "-c", "echo one; sleep 2.5; echo two")) as stream:
        seen = [(time.monotonic(), chunk) for chunk in stream]
        assert stream.finish().returncode == 0
    assert [chunk for _, chunk in seen if chunk] == [b"one\n", b"two\n"]
    assert b"" in [chunk for _, chunk in seen]
    assert seen[-1][0] - seen[0][0] > 2


def test_input_is_sent_as_it_is_made(way: Transport) -> None:
    answered = threading.Event()

    def ask_and_wait() -> Iterator[bytes]:
        yield b"ping\n"
        assert answered.wait(20)
        yield b"pong\n"

    with way.stream(("cat",), stdin=ask_and_wait()) as stream:
        said = b""
        for chunk in stream:
            said += chunk
            if said == b"ping\n":
                answered.set()
    assert said == b"ping\npong\n"


def test_an_error_of_the_source_of_stdin_comes_out(way: Transport) -> None:
    def broken() -> Iterator[bytes]:
        yield b"some"
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        way.run(("cat",), stdin=broken(), deadline=30)


def test_a_deadline_ends_the_wait(way: Transport) -> None:
    started = time.monotonic()
    with pytest.raises(DeadlineError) as caught:
        way.run(("sleep", "1000"), deadline=1)
    assert time.monotonic() - started < 6
    assert "`sleep` did not finish in 1 s" in caught.value.what


def test_many_at_once_share_one_connection(way: Transport, lab: Node) -> None:
    """Twice as many as there are channels: those that are too many wait."""
    way.run(("true",), deadline=30)
    before = served(lab)
    with ThreadPoolExecutor(16) as pool:
        codes = list(
            pool.map(lambda n: way.run(("sh", "-c", f"sleep 0.3; exit {n}"), deadline=30).returncode, range(16))
        )
    assert codes == list(range(16))
    assert served(lab) == before


def test_the_locale_is_utf_8_whatever_the_node_has(way: Transport) -> None:
    assert way.run(("printenv", "LC_ALL"), deadline=30).stdout == b"C.UTF-8\n"

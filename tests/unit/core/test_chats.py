"""Reading chats and prompts from JSONL: index, formats, and errors that name file and line."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dflash_core.data import jsonl
from dflash_core.data.chats import ChatIndex, PromptIndex, prompt_sha256
from dflash_core.data.jsonl import JsonLines
from dflash_core.errors import DataError

GOOD = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}


def write(path, *lines) -> str:
    path.write_bytes(b"".join((x if isinstance(x, bytes) else json.dumps(x).encode()) + b"\n" for x in lines))
    return str(path)


def test_both_formats_and_several_files(tmp_path):
    first = write(tmp_path / "a.jsonl", GOOD, {"prompt": "2+2?", "response": "4"})
    second = write(tmp_path / "b.jsonl", {**GOOD, "finish_reason": "length"})
    index = ChatIndex([first, second])
    assert len(index) == 3
    assert index[0].messages == GOOD["messages"]
    assert index[1].messages == [{"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "4"}]
    assert [chat.complete for chat in index] == [True, True, False]
    assert [chat.place for chat in index] == [f"{first}:1", f"{first}:2", f"{second}:1"]
    assert index.validate() == 3
    with pytest.raises(IndexError):
        index[3]


@given(
    st.lists(st.sampled_from(["", "\r", '{"a": 1}', '{"b": "ü漢🎉"}', '{"c": "' + "x" * 90 + '"}'])),
    st.booleans(),
    st.integers(1, 64),
)
@settings(max_examples=150)
def test_index_finds_every_line_with_text(tmp_path_factory, lines, final_break, chunk):
    text = "\n".join(lines) + ("\n" if final_break and lines else "")
    path = tmp_path_factory.mktemp("lines") / "x.jsonl"
    path.write_bytes(text.encode())
    expected = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip("\r")]
    before, jsonl.CHUNK_BYTES = jsonl.CHUNK_BYTES, chunk
    try:
        if not expected:
            # A lone "\r" at the very end is a line of one byte without a break.
            with pytest.raises(DataError, match="is empty"):
                JsonLines([path])
            return
        index = JsonLines([path])
    finally:
        jsonl.CHUNK_BYTES = before
    assert [(index.place(i), index.record(i)) for i in range(len(index))] == [
        (f"{path}:{number}", json.loads(line)) for number, line in expected
    ]


def test_index_of_a_large_file_is_kept_and_renewed(tmp_path, monkeypatch):
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jsonl, "CACHE_FROM_BYTES", 1)
    path = tmp_path / "a.jsonl"
    write(path, GOOD)
    assert len(ChatIndex([path])) == 1
    (kept,) = (tmp_path / "cache" / "line-index").iterdir()
    monkeypatch.setattr(jsonl, "_scan", lambda *_: pytest.fail("the index was not found again"))
    assert len(ChatIndex([path])) == 1
    monkeypatch.undo()
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(jsonl, "CACHE_FROM_BYTES", 1)
    kept.write_bytes(b"torn")
    assert len(ChatIndex([path])) == 1
    write(path, GOOD, GOOD)
    assert len(ChatIndex([path])) == 2


def test_an_unwritable_cache_only_warns(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("DFLASH_CACHE_DIR", str(tmp_path / "file"))
    monkeypatch.setattr(jsonl, "CACHE_FROM_BYTES", 1)
    assert len(ChatIndex([write(tmp_path / "a.jsonl", GOOD)])) == 1
    assert "is not kept" in caplog.text


def test_threads_read_one_index(tmp_path):
    index = ChatIndex([write(tmp_path / "a.jsonl", *({"prompt": str(n), "response": "x"} for n in range(500)))])
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda n: index[n].messages[0]["content"], range(500)))
    assert found == [str(n) for n in range(500)]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"messages": [', "not JSON: Expecting value at column 15"),
        (b"[1, 2]", "a JSON list, not an object"),
        (b'{"prompt": "\xff"}', "not UTF-8: byte 0xff at byte 13"),
        ({"text": "x"}, 'neither "messages" nor "prompt" and "response"'),
        ({"prompt": "x"}, 'neither "messages" nor "prompt" and "response"'),
        ({"prompt": 3, "response": "x"}, "prompt is not a text"),
        ({"messages": []}, '"messages" is an empty list'),
        ({"messages": "x"}, '"messages" is not a list'),
        ({"messages": ["x"]}, r"messages\[0\] is not an object"),
        ({"messages": [{"role": "human", "content": "x"}]}, r"messages\[0\]: unknown role 'human'"),
        ({"messages": [{"role": "user", "content": None}]}, r"messages\[0\].content is missing"),
        ({"messages": [{"role": "user", "content": ["x"]}]}, r"messages\[0\].content is not a text"),
        ({"messages": [{"role": "user", "content": "x"}]}, "no assistant message"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, "the first message is the assistant's"),
    ],
)
def test_bad_lines_name_their_place(tmp_path, line, message):
    path = write(tmp_path / "a.jsonl", GOOD, b"", line)
    index = ChatIndex([path])
    assert index[0].messages
    with pytest.raises(DataError, match=f"^{path}:3: {message}") as error:
        index[1]
    assert error.value.why
    assert error.value.fix
    with pytest.raises(DataError, match=f"{path}:3"):
        index.validate()
    assert index.validate(limit=1) == 1


def test_bad_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere.jsonl: No such file"):
        ChatIndex([tmp_path / "nowhere.jsonl"])
    with pytest.raises(DataError, match="Is a directory"):
        ChatIndex([tmp_path])
    with pytest.raises(DataError, match="no data files"):
        ChatIndex([])
    for content in (b"", b"\n\n\r\n"):
        (tmp_path / "empty.jsonl").write_bytes(content)
        with pytest.raises(DataError, match=r"empty.jsonl is empty"):
            ChatIndex([tmp_path / "empty.jsonl"])
    (tmp_path / "a.jsonl.gz").write_bytes(b"\x1f\x8b\x08")
    with pytest.raises(DataError, match="gzip"):
        ChatIndex([tmp_path / "a.jsonl.gz"])


def test_a_byte_order_mark_is_not_part_of_the_line(tmp_path):
    path = write(tmp_path / "a.jsonl", b"\xef\xbb\xbf" + json.dumps(GOOD).encode())
    assert ChatIndex([path])[0].messages == GOOD["messages"]


def test_tool_calls_need_no_content(tmp_path):
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "arguments": {}}]}
    path = write(tmp_path / "a.jsonl", {"messages": [{"role": "user", "content": "x"}, call]})
    assert ChatIndex([path])[0].messages[1] == call


def test_prompts_of_both_formats_have_one_identity(tmp_path):
    asked = [{"role": "user", "content": "Hi"}]
    path = write(
        tmp_path / "p.jsonl", {"prompt": "Hi"}, {"messages": asked}, {"prompt": "Hi", "response": "ignored"}, GOOD
    )
    prompts = PromptIndex([path])
    assert [prompts[n].messages for n in range(3)] == [asked] * 3
    assert {prompts[n].sha256 for n in range(3)} == {prompt_sha256(asked)}
    with pytest.raises(DataError, match=f"{path}:4: the last message is the assistant's"):
        prompts[3]
    with pytest.raises(DataError, match='neither "prompt" nor "messages"'):
        PromptIndex([write(tmp_path / "q.jsonl", {"question": "x"})])[0]


MILLION = """
import json, resource, sys, time
from dflash_core.config import DataConfig
from dflash_core.data.chats import ChatIndex
from dflash_core.data.packing import BatchStream
from transformers import PreTrainedTokenizerFast
begin = time.perf_counter()
tokenizer = PreTrainedTokenizerFast.from_pretrained(sys.argv[2])
config = DataConfig(train=(sys.argv[1],), max_length=1024, tokens_per_batch=8192)
stream = BatchStream(ChatIndex(config.train), tokenizer, config, seed=0)
batches = stream.start()
first = next(batches)
first_seconds = time.perf_counter() - begin
for _ in range(50):
    last = next(batches)
print(json.dumps({
    "chats": len(stream.index), "first_seconds": first_seconds, "seconds": time.perf_counter() - begin,
    "rss_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, "tokens": last.num_tokens,
    "samples": len(first.sample_ids),
}))
"""


@pytest.mark.slow
def test_a_million_chats_stream_from_an_index(tmp_path, tokenizer):
    """1.1 million chats: the first batch within 30 s, below 1 GB of resident memory."""
    path = tmp_path / "million.jsonl"
    answer = "The answer is a matter of some length and of no consequence. " * 8
    with path.open("w") as stream:
        for number in range(1_100_000):
            stream.write(
                f'{{"messages": [{{"role": "user", "content": "Question {number}?"}}, '
                f'{{"role": "assistant", "content": "{number}: {answer[: 100 + number % 400]}"}}]}}\n'
            )
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    environment = {**os.environ, "DFLASH_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", MILLION, str(path), str(tmp_path / "tokenizer")]
    for run in ("cold", "warm"):
        result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
        measured = json.loads(result.stdout)
        print(run, path.stat().st_size, measured)
        assert measured["chats"] == 1_100_000
        assert measured["first_seconds"] < 30
        assert measured["rss_mb"] < 1000
        assert measured["tokens"] > 0.95 * 8192
    path.unlink()

"""Answers of the target: batching changes nothing, interruption loses nothing, files stay whole."""

import fcntl
import json
import resource

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash_core.config import GenerateConfig
from dflash_core.data import generate
from dflash_core.data.answers import open_answers
from dflash_core.data.chats import ChatIndex, prompt_sha256
from dflash_core.data.encode import render, tokenise
from dflash_core.data.generate import SeededSampling, answer_batch, generate_answers
from dflash_core.errors import DataError
from dflash_core.target import Target


@pytest.fixture
def target(tokenizer) -> Target:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=256, eos_token_id=tokenizer.eos_token_id, initializer_range=0.4,
    )  # fmt: skip
    return Target(LlamaForCausalLM(config))


def prompt_ids(tokenizer, *texts: str) -> list[list[int]]:
    chats = [[{"role": "user", "content": text}] for text in texts]
    return [tokenise(render(c, tokenizer, "", add_generation_prompt=True), tokenizer).tolist() for c in chats]


def write_prompts(path, *texts: str) -> tuple[str]:
    path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in texts))
    return (str(path),)


def read(path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


QUESTIONS = [f"Question {n} {'and more ' * (n % 4)}?" for n in range(7)]


def test_greedy_answers_do_not_depend_on_the_batch(target, tokenizer):
    config = GenerateConfig(max_new_tokens=24)
    ids = prompt_ids(tokenizer, *QUESTIONS)
    together = answer_batch(target, ids, config, seeds=[0] * 7, stop_ids=[])
    alone = [answer_batch(target, [i], config, seeds=[0], stop_ids=[])[0] for i in ids]
    assert together == alone
    assert all(len(answer.ids) == 24 and not answer.complete for answer in together)
    assert len({tuple(answer.ids) for answer in together}) == 7


def test_greedy_answers_are_the_arg_max(target, tokenizer):
    (ids,) = prompt_ids(tokenizer, "Hi")
    answer = answer_batch(target, [ids], GenerateConfig(max_new_tokens=12), seeds=[0], stop_ids=[])[0]
    for token in answer.ids:
        with torch.no_grad():
            assert target.model(torch.tensor([ids])).logits[0, -1].argmax() == token
        ids = [*ids, token]


def test_an_answer_ends_at_its_first_stop_token(target, tokenizer):
    config = GenerateConfig(max_new_tokens=24)
    ids = prompt_ids(tokenizer, *QUESTIONS)
    free = answer_batch(target, ids, config, seeds=[0] * 7, stop_ids=[])
    stop = free[0].ids[5]
    stopped = answer_batch(target, ids, config, seeds=[0] * 7, stop_ids=[stop])
    for answer, whole in zip(stopped, free, strict=True):
        end = whole.ids.index(stop) if stop in whole.ids else 24
        assert answer.ids == whole.ids[:end]
        assert answer.complete == (stop in whole.ids)
    assert stopped[0].complete


def test_sampled_answers_depend_on_seed_and_prompt_only(target, tokenizer):
    config = GenerateConfig(max_new_tokens=24, temperature=1.0, top_p=0.9)
    ids = prompt_ids(tokenizer, *QUESTIONS)
    seeds = list(range(7))
    together = answer_batch(target, ids, config, seeds=seeds, stop_ids=[])
    alone = [answer_batch(target, [i], config, seeds=[s], stop_ids=[])[0] for i, s in zip(ids, seeds, strict=True)]
    assert together == alone
    assert together != answer_batch(target, ids, config, seeds=seeds[::-1], stop_ids=[])


def test_seeded_sampling_has_the_right_distribution():
    logits = torch.tensor([2.0, 1.0, 0.0, -1.0, -30.0])
    draws = 20_000
    sampling = SeededSampling(1.5, 0.95, list(range(draws)), torch.device("cpu"))
    picked = sampling(torch.zeros(draws, 1, dtype=torch.long), logits.expand(draws, -1)).argmax(1)
    p = (logits / 1.5).softmax(0)
    assert p.cumsum(0)[2] < 0.95 < p.cumsum(0)[3]
    p[4] = 0  # outside the nucleus of 0.95
    p = p / p.sum()
    observed = torch.bincount(picked, minlength=5) / draws
    # Five standard deviations of a frequency.
    assert ((observed - p).abs() <= 5 * (p * (1 - p) / draws).sqrt()).all()


def test_sampling_settings_of_the_model_do_not_leak_in(tokenizer, target):
    ids = prompt_ids(tokenizer, *QUESTIONS[:2])
    config = GenerateConfig(max_new_tokens=12)
    plain = answer_batch(target, ids, config, seeds=[0, 0], stop_ids=[])
    model = target.model
    model.generation_config.update(repetition_penalty=9.0, do_sample=True, temperature=0.1, top_k=1)
    wrapped = Target(model)
    assert wrapped.eos_ids == (tokenizer.eos_token_id,)
    assert answer_batch(wrapped, ids, config, seeds=[0, 0], stop_ids=[]) == plain


def test_answers_become_chats_that_can_be_trained_on(tmp_path, target, tokenizer):
    system = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
    path = tmp_path / "prompts.jsonl"
    path.write_text(json.dumps({"prompt": "2+2?"}) + "\n" + json.dumps({"messages": system}) + "\n")
    out = tmp_path / "deep" / "answers.jsonl"
    seen = []
    config = GenerateConfig(prompts=(str(path),), batch_size=1, max_new_tokens=8)
    result = generate_answers(config, target, tokenizer, out, on_progress=lambda p: seen.append(p.answered))
    assert (result.total, result.before, result.answered, result.too_long) == (2, 0, 2, 0)
    assert seen == [1, 2]
    assert 0 < result.tokens <= 16
    assert result.tokens_per_second == result.tokens / result.seconds
    for line in read(out):
        *prompt, answer = line["messages"]
        assert answer["role"] == "assistant"
        assert line["prompt_sha256"] == prompt_sha256(prompt)
        assert line["finish_reason"] in ("stop", "length")
        (ids,) = [tokenise(render(prompt, tokenizer, "", add_generation_prompt=True), tokenizer).tolist()]
        expected = answer_batch(target, [ids], config, seeds=[0], stop_ids=target.eos_ids)[0]
        assert answer["content"] == tokenizer.decode(expected.ids, skip_special_tokens=True)
    assert len(ChatIndex([out])) == 2
    assert [chat.complete for chat in ChatIndex([out])] == [x["finish_reason"] == "stop" for x in read(out)]


def test_a_call_continues_behind_the_answers_on_disk(tmp_path, target, tokenizer):
    prompts = write_prompts(tmp_path / "p.jsonl", *QUESTIONS, QUESTIONS[0])
    config = GenerateConfig(prompts=prompts, batch_size=2, max_new_tokens=6, temperature=1.0)
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    generate_answers(config, target, tokenizer, whole, seed=3)
    assert len(read(whole)) == 7

    class Stop(Exception):
        pass

    def interrupt(progress):
        if progress.answered >= 4:
            raise Stop

    with pytest.raises(Stop):
        generate_answers(config, target, tokenizer, out, seed=3, on_progress=interrupt)
    assert len(read(out)) == 4
    with out.open("a") as stream:
        stream.write('{"messages": [{"role": "us')
    again = generate_answers(config, target, tokenizer, out, seed=3)
    assert (again.total, again.before, again.answered) == (7, 4, 3)

    def by_prompt(path) -> dict:
        return {line["prompt_sha256"]: line for line in read(path)}

    assert by_prompt(out) == by_prompt(whole)
    before = out.read_bytes()
    assert generate_answers(config, target, tokenizer, out, seed=3).answered == 0
    assert out.read_bytes() == before


def test_a_late_compile_while_generating_is_repeated_alone(tmp_path, target, tokenizer, monkeypatch):
    prompts = write_prompts(tmp_path / "p.jsonl", *QUESTIONS)
    config = GenerateConfig(prompts=prompts, batch_size=3, max_new_tokens=6, temperature=1.0)
    generate_answers(config, target, tokenizer, tmp_path / "plain.jsonl")
    compiled = torch.compile(lambda x: x + 1, backend="eager", dynamic=False)
    sizes = iter([3, 3, 5, 5])

    def late(*args, **options):
        answers = answer_batch(*args, **options)
        compiled(torch.ones(next(sizes)))
        return answers

    monkeypatch.setattr(generate, "answer_batch", late)
    generate_answers(config, target, tokenizer, tmp_path / "late.jsonl")
    assert read(tmp_path / "late.jsonl") == read(tmp_path / "plain.jsonl")
    assert next(sizes, None) is None, "the third batch was answered twice"


def test_num_prompts_limits_distinct_prompts(tmp_path, target, tokenizer):
    prompts = write_prompts(tmp_path / "p.jsonl", "a", "a", "b", "c", "d")
    out = tmp_path / "out.jsonl"
    config = GenerateConfig(prompts=prompts, max_new_tokens=3, num_prompts=3)
    assert generate_answers(config, target, tokenizer, out).answered == 3
    assert {line["messages"][0]["content"] for line in read(out)} == {"a", "b", "c"}


def test_prompts_without_room_for_an_answer_are_counted(tmp_path, target, tokenizer):
    prompts = write_prompts(tmp_path / "p.jsonl", "x" * 300, "short")
    result = generate_answers(
        GenerateConfig(prompts=prompts, max_new_tokens=4), target, tokenizer, tmp_path / "out.jsonl"
    )
    assert (result.answered, result.too_long) == (1, 1)


def answer(text: str) -> dict:
    messages = [{"role": "user", "content": text}, {"role": "assistant", "content": "ok"}]
    return {"messages": messages, "prompt_sha256": prompt_sha256(messages[:1]), "finish_reason": "stop"}


@pytest.mark.parametrize(
    ("left", "kept"),
    [
        (b"", 2),
        (b"\n", 2),
        (b'{"messages": [{"role": "user", "content": "\xc3', 2),
        (b"x" * 3_000_000, 2),
        (json.dumps(answer("whole")).encode(), 3),
    ],
)
def test_a_torn_last_line_is_repaired(tmp_path, left, kept):
    path = tmp_path / "out.jsonl"
    whole = b"".join(json.dumps(answer(text)).encode() + b"\n" for text in ("a", "b"))
    path.write_bytes(whole[:-1] + left if left == b"\n" else whole + left)
    with open_answers(path) as file:
        assert len(file.prompts) == kept
        file.append([answer("new")])
    assert [line["messages"][0]["content"] for line in read(path)] == [*"ab", "whole", "new"][:kept] + ["new"] * (
        kept == 2 or kept == 3
    )


def test_a_file_that_is_all_torn_starts_anew(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_bytes(b'{"messages"')
    with open_answers(path) as file:
        file.append([answer("half a pair: \ud83d"), answer("ü漢🎉")])
    assert [line["messages"][0]["content"] for line in read(path)] == ["half a pair: \ud83d", "ü漢🎉"]


def test_a_damaged_line_in_the_middle_is_named(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text('{"broken\n' + json.dumps(answer("a")) + "\n")
    before = path.read_bytes()
    with pytest.raises(DataError, match=f"{path}:1: not JSON"), open_answers(path):
        pass
    assert path.read_bytes() == before


def test_two_writers_are_refused(tmp_path):
    path = tmp_path / "out.jsonl"
    with path.open("wb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(DataError, match="being written by another process"), open_answers(path):
            pass
    with open_answers(path) as file:
        assert not file.prompts


def test_a_full_disk_loses_only_the_batch_it_meets(tmp_path):
    path = tmp_path / "out.jsonl"
    with open_answers(path) as file:
        file.append([answer("a")])
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 20, hard))
        try:
            with pytest.raises(DataError, match=r"out.jsonl: File too large") as error:
                file.append([answer("b")])
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert "run the same command again" in error.value.fix
    with open_answers(path) as file:
        assert len(file.prompts) == 1
        file.append([answer("b")])
    assert [line["messages"][0]["content"] for line in read(path)] == ["a", "b"]

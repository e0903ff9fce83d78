"""A target small enough for seconds: a byte tokenizer that needs no files, random weights, made-up chats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

WORDS = ["the", "cat", "sat", "on", "a", "mat", "and", "saw", "two", "dogs", "run", "far"]
CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def make_tokenizer(template: str = CHATML, merges: tuple[tuple[str, str], ...] = ()) -> PreTrainedTokenizerFast:
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*pieces, *(a + b for a, b in merges)])}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        eos_token="<|im_end|>",
        additional_special_tokens=["<|im_start|>"],
        clean_up_tokenization_spaces=False,
    )
    tokenizer.chat_template = template
    return tokenizer


def write_chats(path: Path, count: int, *, seed: int) -> None:
    rng = torch.Generator().manual_seed(seed)

    def words(n: int) -> str:
        return " ".join(WORDS[int(i)] for i in torch.randint(0, len(WORDS), (n,), generator=rng))

    chats = []
    for number in range(count):
        length = int(torch.randint(4, 9, (1,), generator=rng))
        chats.append(
            {"messages": [
                {"role": "user", "content": f"{seed}-{number} {words(2)}"},
                {"role": "assistant", "content": words(length)},
            ]}
        )  # fmt: skip
    path.write_text("".join(json.dumps(chat) + "\n" for chat in chats))


def write_target(folder: Path, tokenizer: Any, *, layers: int = 6, seed: int = 0) -> None:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=264, hidden_size=32, intermediate_size=64, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=512, tie_word_embeddings=False,
        eos_token_id=tokenizer.eos_token_id, bos_token_id=None, initializer_range=0.1,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

"""The tokenizer that needs no files, and tiny drafters."""

from dataclasses import dataclass, replace

import pytest
import torch
from support.tiny_target import make_tokenizer
from transformers import PreTrainedTokenizerFast

from dflash_core.attention import AttentionBackend, reference_attention
from dflash_core.drafter import DFlashConfig, DFlashDrafter
from dflash_core.objective import Anchors, block_input_ids


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture
def tokenizer_with():
    return make_tokenizer


# A drafter small enough for loops in Python, and the pieces of a target that it needs.
TINY = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 61,
    "num_target_layers": 8,
    "target_layer_ids": (1, 4),
    "mask_token_id": 60,
    "block_size": 4,
    "rope_theta": 1e4,
    "dtype": "float32",
}


@dataclass(frozen=True)
class PackedRow:
    """S packed tokens and their target features `taps [S, n*H]`; padding has document id -1."""

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    document_ids: torch.Tensor
    position_ids: torch.Tensor
    taps: torch.Tensor

    def document(self, number: int) -> "PackedRow":
        rows = self.document_ids == number
        return replace(
            self,
            input_ids=self.input_ids[rows],
            loss_mask=self.loss_mask[rows],
            document_ids=torch.zeros(int(rows.sum()), dtype=torch.long),
            position_ids=self.position_ids[rows],
            taps=self.taps[rows],
        )


@dataclass(frozen=True)
class TinyBench:
    """A drafter with weights large enough that every path matters, a random embedding and a random head."""

    drafter: DFlashDrafter
    embed: torch.Tensor
    head: torch.Tensor

    @property
    def config(self) -> DFlashConfig:
        return self.drafter.config

    def row(self, *lengths: int, prompt: int = 2, padding: int = 0, seed: int = 0) -> PackedRow:
        """Documents of these lengths, the first `prompt` tokens of each unsupervised."""
        rng = torch.Generator().manual_seed(seed)
        ids = [torch.full((length,), number) for number, length in enumerate(lengths)]
        positions = torch.cat([*(torch.arange(length) for length in lengths), torch.zeros(padding, dtype=torch.long)])
        documents = torch.cat([*ids, torch.full((padding,), -1)])
        size = len(positions)
        width = self.config.num_taps * self.config.hidden_size
        return PackedRow(
            input_ids=torch.randint(0, self.config.vocab_size - 1, (size,), generator=rng),
            loss_mask=(positions >= prompt) & (documents >= 0),
            document_ids=documents,
            position_ids=positions,
            taps=torch.randn(size, width, generator=rng, dtype=torch.float64).to(self.drafter.dtype),
        )

    def anchors(self, row: PackedRow, positions: list[int]) -> Anchors:
        """Valid anchors at these rows, in this order."""
        p = torch.tensor(positions)
        return Anchors(positions=p, valid=torch.ones(len(p), dtype=torch.bool), lo=p - row.position_ids[p])

    def embeds(self, row: PackedRow, anchors: Anchors) -> torch.Tensor:
        ids = block_input_ids(row.input_ids, anchors, self.config.block_size, self.config.mask_token_id)
        return self.embed[ids]

    def hidden(
        self, row: PackedRow, anchors: Anchors, *, attention: AttentionBackend = reference_attention
    ) -> torch.Tensor:
        """The parallel forward of all blocks: `[N, B, H]`."""
        layout = anchors.layout(self.config.block_size)
        hidden = self.drafter(
            self.embeds(row, anchors),
            self.drafter.context_features(row.taps),
            layout=layout,
            block_positions=layout.positions(),
            context_positions=row.position_ids,
            attention=attention,
        )
        return hidden.view(len(anchors.positions), self.config.block_size, -1)

    def logits(self, row: PackedRow, anchors: Anchors) -> torch.Tensor:
        """`[N, B, V]`."""
        return self.hidden(row, anchors) @ self.head.T


@pytest.fixture
def tiny_config():
    """A factory of tiny drafter configurations; keywords override."""
    return lambda **overrides: DFlashConfig(**{**TINY, **overrides})


@pytest.fixture
def tiny_bench(tiny_config):
    """A factory of `TinyBench`; keywords override the configuration."""

    def make(*, dtype: torch.dtype = torch.float32, seed: int = 0, std: float = 0.25, **overrides) -> TinyBench:
        rng = torch.Generator().manual_seed(seed)
        config = tiny_config(**overrides)
        drafter = DFlashDrafter(config)
        for parameter in drafter.parameters():
            noise = torch.randn(parameter.shape, generator=rng) * std
            parameter.data = (noise if parameter.dim() > 1 else 1 + noise).to(dtype)
        shape = (config.vocab_size, config.hidden_size)
        embed, head = (torch.randn(shape, generator=rng).to(dtype) for _ in range(2))
        return TinyBench(drafter, embed, head)

    return make

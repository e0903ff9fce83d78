"""Teacher-forced accept length on fixed blocks of held-out chats.

The blocks depend on the seed, the tokenizer and the files only, so the untrained drafter, every evaluation during
training and the final one are measured on the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from itertools import islice
from operator import add

import numpy as np
import torch

from dflash_core.attention import AttentionBackend, make_backend, reference_attention
from dflash_core.compile.gate import Gate
from dflash_core.data.chats import ChatIndex
from dflash_core.data.packing import BatchStream, PackedBatch, StreamState
from dflash_core.drafter import DFlashDrafter
from dflash_core.objective import MetricSums
from dflash_core.pipeline.feature_store import FeatureStore
from dflash_core.pipeline.microstep import ItemMaker, Objective, TrainItem, block_terms
from dflash_core.pipeline.rehearsal import synthetic_batch, synthetic_item
from dflash_core.session import Session


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Ready items, one held-out chat each, with their features in host memory."""

    items: Sequence[TrainItem]
    objective: Objective
    attention: AttentionBackend
    max_length: int

    @classmethod
    def prepare(
        cls,
        session: Session,
        gate: Gate,
        store: FeatureStore | None,
        *,
        check: Callable[[], None] = lambda: None,
    ) -> HeldOut | None:
        """Compute the features of the first `evaluate.num_prompts` held-out chats; None when no file is configured.

        `check` is called before each chat and may raise. Raises DataError when no held-out chat is usable.
        """
        config = session.config
        if not config.data.heldout:
            return None
        objective = replace(session.objective, anchors_per_batch=config.evaluate.anchors_per_sample)
        layer_ids = session.drafter_config.target_layer_ids
        make_item = ItemMaker(session.target, layer_ids, objective, gate, store=store)
        index = ChatIndex(config.data.heldout)
        stream = BatchStream(index, session.tokenizer, config.data, seed=config.seed, shuffle=False)
        rows = islice(_single_chats(stream), config.evaluate.num_prompts)
        items = []
        for batch in rows:
            check()
            items.append(make_item(batch).to("cpu", session.target.dtype))
        if not items:
            raise stream.nothing_usable()
        attention = make_backend(config.train.attention, config.topology.drafters[0])
        return cls(items=items, objective=objective, attention=attention, max_length=config.data.max_length)

    @classmethod
    def synthetic(cls, session: Session) -> HeldOut:
        """One made-up chat of the greatest length: what `rehearse` needs, without reading any."""
        config, drafter = session.config, session.drafter_config
        objective = replace(session.objective, anchors_per_batch=config.evaluate.anchors_per_sample)
        length = config.data.max_length
        single = replace(config, data=replace(config.data, tokens_per_batch=length))
        batch = synthetic_batch(single, drafter.vocab_size)
        item = synthetic_item(batch, drafter, objective, device="cpu", dtype=session.target.dtype)
        attention = make_backend(config.train.attention, config.topology.drafters[0])
        return cls(items=[item], objective=objective, attention=attention, max_length=length)

    def measure(self, drafter: DFlashDrafter, head: torch.Tensor, gate: Gate) -> MetricSums:
        """Sums over all blocks, on the CPU. `head [V, H]` in the drafter's type and on its device."""
        sums = [self._measure(item, drafter, head, gate) for item in self.items]
        return reduce(add, sums).to("cpu")

    def rehearse(self, drafter: DFlashDrafter, head: torch.Tensor, gate: Gate) -> None:
        """One chat, so that whatever `measure` compiles is compiled: then all chats have the same shape."""
        self._measure(self.items[0], drafter, head, gate)

    def _measure(self, item: TrainItem, drafter: DFlashDrafter, head: torch.Tensor, gate: Gate) -> MetricSums:
        if head.device.type == "cuda" or self.attention is not reference_attention:
            item = item.padded(self.max_length)  # a shape per chat would be a compile per chat
        moved = item.to(head.device, drafter.dtype)

        @torch.no_grad()
        def forward() -> MetricSums:
            return block_terms(drafter, head, moved, self.objective, self.attention).metrics

        return gate.run(("held-out", moved.shape_key), forward)


def _single_chats(stream: BatchStream) -> Iterator[PackedBatch]:
    """One row per usable chat, in file order, as long as the chat."""
    for sample in range(len(stream.index)):
        encoded = stream.encode(sample)
        if encoded is not None:
            yield PackedBatch(
                sequence=sample,
                epoch=0,
                input_ids=encoded.input_ids.astype(np.int64),
                loss_mask=encoded.loss_mask,
                document_ids=np.zeros(len(encoded), dtype=np.int64),
                position_ids=np.arange(len(encoded)),
                sample_ids=(sample,),
                next_state=StreamState(),
            )

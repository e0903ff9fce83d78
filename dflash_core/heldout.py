"""Teacher-forced accept length on fixed blocks of held-out chats.

The blocks depend on the seed, the tokenizer and the files only, so the untrained drafter, every evaluation during
training and the final one are measured on the same blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from itertools import islice
from operator import add

import numpy as np
import torch

from dflash_core.compile.gate import Gate
from dflash_core.data.chats import ChatIndex
from dflash_core.data.packing import BatchStream, PackedBatch, StreamState
from dflash_core.drafter import DFlashDrafter
from dflash_core.objective import MetricSums
from dflash_core.pipeline.feature_store import FeatureStore
from dflash_core.pipeline.microstep import ItemMaker, Objective, TrainItem, block_terms
from dflash_core.session import Session


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """Ready items, one held-out chat each, with their features in host memory."""

    items: Sequence[TrainItem]
    objective: Objective
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
        return cls(items=items, objective=objective, max_length=config.data.max_length)

    def measure(self, drafter: DFlashDrafter, head: torch.Tensor, gate: Gate) -> MetricSums:
        """Sums over all blocks, on the CPU. `head [V, H]` in the drafter's type and on its device."""

        @torch.no_grad()
        def forward(item: TrainItem) -> MetricSums:
            return block_terms(drafter, head, item, self.objective).metrics

        sums = []
        for item in self.items:
            # On a GPU the forward may be compiled, and a shape per chat would be a compile per chat.
            fixed = item.padded(self.max_length) if head.device.type == "cuda" else item
            moved = fixed.to(head.device, drafter.dtype)
            sums.append(gate.run(("held-out", moved.shape_key), partial(forward, moved)))
        return reduce(add, sums).to("cpu")


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

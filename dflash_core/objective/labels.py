"""What goes into a block and what it has to predict."""

from __future__ import annotations

import torch
from torch import Tensor

from dflash_core.objective.anchors import Anchors

IGNORED_LABEL = -100


def block_input_ids(input_ids: Tensor, anchors: Anchors, block_size: int, mask_token_id: int) -> Tensor:
    """The ids ``[N·B]`` that are embedded: [x_P, mask, …, mask] per block; ``input_ids [S]``."""
    blocks = input_ids.new_full((len(anchors.positions), block_size), mask_token_id)
    blocks[:, 0] = input_ids[anchors.positions]
    return blocks.reshape(-1)


def block_labels(
    input_ids: Tensor, loss_mask: Tensor, document_ids: Tensor, anchors: Anchors, block_size: int
) -> tuple[Tensor, Tensor]:
    """Labels ``[N, B]`` (token P+k at offset k, `IGNORED_LABEL` where unsupervised) and ``supervised [N, B]`` bool.

    Offset 0 is given, not predicted. Offsets 1, 2, … are supervised up to the first token that is outside the row,
    the document or the loss mask, and never after it: decoding, too, stops at the first miss. All inputs are
    ``[S]``, on one device.
    """
    rows = anchors.positions[:, None] + torch.arange(block_size, device=anchors.positions.device)
    inside = rows < len(input_ids)
    rows = rows.clamp(max=len(input_ids) - 1)
    same_document = document_ids[rows] == document_ids[anchors.positions][:, None]
    usable = inside & same_document & loss_mask[rows] & anchors.valid[:, None]
    usable[:, 0] = anchors.valid
    supervised = usable.cumprod(dim=1).bool()
    supervised[:, 0] = False
    return input_ids[rows].long().masked_fill(~supervised, IGNORED_LABEL), supervised

"""What a drafter learns: anchors, labels, weights, the loss over hidden rows, and the metrics."""

from dflash_core.objective.anchors import Anchors, sample_anchors
from dflash_core.objective.labels import block_input_ids, block_labels
from dflash_core.objective.loss import LossTerms, block_loss
from dflash_core.objective.metrics import MetricSums
from dflash_core.objective.weights import decay_weights, dpace_weights

__all__ = [
    "Anchors",
    "LossTerms",
    "MetricSums",
    "block_input_ids",
    "block_labels",
    "block_loss",
    "decay_weights",
    "dpace_weights",
    "sample_anchors",
]

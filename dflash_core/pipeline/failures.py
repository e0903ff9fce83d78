"""What is said when a run fails: which worker, which step, why, and what to do."""

from __future__ import annotations

import math
import traceback
from collections.abc import Sequence

import torch

from dflash_core.errors import CoreError, WorkerError
from dflash_core.pipeline.control import Failure, StalledError
from dflash_core.pipeline.reducer import MicroResult


class NotFiniteError(Exception):
    """A loss or a gradient is NaN or infinite; the message says which."""


def not_finite(results: Sequence[MicroResult], *, fallback: str) -> tuple[str, NotFiniteError]:
    """Whose micro-batch made a step's gradient NaN or infinite: the first with such a loss, else `fallback`."""
    for result in results:
        if not math.isfinite(float(result.sums.loss_num)):
            chats = ", ".join(str(sample) for sample in result.batch.sample_ids[:8])
            return result.worker, NotFiniteError(
                f"the loss of batch {result.batch.sequence} (chats {chats}) is not finite"
            )
    return fallback, NotFiniteError("the gradient is not finite although every loss is")


def as_core_error(failure: Failure, *, saved: str, stuck: list[str]) -> CoreError:
    """The error for the user. `saved`: a sentence on the state that a resume would find."""
    error = failure.error
    where = f"{failure.worker}, step {failure.step}" if failure.step is not None else failure.worker
    if stuck:
        saved += f"; threads that did not end: {', '.join(stuck)}"
    if isinstance(error, CoreError):
        error.what = f"{where}: {error.what}"
        error.why = "; ".join(part for part in (error.why, saved) if part)
        return error
    what, fix = _explain(error)
    return WorkerError(f"{where}: {what}", f"{_cause(error)}; {saved}", fix)


def _explain(error: BaseException) -> tuple[str, str]:
    if isinstance(error, StalledError):
        return "stalled", "look at that device (nvidia-smi, dmesg), then resume"
    if isinstance(error, NotFiniteError):
        return "a number is not finite", "resume with a lower train.lr or train.clip, or remove the samples named above"
    if _is_out_of_memory(error):
        return (
            "out of memory",
            "lower data.tokens_per_batch, train.anchors_per_batch or topology.queue_size, then resume",
        )
    return "the worker died", "DFO_DEBUG=1 shows the traceback; the run can be resumed"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    text = str(error)
    return isinstance(error, RuntimeError) and ("can't allocate memory" in text or "out of memory" in text)


def _cause(error: BaseException) -> str:
    """Type, message and the innermost line of the error, on one line."""
    first = (str(error).strip().splitlines() or [""])[0][:300]
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames and not _is_ours(error) else ""
    return f"{type(error).__name__}: {first}{place}" if not _is_ours(error) else first


def _is_ours(error: BaseException) -> bool:
    return isinstance(error, StalledError | NotFiniteError)

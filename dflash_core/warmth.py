"""Whether a run finds the compile cache warm, and the time in which it fills one that is cold.

The warm-up stage and training go through the same door, so a cache that either of them has filled is warm for both.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from dflash_core.compile.counting import cache_misses
from dflash_core.compile.fingerprint import Fingerprint, fingerprint
from dflash_core.compile.warmup import Validity, alone, check, write_record
from dflash_core.config import RunConfig
from dflash_core.errors import WarmupError
from dflash_core.pipeline.rehearsal import RehearsalEntry


@dataclass(kw_only=True)
class Filling:
    """A cache while the workers rehearse. `validity` is from before; `record` is there when the block has ended."""

    validity: Validity
    record: Mapping[str, Any] | None = None
    entries: list[dict[str, Any]] = field(default_factory=list)
    _misses: int = field(default_factory=cache_misses)

    @property
    def is_warm(self) -> bool:
        return self.validity.state == "valid"

    def note(self, entry: RehearsalEntry) -> dict[str, Any]:
        """Keep what a worker's rehearsal cost; returns it with `misses`, the compiles that no cache spared."""
        misses = cache_misses()
        noted = {**asdict(entry), "misses": misses - self._misses}
        self._misses = misses
        self.entries.append(noted)
        return noted


@contextmanager
def filling(
    config: RunConfig, *, poll: Callable[[], None] = lambda: None, say: Callable[[str], None] = print
) -> Iterator[Filling]:
    """The block in which the workers of a run rehearse.

    On a cold cache it is alone on it, after waiting for whoever fills it now (`poll` is called meanwhile and may
    raise), and leaves a record if it ends without an error.
    """
    found = run_fingerprint(config)
    validity = check(found)
    with ExitStack() as stack:
        if validity.state != "valid":
            say(f"compile cache {validity}")
            stack.enter_context(alone(poll=poll, on_wait=lambda holder: say(f"waiting: process {holder} fills it")))
            validity = check(found)
        at_work = Filling(validity=validity, record=validity.record if validity.state == "valid" else None)
        yield at_work
        if not at_work.is_warm:
            at_work.record = write_record(found, at_work.entries)


def run_fingerprint(config: RunConfig) -> Fingerprint:
    """What the compiled code of a run depends on."""
    return fingerprint(compile_settings(config), [*config.topology.targets, *config.topology.drafters])


def refuse_cold(config: RunConfig) -> None:
    """Raise WarmupError, with what has changed, unless the cache is warm for this run or nothing is compiled."""
    if not needs_rehearsal(config):
        return
    validity = check(run_fingerprint(config))
    if validity.state != "valid":
        raise WarmupError(
            "the compile cache is not warm, and --require-warm was given",
            str(validity),
            "`dfo launch --warmup-first`, or `dfo cache restore` a saved one, or leave --require-warm out",
        )


def needs_rehearsal(config: RunConfig) -> bool:
    """Whether anything is compiled at all: the reference attention on a CPU is not."""
    devices = [*config.topology.targets, *config.topology.drafters]
    return config.train.attention not in ("auto", "reference") or any(device != "cpu" for device in devices)


def compile_settings(config: RunConfig) -> dict[str, Any]:
    """The shapes and options that compiled code is specialised on."""
    settings = config.to_dict()
    target, drafter = settings["target"], settings["drafter"]
    train = ("anchors_per_batch", "loss", "gamma", "dpace_alpha", "dtype", "attention")
    return {
        "target": {name: target[name] for name in target if name != "chat_template"},
        "drafter": {name: drafter[name] for name in drafter if name != "init_from"},
        "topology": {name: settings["topology"][name] for name in ("targets", "drafters")},
        "tokens_per_batch": settings["data"]["tokens_per_batch"],
        "max_length": settings["data"]["max_length"],
        "held_out_anchors": settings["evaluate"]["anchors_per_sample"] if settings["data"]["heldout"] else None,
        "train": {name: settings["train"][name] for name in train},
    }

"""How long a run trains, and where in its schedule it stands."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Budget:
    """A run ends after `total_steps` updates or `max_seconds` of training, whichever comes first.

    The learning rate follows whichever is further along, so it comes down to its floor at the true end even when time
    ends the run. `floor`: progress already made under the same budget before a resume.
    """

    total_steps: int
    max_seconds: float | None = None
    floor: float = 0.0

    def progress(self, step: int, elapsed_s: float) -> float:
        """Position in [0, 1] of update number `step` (counted from 0) that began after `elapsed_s` of training."""
        by_steps = (step + 0.5) / self.total_steps
        by_time = elapsed_s / self.max_seconds if self.max_seconds is not None else 0.0
        return min(1.0, max(by_steps, by_time, self.floor))

    def ended_by(self, step: int, elapsed_s: float) -> Literal["steps", "time"] | None:
        """What has ended the run after `step` updates, if anything."""
        if step >= self.total_steps:
            return "steps"
        if self.max_seconds is not None and elapsed_s >= self.max_seconds:
            return "time"
        return None

    def remaining_s(self, step: int, elapsed_s: float, seconds_per_step: float) -> float:
        """Estimated seconds until the end."""
        by_steps = (self.total_steps - step) * seconds_per_step
        return by_steps if self.max_seconds is None else min(by_steps, max(0.0, self.max_seconds - elapsed_s))

    def expected_steps(self, step: int, elapsed_s: float, seconds_per_step: float) -> int:
        """Estimated number of the last step; `total_steps` unless time ends the run first."""
        remaining = self.remaining_s(step, elapsed_s, seconds_per_step) / seconds_per_step
        return min(self.total_steps, step + round(remaining))

"""Which pictures a report has, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from orchestrator.report.svg import Bar, Line, bar_chart, column_chart, line_chart, smooth
from orchestrator.runs.run import duration

#: From this many points on, the loss is drawn as a smoothed line over the raw one.
NOISY = 40
Report = Mapping[str, Any]


def charts(report: Report) -> list[list[dict[str, Any]]]:
    """Cells of one or two pictures, each with its title and how to read it; only those there is data for."""
    cells = [[_loss(report)], [_accept(report)], [_offsets(report)], [_speed(report), _stages(report)]]
    filled = [[chart for chart in cell if chart is not None] for cell in cells]
    return [cell for cell in filled if cell]


def _loss(report: Report) -> dict[str, Any] | None:
    points = [(point["step"], point["loss"]) for point in report["loss"] if point["loss"] is not None]
    if not points:
        return None
    lines = [Line(points=points, name=f"{points[-1][1]:.2f}")]
    if len(points) >= NOISY:
        mean = smooth(points, window=max(5, len(points) // 20))
        lines = [Line(points=points, kind="faint"), Line(points=mean, name=f"{mean[-1][1]:.2f}")]
    return {
        "title": "Loss",
        "note": "weighted cross-entropy of the drafted tokens",
        "svg": line_chart(lines, title="Loss over training steps", x_label="step"),
    }


def _accept(report: Report) -> dict[str, Any] | None:
    held_out, train = (
        [(point["step"], point[key]) for point in report["accept_length"] if point[key] is not None]
        for key in ("held_out", "train")
    )
    if not held_out and not train:
        return None
    before = report["accept_length_untrained"]
    lines = [Line(points=train, kind="faint")] if held_out else []
    main = held_out or train
    lines.append(Line(points=main, name=f"{main[-1][1]:.2f}"))
    return {
        "title": "Accept length",
        "note": "tokens per block on held-out text" + (" (faint: training)" if held_out and train else ""),
        "svg": line_chart(
            lines,
            title="Accept length over training steps",
            x_label="step",
            base=(before, f"untrained {before:.2f}") if before is not None else None,
        ),
    }


def _offsets(report: Report) -> dict[str, Any] | None:
    after, before = report["acceptance_by_offset"], report["acceptance_by_offset_untrained"]
    if not after:
        return None
    groups = [("untrained", before)] if len(before) == len(after) else []
    groups.append(("trained", after))
    return {
        "title": "Acceptance by block offset",
        "note": "% of blocks right up to here" + (" (grey: untrained)" if len(groups) == 2 else ""),
        "svg": column_chart(
            [str(offset) for offset in range(1, len(after) + 1)],
            [(name, [100 * value for value in values]) for name, values in groups],
            title="Acceptance by block offset",
            x_label="offset in the block",
        ),
    }


def _speed(report: Report) -> dict[str, Any] | None:
    plain, speculative = report["plain_tokens_per_s"], report["speculative_tokens_per_s"]
    if not plain or not speculative:
        return None
    return {
        "title": "Decoding speed",
        "note": "held-out prompts, one at a time",
        "svg": bar_chart(
            [
                Bar(label="plain", value=plain, text=f"{plain:.1f} tokens/s", kind="other"),
                Bar(label="speculative", value=speculative, text=f"{speculative:.1f} tokens/s"),
            ],
            title="Decoding speed",
        ),
    }


def _stages(report: Report) -> dict[str, Any] | None:
    done = [stage for stage in report["stages"] if stage["seconds"] is not None]
    if not done:
        return None
    return {
        "title": "Where the time went",
        "note": "wall clock of each stage",
        "svg": bar_chart(
            [
                Bar(
                    label=stage["stage"][:16],
                    value=max(0.0, stage["seconds"]),
                    text=clock(stage["seconds"])
                    + (f", exit code {stage['exit_code']:.0f}" if stage["exit_code"] else ""),
                    kind="other" if stage["stage"] != "train" else "main",
                )
                for stage in done
            ],
            title="Time per stage",
        ),
    }


def clock(seconds: float) -> str:
    """`42 s`, `6 min 12 s`, `3 h 10 min`."""
    whole = round(seconds)
    return f"{whole // 60} min {whole % 60:02} s" if 60 <= whole < 3600 else duration(whole)

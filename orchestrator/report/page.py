"""The report as one self-contained HTML page: what its template shows, and in which words."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from itertools import groupby
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from orchestrator.report.build import missing
from orchestrator.report.figures import charts, clock
from orchestrator.resources import bundled
from orchestrator.terminal import printable_lines
from orchestrator.words import count, size, token_rate

Report = Mapping[str, Any]


def render(report: Report) -> str:
    """The page. Raises `jinja2.UndefinedError` for a template that asks for what is not there."""
    environment = Environment(
        loader=FileSystemLoader(bundled("templates")),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_shown,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2").render(
        report=report,
        title=_title(report),
        subtitle=_subtitle(report),
        verdict=verdict(report),
        tiles=tiles(report),
        charts=charts(report),
        prompts=[{**prompt, "spans": spans(prompt), "facts": _prompt_facts(prompt)} for prompt in report["prompts"]],
        drafted=any(prompt["pieces"] and prompt["accepted"] for prompt in report["prompts"]),
        data=_data_rows(report),
        setup=_setup_rows(report),
        environment=_environment_rows(report["environment"]),
        missing=missing(report),
    )


def _shown(value: object) -> object:
    """Text from the target keeps its line breaks; every other control character becomes visible."""
    if isinstance(value, str) and not isinstance(value, Markup):
        return printable_lines(value)
    return value


# --- words ------------------------------------------------------------------------------------------------------


def _title(report: Report) -> str:
    model = (report["model"] or "").rstrip("/").removeprefix("package:").rpartition("/")[2].removesuffix(".gguf")
    return f"DFlash drafter for {model}" if model else "DFlash drafter"


def _subtitle(report: Report) -> str:
    words = [f"run {report['run']} on {report['target']}", f"release {report['release']}"]
    if report["started"] is not None:
        words.append(f"{datetime.fromtimestamp(report['started']).astimezone():%-d %B %Y, %H:%M %Z}")
    if report["seconds"] is not None:
        words.append(f"{clock(report['seconds'])} from start to report")
    return " · ".join(words)


def verdict(report: Report) -> dict[str, str]:
    """One sentence, and whether it is `good`, `bad` or neither (`open`)."""
    before, after, tau = (report[key] for key in ("accept_length_untrained", "accept_length_trained", "tau"))
    if report["lossless"] is False:
        differ = sum(prompt["identical"] is False for prompt in report["prompts"])
        return {
            "kind": "bad",
            "text": f"Not lossless: {count(differ, 'prompt')} decoded to another text than plain decoding.",
        }
    if None in (before, after, tau, report["lossless"]):
        return {"kind": "open", "text": f"Not the whole story: {report['sentence']}."}
    learned = f"accept length {before:.2f} → {after:.2f}"
    if after <= before or tau <= 1:
        return {"kind": "bad", "text": f"The drafter did not learn to draft: {learned}, τ {tau:.2f}."}
    return {"kind": "good", "text": f"The drafter works: {learned}, the same text{_speed(report['speedup'])}."}


def _speed(speedup: float | None) -> str:
    """A higher τ is not yet a faster decoder: on a CPU, verifying a block costs about what its tokens cost."""
    if not speedup:
        return ""
    if speedup >= 1:
        return f" at {speedup:.2f} × the speed of plain decoding"
    return f"; not faster on this device, {speedup:.2f} × plain decoding, because a cycle costs more than it saves"


def tiles(report: Report) -> list[dict[str, Any]]:
    """The headline numbers, most important first. `from` is what a value is compared with."""
    return [
        {
            "label": "Accept length",
            "from": _fixed(report["accept_length_untrained"]),
            "value": _fixed(report["accept_length_trained"]) or "–",
            "note": "tokens per block, held-out, untrained → trained",
            "good": None,
        },
        {
            "label": "τ",
            "from": None,
            "value": _fixed(report["tau"]) or "–",
            "note": "tokens per verification cycle when decoding",
            "good": None,
        },
        {
            "label": "Lossless",
            "from": None,
            "value": {True: "yes", False: "no", None: "–"}[report["lossless"]],
            "note": _identical(report),
            "good": report["lossless"],
        },
        {
            "label": "Speed",
            "from": None,
            "value": f"{report['speedup']:.2f} ×" if report["speedup"] else "–",
            "note": _speeds(report),
            "good": None,
        },
    ]


def _identical(report: Report) -> str:
    same = [prompt["identical"] for prompt in report["prompts"] if prompt["identical"] is not None]
    dtype = report["settings"]["dtype"]
    greedy = "greedy" + (f" {dtype}" if dtype else "")
    return f"{sum(same)} of {len(same)} prompts identical, {greedy}" if same else "not measured"


def _speeds(report: Report) -> str:
    plain, speculative = report["plain_tokens_per_s"], report["speculative_tokens_per_s"]
    if plain is None or speculative is None:
        return "not measured"
    return f"plain {plain:.1f}, speculative {speculative:.1f} tokens/s"


def _fixed(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


# --- prompts and tables -----------------------------------------------------------------------------------------


def spans(prompt: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(kind, text) of an answer: `own` for the target's tokens, `draft` for drafted ones that were accepted.

    The first token comes from reading the prompt. Each cycle then brings its accepted drafts and one token of the
    target's own; the last cycle may be cut by the limit on new tokens.
    """
    pieces, accepted = prompt["pieces"], prompt["accepted"]
    if not pieces or not accepted:
        return [("own", prompt["text"] or "".join(pieces))]
    kinds = ["own"]
    for tokens in accepted:
        kinds += ["draft"] * max(0, tokens - 1) + ["own"]
    kinds += ["own"] * (len(pieces) - len(kinds))
    marked = zip(kinds, pieces, strict=False)
    return [(kind, "".join(piece for _, piece in group)) for kind, group in groupby(marked, key=lambda item: item[0])]


def _prompt_facts(prompt: Mapping[str, Any]) -> str:
    words = []
    if prompt["tau"] is not None:
        words.append(f"τ {prompt['tau']:.2f}")
    if prompt["tokens"] is not None:
        words.append(count(prompt["tokens"], "token"))
    if prompt["plain_seconds"] and prompt["speculative_seconds"]:
        words.append(f"{prompt['plain_seconds']:.1f} s plain, {prompt['speculative_seconds']:.1f} s speculative")
    if prompt["identical"] is not None:
        words.append("identical to plain decoding" if prompt["identical"] else "differs from plain decoding")
    return " · ".join(words)


def _data_rows(report: Report) -> list[tuple[str, str, str]]:
    rows = []
    for name, title in (("train", "training"), ("heldout", "held-out")):
        found = report["data"][name]
        if found is None:
            continue
        amount = count(int(found["samples"]), "prompt") if found["samples"] is not None else "–"
        rows.append((title, amount, found["sha256"] or "–"))
    return rows


def _setup_rows(report: Report) -> list[tuple[str, str]]:
    settings = report["settings"]
    rows = [
        ("training steps", f"{report['train_steps']:,}" if report["train_steps"] is not None else None),
        ("devices", ", ".join(report["devices"]) or None),
        *_throughput_rows(report["throughput"]),
        *(
            (key.replace("_", " "), f"{settings[key]:g}" if settings[key] is not None else None)
            for key in ("block_size", "max_new_tokens", "temperature")
        ),
        ("evaluated in", settings["dtype"]),
        ("how it ended", report["sentence"]),
    ]
    return [(name, value) for name, value in rows if value is not None]


def _throughput_rows(found: Mapping[str, Any]) -> list[tuple[str, str | None]]:
    rates = {role: found[f"{role}_tokens_per_s"] for role in ("targets", "drafters")}
    idle = {device: share for device, share in found["device_idle"].items() if share is not None}
    wait = found["queue_wait_s"]
    return [
        ("speed", ", ".join(f"{role} {token_rate(rate)}" for role, rate in rates.items() if rate is not None) or None),
        ("wait for features", None if wait is None else f"{wait:.2g} s per batch"),
        ("idle", ", ".join(f"{device} {share:.0%}" for device, share in idle.items()) or None),
    ]


def _environment_rows(snapshot: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    if snapshot is None:
        return []
    torch, driver, memory, cpu = (snapshot[key] or {} for key in ("torch", "driver", "memory", "cpu"))
    versions = {package["name"]: package["version"] for package in snapshot["packages"]}
    cards = [str(gpu.get("name")) for gpu in snapshot["gpus"]]
    rows = [
        ("python", f"{snapshot['python']['implementation']} {snapshot['python']['version']}"),
        ("torch", torch.get("version") or torch.get("import_error") or "not installed"),
        ("CUDA", torch.get("cuda") or "none (CPU build)"),
        *(
            (name, versions[name])
            for name in ("triton", "transformers", "tokenizers", "safetensors", "numpy")
            if name in versions
        ),
        ("packages", f"{len(versions):,}"),
        ("GPUs", f"{len(cards)} × {cards[0]}" if cards else "none"),
        *([("driver", driver["library"])] if driver.get("library") else []),
        ("processor", f"{cpu['model']}, {cpu['usable']} of {count(cpu['cores'], 'core')}"),
        ("memory", size(memory["total"])),
        ("system", f"{snapshot['os']['name']}, kernel {snapshot['os']['kernel']}, {snapshot['os']['machine']}"),
        ("recorded", snapshot["taken"]),
    ]
    return rows

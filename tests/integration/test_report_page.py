"""The report in a real browser: it loads without an error or a request, and the numbers can be seen."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.report.build import build, write
from orchestrator.report.collect import collect
from orchestrator.report.page import render
from orchestrator.session import Session
from orchestrator.transport.local import LocalTransport

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: the page is NOT tested")
BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
if BROWSER is None or DRIVER is None:
    pytest.skip("no chromium and chromedriver: the page is NOT tested", allow_module_level=True)

FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1100,1000",
)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report of a run folder, as `dfo report` makes it."""
    root = tmp_path_factory.mktemp("target")
    run = root / "runs" / "3"
    (run / "logs").mkdir(parents=True)
    spec = {"run": 3, "release": "20261130-1612-9f3c1a", "devices": ["cpu"], "created": 1796067000.0, "marker": "m"}
    state = {
        "state": "succeeded",
        "reason": "finished",
        "stage": "export",
        "started": 1796067000.0,
        "ended": 1796067340.0,
    }
    events = [
        {"event": "eval", "step": 0, "accept_length": 1.0, "acceptance_by_offset": [0.0, 0.0, 0.0]},
        *({"event": "step", "step": step, "loss": 8 / (1 + step / 20), "accept_length": 1.3} for step in range(1, 60)),
        {"event": "eval", "step": 60, "accept_length": 1.6, "acceptance_by_offset": [0.4, 0.15, 0.05]},
    ]
    prompt = {
        "id": 1,
        "prompt": "What is <b>bold</b>?",
        "text": "A tag.",
        "pieces": ["A", " tag", "."],
        "accepted": [2],
        "tokens": 3,
        "identical": True,
        "tau": 2.0,
    }
    evaluation = {
        "train_steps": 60,
        "accept_length_untrained": 1.0,
        "accept_length_trained": 1.63,
        "tau": 1.47,
        "lossless": True,
        "plain_tokens_per_s": 14.0,
        "speculative_tokens_per_s": 21.0,
        "prompts": [prompt],
    }
    stages = [{"stage": "train", "event": "begin", "t": 1.0}, {"stage": "train", "event": "end", "t": 215.0}]
    (run / "run.json").write_text(json.dumps(spec))
    (run / "state.json").write_text(json.dumps(state))
    (run / "evaluation.json").write_text(json.dumps(evaluation))
    for name, lines in (("events.jsonl", events), ("stages.jsonl", stages)):
        (run / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    session = Session("lab", LocalTransport(), str(root), sys.executable)
    report = build(collect(session, None), target="lab", now=1796067400.0)
    return write(report, render(report), tmp_path_factory.mktemp("report"))[1]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = BROWSER
    for flag in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


def test_it_loads_without_errors_or_requests(browser: webdriver.Chrome, page: Path) -> None:
    browser.get_log("performance")
    browser.get(page.as_uri())
    assert browser.title == "DFlash drafter – run 3"
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [m["params"] for m in messages if m["method"] == "Network.requestWillBeSent"]
    ours = {params["request"]["url"] for params in asked if params["documentURL"] == page.as_uri()}
    assert {url for url in ours if not url.startswith("data:")} == {page.as_uri()}


def test_the_numbers_are_seen_first(browser: webdriver.Chrome, page: Path) -> None:
    browser.get(page.as_uri())
    tiles = browser.find_elements("css selector", ".tiles > div")
    assert [tile.text.split("\n")[:2] for tile in tiles] == [
        ["Accept length", "1.00 → 1.63"],
        ["τ", "1.47"],
        ["Lossless", "yes"],
        ["Speed", "1.50 ×"],
    ]
    assert all(tile.is_displayed() and tile.rect["y"] + tile.rect["height"] < 600 for tile in tiles)


def test_pictures_are_drawn_and_drafted_tokens_marked(browser: webdriver.Chrome, page: Path) -> None:
    browser.get(page.as_uri())
    pictures = browser.find_elements("css selector", "figure svg")
    assert len(pictures) == 5
    assert all(picture.size["width"] > 300 and picture.size["height"] > 25 for picture in pictures)
    assert [mark.text for mark in browser.find_elements("css selector", ".answer mark")] == [" tag"]
    assert browser.find_element("css selector", ".answer h3").text == "What is <b>bold</b>?"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_can_be_read_in_both_schemes(browser: webdriver.Chrome, page: Path, scheme: str) -> None:
    """Contrast of at least 4.5 to 1 (WCAG AA) for every kind of text."""
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    browser.get(page.as_uri())
    for selector in ("h1", ".soft", ".verdict", "dd.value", "dd.value .from", "dd.good", "figcaption", "mark", "th"):
        element = browser.find_element("css selector", selector)
        colour, ground = browser.execute_script(
            "let e = arguments[0], seen = getComputedStyle(e).color;"
            "while (getComputedStyle(e).backgroundColor.endsWith(' 0)')) e = e.parentElement;"
            "return [seen, getComputedStyle(e).backgroundColor]",
            element,
        )
        assert contrast(colour, ground) >= 4.5, (selector, colour, ground)


def test_nothing_sticks_out_of_a_narrow_window(browser: webdriver.Chrome, page: Path) -> None:
    metrics = {"width": 360, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    browser.get(page.as_uri())
    assert browser.execute_script("return document.documentElement.scrollWidth") <= 360
    browser.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def contrast(one: str, other: str) -> float:
    """Ratio of the relative luminances of two `rgb(r, g, b)` colours (WCAG 2.2)."""

    def luminance(colour: str) -> float:
        parts = [int(part) / 255 for part in colour[colour.index("(") + 1 : -1].split(",")[:3]]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)

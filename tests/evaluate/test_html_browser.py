"""The pages in a real browser: not blank, in both colour schemes, without overflow, and with nothing loaded."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from quantkit.checkpoint import open_checkpoint
from quantkit.compare import Comparison, Entry
from quantkit.gates import gate, load_policy
from quantkit.manifest import read_manifest
from quantkit.pages import comparison_page, report_page, write_page
from quantkit.pipeline import convert
from quantkit.plan import make_plan
from quantkit.recipe import load_recipe
from tests.browser import Browser, browsing, find_browser
from tests.samples import sample_metrics, sample_report, with_output_errors, with_report

CHROMIUM = find_browser()
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed (Debian: apt-get install chromium)"),
    pytest.mark.xdist_group("browser"),
]

WIDTHS = [500, 800, 1400]
SCHEMES = ["light", "dark"]
PAGES = ["report", "long", "comparison", "long comparison"]

# Elements that stick out of the page and whose own container does not scroll.
STICKING_OUT = """
[...document.body.querySelectorAll("*")].filter(element =>
  element.getBoundingClientRect().right > document.documentElement.clientWidth + 1 && !element.closest(".wide, svg")
).map(element => element.tagName + ": " + element.textContent.slice(0, 40))
"""


@pytest.fixture(scope="module")
def pages(zoo: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A report that passes, one whose every name is too long, and the same of a comparison, as files."""
    root = tmp_path_factory.mktemp("browser")
    made = convert(make_plan(open_checkpoint(str(zoo("llama"))), load_recipe("rtn-g64")), root / "made").path
    artifact = with_report(made, root / "artifact")
    manifest = with_output_errors(read_manifest(artifact))
    report, verdict = sample_report(manifest), gate(artifact, load_policy("smoke"))
    name = "a_name_without_a_place_to_break_it_" * 6
    metrics = sample_metrics() | {"perplexity": {f"/{name}/text.txt": sample_metrics()["perplexity"]["wiki-en"]}}
    subject = report.subject.model_copy(update={"name": name})
    strained = report.model_copy(update={"subject": subject, "metrics": metrics, "notes": [name]})
    entries = [Entry(root, manifest, sample_report(manifest, metrics=sample_metrics(1.02 + n / 50))) for n in range(6)]
    texts = {
        "report": report_page(report, manifest, verdict),
        "long": report_page(strained, manifest.model_copy(update={"notes": [name]}), f"not judged: {name}"),
        "comparison": comparison_page(Comparison(entries, [f"recipe-{n}" for n in range(6)])),
        "long comparison": comparison_page(
            Comparison([Entry(root, manifest, strained)] * 2, [f"{name}{n}" for n in range(2)])
        ),
    }
    for page, text in texts.items():
        write_page(text, root / f"{page}.html")
    return {page: root / f"{page}.html" for page in texts}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    assert CHROMIUM is not None
    with browsing(CHROMIUM) as found:
        yield found


def pixels(png: bytes) -> np.ndarray:
    """Grey values from 0 (black) to 255, `[height, width]`."""
    return np.asarray(Image.open(io.BytesIO(png)).convert("L"))


@pytest.mark.parametrize("page", PAGES)
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_overflows_the_width_of_the_page(
    page: str, width: int, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages[page], width, "light")
    assert browser.value("document.documentElement.scrollWidth") == width
    assert browser.value(STICKING_OUT) == []


@pytest.mark.parametrize("page", PAGES)
def test_the_page_shows_in_light_and_dark_what_it_holds(page: str, browser: Browser, pages: dict[str, Path]) -> None:
    shown = {}
    for scheme in SCHEMES:
        browser.open(pages[page], 800, scheme)
        shown[scheme] = pixels(browser.screenshot())
    light, dark = shown["light"], shown["dark"]
    assert light.shape == dark.shape
    assert np.median(light) > 240
    assert np.median(dark) < 40
    for image, paper in ((light, np.median(light)), (dark, np.median(dark))):
        ink = np.abs(image.astype(int) - paper) > 60
        assert 0.01 < ink.mean() < 0.5
        # No screenful without a word or a picture on it.
        screens = [ink[start : start + 900] for start in range(0, len(ink) - 900, 900)]
        assert all(screen.mean() > 0.002 for screen in screens)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_and_picture_can_be_told_from_the_paper(
    scheme: str, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["report"], 800, scheme)
    contrasts = browser.value(
        """(() => {
          const parts = text => text.match(/[\\d.]+/g).slice(0, 3).map(value => {
            const share = value / 255;
            return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
          });
          const light = text => { const [r, g, b] = parts(text); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
          const paper = light(getComputedStyle(document.body).backgroundColor);
          const words = [...document.querySelectorAll("h1, h2, h3, p, td, th, dt, dd, li, summary, figcaption, small")];
          const colours = [...words.map(word => getComputedStyle(word).color),
                           ...[...document.querySelectorAll("svg text")].map(word => getComputedStyle(word).fill)];
          return [...new Set(colours)].map(colour => {
            const pair = [light(colour), paper].sort((a, b) => b - a);
            return [colour, (pair[0] + 0.05) / (pair[1] + 0.05)];
          });
        })()"""
    )
    assert len(contrasts) >= 3
    # The contrast that the Web Content Accessibility Guidelines ask of small text (level AA).
    assert {colour: ratio for colour, ratio in contrasts if ratio < 4.5} == {}


@pytest.mark.parametrize("page", PAGES)
def test_the_page_asks_for_nothing_and_the_browser_complains_of_nothing(
    page: str, browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages[page], 800, "light")
    assert browser.requests() == [pages[page].resolve().as_uri()]
    assert browser.complaints() == []


def test_numbers_of_a_column_stand_below_each_other(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["report"], 1400, "light")
    edges = browser.value(
        """[...document.querySelectorAll("table")].map(table =>
          [...new Set([...table.querySelectorAll("tbody tr td:nth-child(4)")]
            .filter(cell => getComputedStyle(cell).textAlign == "right")
            .map(cell => Math.round(cell.getBoundingClientRect().right)))].length)"""
    )
    assert max(edges) == 1
    assert browser.value('getComputedStyle(document.querySelector("table")).fontVariantNumeric') == "tabular-nums"


@pytest.mark.parametrize("page", PAGES)
def test_the_page_prints(page: str, browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages[page], 800, "dark")
    pdf = browser.pdf()
    assert pdf.startswith(b"%PDF")
    assert pdf.count(b"/Type /Page\n") + pdf.count(b"/Type /Page ") >= 1

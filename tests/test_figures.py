"""Pictures: the same markup every time, every text escaped, colours left to the page, ids that no two share."""

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from itertools import pairwise

import matplotlib
import numpy as np
import pytest
from markupsafe import Markup

from quantkit.evaluate.breakdown import KL_EDGES
from quantkit.figures import Point, heat_map_picture, histogram_picture, quality_picture
from tests.samples import HOSTILE

BASE = Point("base", 32, 1.0)
POINTS = [Point("rtn-g64", 4.3, 1.33, 1.30, 1.36), Point("rtn-int8", 8.0, 1.004), Point("rtn-3bit", 3.3, 3.9, 3.5, 4.3)]
COUNTS = [*range(len(KL_EDGES)), 5]

PICTURES: dict[str, Callable[[str], Markup]] = {
    "quality": lambda text: quality_picture(text, [Point(text, 4, 1.2), *POINTS], BASE),
    "histogram": lambda text: histogram_picture(text, KL_EDGES, COUNTS, 0.3),
    "heat map": lambda text: heat_map_picture(text, [text, "b"], [text, "1"], [[0.1, None], [0.0, 0.4]]),
}


def parsed(picture: Markup) -> ElementTree.Element:
    return ElementTree.fromstring(str(picture).replace("xlink:href", "href"))  # noqa: S314 - our own markup


def texts(picture: Markup) -> list[str]:
    return [element.text or "" for element in parsed(picture).iter() if element.tag.endswith("text")]


@pytest.mark.parametrize("name", PICTURES)
def test_a_picture_is_the_same_each_time_and_holds_no_date(name: str) -> None:
    first = PICTURES[name]("title")
    np.random.default_rng(1).random()
    assert PICTURES[name]("title") == first
    assert isinstance(first, Markup)
    assert not re.search(r"metadata|\d{4}-\d\d-\d\d|matplotlib", first)


@pytest.mark.parametrize("name", PICTURES)
def test_every_text_is_escaped_and_stays_as_it_is(name: str) -> None:
    found = PICTURES[name](HOSTILE)
    assert "<script" not in found
    assert "&lt;script&gt;" in found
    root = parsed(found)
    assert root.get("aria-label") == HOSTILE
    assert root.get("role") == "img"
    if name != "histogram":
        assert HOSTILE in texts(found)


@pytest.mark.parametrize("name", PICTURES)
def test_colours_are_those_of_the_page(name: str) -> None:
    found = PICTURES[name]("title")
    assert "var(--accent)" in found
    assert "var(--muted)" in found
    colours = re.findall(r"(?:fill|stroke): (#[0-9a-f]+)", found)
    assert set(colours) <= {"#000000"}, "black stands only in the definitions of marks that inherit a colour"


def test_two_pictures_in_one_page_share_no_id() -> None:
    page = "".join(picture(f"{name}") for name, picture in PICTURES.items())
    found = re.findall(r'\bid="([^"]+)"', page)
    assert len(found) == len(set(found))


@pytest.mark.parametrize("name", PICTURES)
def test_nothing_is_loaded_from_outside(name: str) -> None:
    found = re.sub(r'xmlns(:\w+)?="[^"]*"', "", PICTURES[name]("title"))
    assert "http" not in found
    assert "data:" not in found
    assert all(target.startswith("#") for target in re.findall(r'href="([^"]*)"', found))


def test_drawing_leaves_the_settings_of_matplotlib_alone() -> None:
    before = dict(matplotlib.rcParams)
    for picture in PICTURES.values():
        picture("title")
    assert dict(matplotlib.rcParams) == before


def test_characters_without_a_glyph_are_text_without_a_warning(recwarn: pytest.WarningsRecorder) -> None:
    assert "阀门" in texts(quality_picture("阀门", [Point("阀门", 4, 1.2)], BASE))
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_long_names_and_line_breaks_are_shortened() -> None:
    found = texts(quality_picture("t", [Point("a\nb " + "x" * 99, 4, 1.2)], BASE))
    assert any(text.startswith("a b xxx") and text.endswith("…") and len(text) < 40 for text in found)


def test_labels_of_points_in_one_place_do_not_touch() -> None:
    points = [Point(f"recipe-{n}", 4.3 + n / 100, 1.3 + n / 1000) for n in range(12)]
    root = parsed(quality_picture("t", points, BASE))
    heights = sorted(
        float(element.get("y") or re.search(r"translate\([\d.-]+ ([\d.-]+)\)", element.get("transform", ""))[1])  # type: ignore[index]
        for element in root.iter()
        if element.tag.endswith("text") and (element.text or "").startswith("recipe-")
    )
    assert len(heights) == 12
    assert min(b - a for a, b in pairwise(heights)) > 8


@pytest.mark.parametrize(
    "points",
    [
        [Point("a", 4, 1.0)],
        [Point("a", 4, 1.0, 1.0, 1.0), Point("b", 4, 1.0)],
        [Point("a", 2, 1e6, 9e5, 2e6), Point("b", 8, 1.0)],
        [Point("a", 0.5, 0.7)],
        [Point("a", 32, 1e300)],
    ],
)
@pytest.mark.parametrize("base", [BASE, None])
def test_any_finite_points_can_be_drawn(points: list[Point], base: Point | None) -> None:
    assert quality_picture("t", points, base).startswith("<svg")


def test_a_histogram_without_predictions_and_a_map_of_zeros_can_be_drawn() -> None:
    assert histogram_picture("t", KL_EDGES, [0] * (len(KL_EDGES) + 1), None).startswith("<svg")
    assert heat_map_picture("t", ["a"], ["0"], [[0.0]]).startswith("<svg")
    assert heat_map_picture("t", ["a"], [str(n) for n in range(120)], [[0.1] * 120]).startswith("<svg")

"""Pictures of a report as inline SVG: drawn by matplotlib, coloured by the page that holds them, the same every time.

Each function takes plain numbers and gives markup whose texts are escaped. Colours stand in the markup as CSS variables
(`--ink`, `--muted`, `--rule`, `--accent`), so that one picture serves a light page and a dark one.
"""

import io
import math
import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import matplotlib
import numpy as np
from markupsafe import Markup, escape
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

# matplotlib wants a colour; the markup gets the variable in its place.
_INK, _MUTED, _RULE, _ACCENT = "#010203", "#020304", "#030405", "#040506"
_VARIABLES = {_INK: "var(--ink)", _MUTED: "var(--muted)", _RULE: "var(--rule)", _ACCENT: "var(--accent)"}
_FONT_SIZE = 8.5
_STYLE = {
    "svg.fonttype": "none",  # text stays text: it can be selected, and takes the font of the page
    "text.parse_math": False,  # a name may hold a dollar sign
    "font.size": _FONT_SIZE,
    "axes.edgecolor": _RULE,
    "axes.labelcolor": _MUTED,
    "text.color": _INK,
    "xtick.color": _MUTED,
    "ytick.color": _MUTED,
    "grid.color": _RULE,
    "grid.linewidth": 0.6,
}
_LONGEST_LABEL = 34
_LARGEST_VALUE = 1e9  # a model so broken stands at the top, however much more broken it is
_BIT_TICKS = (1, 1.5, 2, 3, 4, 5, 6, 8, 12, 16, 32)


@dataclass(frozen=True)
class Point:
    """One model in a picture. bits: of a weight; value: its metric, low and high its interval."""

    label: str
    bits: float
    value: float
    low: float | None = None
    high: float | None = None


def quality_picture(title: str, points: Sequence[Point], base: Point | None, *, width: float = 5.4) -> Markup:
    """`points` over bits a weight (logarithmic), with intervals; the base as a ring and a level line. width: inches."""
    height = 0.6 * width
    points = [_bounded(point) for point in points]
    with _Drawing(title, width, height) as drawing:
        axes = drawing.axes((0.44 / width, 0.4 / height, 1 - 0.5 / width, 1 - 0.48 / height))
        everyone = [*points, *([base] if base else [])]
        _bits_axis(axes, [point.bits for point in everyone])
        _value_axis(axes, [end for p in everyone for end in (p.value, p.low, p.high) if end is not None])
        axes.set_xlabel("bits a weight")
        if base is not None:
            axes.axhline(base.value, color=_MUTED, linewidth=0.7, linestyle=(0, (4, 3)), zorder=1)
            axes.plot(base.bits, base.value, "o", markersize=5.5, color=_MUTED, fillstyle="none", zorder=3)
        for point in points:
            if point.low is not None and point.high is not None:
                axes.vlines(point.bits, point.low, point.high, color=_ACCENT, linewidth=1.4, alpha=0.55, zorder=2)
            axes.plot(point.bits, point.value, "o", markersize=4.5, color=_ACCENT, markeredgewidth=0, zorder=3)
        _label_points(axes, points, base)
        return drawing.markup()


def histogram_picture(title: str, edges: Sequence[float], counts: Sequence[int], mean: float | None) -> Markup:
    """Shares of predictions over the KL bins of `edges`; counts has one more at each end, for what lies outside."""
    with _Drawing(title, 5.4, 3.0) as drawing:
        axes = drawing.axes((0.082, 0.133, 0.91, 0.84))
        shares = 100 * np.array(counts) / max(sum(counts), 1)
        axes.bar(np.arange(len(counts)) + 0.5, shares, width=0.86, color=_ACCENT, alpha=0.8, linewidth=0, zorder=2)
        # Bin n + 1 begins at edge n; a decade is labelled where an edge is one.
        decades = [n for n, edge in enumerate(edges) if math.isclose(math.log10(edge) % 1, 0, abs_tol=1e-4)]
        axes.set_xticks([n + 1 for n in decades], [f"{edges[n]:g}" for n in decades])
        axes.set_xlim(0, len(counts))
        _percent_axis(axes)
        axes.set_xlabel("KL of one prediction, nats")
        if mean is not None and mean > 0:
            place = float(np.interp(math.log(mean), np.log(edges), np.arange(1, len(edges) + 1)))
            axes.axvline(place, color=_INK, linewidth=0.8, zorder=3)
            axes.annotate(
                f"mean {mean:.3g}", (place, 1), xycoords=("data", "axes fraction"), xytext=(-4, -9),
                textcoords="offset points", ha="right",
            )  # fmt: skip
        return drawing.markup()


def heat_map_picture(
    title: str, rows: Sequence[str], columns: Sequence[str], values: Sequence[Sequence[float | None]]
) -> Markup:
    """A cell for each value `[rows][columns]`, from no colour at 0 to full colour at the largest; None stays empty."""
    row_height, bottom, width = 0.2, 0.62, 8.2
    height = row_height * len(rows) + bottom + 0.08
    left = (0.58 * _FONT_SIZE * max(len(_short(row)) for row in rows) / 72 + 0.12) / width
    with _Drawing(title, width, height) as drawing:
        axes = drawing.axes((left, bottom / height, 1 - left, row_height * len(rows) / height))
        largest = max((value for row in values for value in row if value is not None), default=0.0) or 1.0
        for y, row in enumerate(values):
            for x, value in enumerate(row):
                if value is not None:
                    _cell(axes, x, y, value / largest)
        axes.set_xlim(0, len(columns))
        axes.set_ylim(len(rows), 0)
        step = math.ceil(len(columns) / 16)
        shown = range(0, len(columns), step)
        axes.set_xticks([n + 0.5 for n in shown], [_short(columns[n]) for n in shown])
        axes.set_yticks([n + 0.5 for n in range(len(rows))], [_short(row) for row in rows])
        axes.tick_params(axis="y", labelcolor=_INK)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("block", loc="left")
        _heat_legend(drawing.axes((0.63, 0.03 / height, 0.37, 0.28 / height)), largest)
        return drawing.markup()


class _Drawing:
    """One figure in the style of the page, without matplotlib's global state."""

    def __init__(self, title: str, width: float, height: float) -> None:
        """title: what the picture shows, for those who do not see it. width, height: inches of 72 units."""
        self.title = title
        self.context = matplotlib.rc_context({**_STYLE, "svg.hashsalt": title})
        self.size = (width, height)

    def __enter__(self) -> "_Drawing":
        self.context.__enter__()
        self.figure = Figure(figsize=self.size)
        return self

    def __exit__(self, *error: Any) -> None:
        self.context.__exit__(*error)

    def axes(self, place: tuple[float, float, float, float]) -> Axes:
        """Axes at (left, bottom, width, height) in shares of the figure, with nothing drawn that is not data."""
        axes = self.figure.add_axes(place)
        axes.tick_params(length=0)
        axes.spines[["top", "right", "left"]].set_visible(False)
        axes.patch.set_visible(False)
        axes.set_axisbelow(True)
        return axes

    def markup(self) -> Markup:
        """The figure as an `<svg>` element that scales with its container."""
        self.figure.patch.set_visible(False)
        stream = io.StringIO()
        with warnings.catch_warnings():
            # Of characters that its own font lacks: the page's font draws them.
            warnings.filterwarnings("ignore", message="Glyph .* missing")
            self.figure.savefig(stream, format="svg", metadata={"Date": None})
        text = stream.getvalue()
        text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
        # Group names repeat from figure to figure, and an id may stand in a page once.
        text = re.sub(r'<g id="[^"]*"', "<g", text)
        text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
        for colour, variable in _VARIABLES.items():
            text = text.replace(colour, variable)
        box = re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)
        assert box is not None
        head = f'<svg viewBox="0 0 {box[1]} {box[2]}" role="img" aria-label="{escape(self.title)}">'
        return Markup(head + text[text.index(">") + 1 :].strip())  # noqa: S704 - matplotlib escapes every text


def _bounded(point: Point) -> Point:
    value, low, high = (
        None if end is None else min(end, _LARGEST_VALUE) for end in (point.value, point.low, point.high)
    )
    assert value is not None
    return replace(point, value=value, low=low, high=high)


def _bits_axis(axes: Axes, bits: Sequence[float]) -> None:
    low, high = min(bits) / 1.12, max(bits) * 1.18
    axes.set_xscale("log", base=2)
    axes.set_xlim(low, high)
    ticks = [tick for tick in _BIT_TICKS if low <= tick <= high]
    # Ticks that would touch are thinned from the small end, where they are closest in value and least in number.
    kept: list[float] = []
    for tick in reversed(ticks):
        if not kept or math.log(kept[-1] / tick) > math.log(high / low) / 22:
            kept.append(tick)
    axes.set_xticks(kept, [f"{tick:g}" for tick in kept])
    axes.minorticks_off()


def _value_axis(axes: Axes, values: Sequence[float]) -> None:
    """A linear axis, or a logarithmic one where the largest value would flatten the others."""
    low, high = min(values), max(values)
    if low > 0 and high / low > 8:
        axes.set_yscale("log")
        axes.set_ylim(low / (high / low) ** 0.06, high * (high / low) ** 0.1)
        ticks = [t * 10**d for d in range(-6, 13) for t in (1, 2, 5) if low * 0.9 <= t * 10**d <= high * 1.2]
        step = math.ceil(len(ticks) / 6)
        axes.set_yticks(ticks[::step], [f"{tick:g}" for tick in ticks[::step]])
        axes.minorticks_off()
    else:
        room = (high - low) or abs(high) or 1.0
        axes.set_ylim(low - 0.08 * room, high + 0.12 * room)
        axes.locator_params(axis="y", nbins=6)
    axes.grid(axis="y")


def _percent_axis(axes: Axes) -> None:
    axes.locator_params(axis="y", nbins=5)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} %")
    axes.grid(axis="y")


def _label_points(axes: Axes, points: Sequence[Point], base: Point | None) -> None:
    """Each name beside its point, moved up where it would touch one already there, with a line back to the point.

    Works in points of 1/72 inch, the unit of the figure.
    """
    scale = 72 / axes.figure.dpi
    width = axes.figure.bbox.width * scale
    placed: list[tuple[float, float, float]] = []  # left, right, height of what labels must not touch
    if base is not None:  # its line would strike a label through, its own among them
        x, y = (float(value) * scale for value in axes.transData.transform((base.bits, base.value)))
        placed += [(0, width, y), (x - 14, x + 14, y + 1.2 * _FONT_SIZE)]
        axes.annotate(
            _short(base.label), (base.bits, base.value), xytext=(0, 5), textcoords="offset points",
            ha="center", va="bottom", color=_MUTED,
        )  # fmt: skip
    for point in sorted(points, key=lambda point: (point.value, point.label)):
        x, y = (float(value) * scale for value in axes.transData.transform((point.bits, point.value)))
        label = _short(point.label)
        length = 0.58 * _FONT_SIZE * len(label)
        # To the right of its point, or to the left where the picture ends.
        left = x + 6 if x + 6 + length <= width else x - 6 - length
        height = y
        for other_left, other_right, other in sorted(placed, key=lambda place: place[2]):
            if left < other_right and other_left < left + length and abs(other - height) < 1.2 * _FONT_SIZE:
                height = other + 1.2 * _FONT_SIZE
        placed.append((left, left + length, height))
        after = left > x
        axes.annotate(
            label, (point.bits, point.value), xytext=(6 if after else -6, height - y), textcoords="offset points",
            ha="left" if after else "right", va="center", annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": _RULE, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 3}
            if height - y > 4
            else None,
        )  # fmt: skip


def _cell(axes: Axes, x: float, y: float, share: float) -> None:
    axes.add_patch(Rectangle((x + 0.04, y + 0.04), 0.92, 0.92, color=_ACCENT, alpha=_shade(share), linewidth=0))


def _shade(share: float) -> float:
    """Opacity of a cell: even a value of nothing is seen to be there."""
    return round(0.04 + 0.96 * share, 3)


def _heat_legend(axes: Axes, largest: float) -> None:
    steps = 5
    for n in range(steps):
        _cell(axes, n, 0, n / (steps - 1))
    axes.set_xlim(0, steps)
    axes.set_ylim(2.2, 0)
    axes.set_xticks([n + 0.5 for n in range(steps)], [f"{largest * n / (steps - 1):.3g}" for n in range(steps)])
    axes.set_yticks([])
    axes.tick_params(axis="x", pad=-8)
    axes.spines[:].set_visible(False)


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _LONGEST_LABEL else f"{line[: _LONGEST_LABEL - 1]}…"

"""One visual language for all figures: colours, markers, sizes, and how they become SVG.

Colours are Okabe and Ito's (2008), told apart with any common colour blindness, some darkened so
that each has a contrast of at least 3:1 on white and on the report's dark page. Names also differ
by marker and dash, so no figure depends on colour alone.
"""

import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from typing import Any, TypeAlias

import matplotlib
import numpy as np
from matplotlib import font_manager
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.text import Text

from study import paths

# Figures are drawn from matplotlib's defaults, whatever this user's matplotlibrc sets.
matplotlib.rcdefaults()
font_manager.fontManager.addfont(paths.TEMPLATES / "fonts" / "libertinus-serif-regular.ttf")

INK = "#010203"
"""Colour of text, axes and ticks; the HTML report replaces it by the colour of its text."""

PAPER_INK = "#1b1d21"
"""The same in what is printed: the PDF's and the committed figures'."""

GROUND = '<rect width="100%" height="100%" fill="#ffffff"/>'
"""What lies behind a committed figure: the page of a repository may be dark."""

MUTED = "#828282"
"""Reference lines and grid."""

PALETTE = (
    "#0072B2",  # blue
    "#D55E00",  # vermilion
    "#009E73",  # bluish green
    "#C76FA1",  # reddish purple, 0.02 darker
    "#BD8200",  # orange, darkened
    "#3C97D3",  # sky blue, darkened
    "#8A8A8A",  # grey
)
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))

Numbers: TypeAlias = Sequence[float] | np.ndarray

_OF_PICTURE: dict[str, int] = {}

_PATH = re.compile(r' d="[^"]*"')
_DIGITS = re.compile(r"(\.\d\d)\d+")


SLOTS = len(PALETTE) * len(DASHES)
"""How many slots differ in colour, or in dash and marker: those beyond the palette's length repeat
its colours with the next dash and the next marker."""


@contextmanager
def slots(of_picture: Mapping[str, int]) -> Iterator[None]:
    """What is drawn in this block gives these labels these slots, whoever else has them."""
    _OF_PICTURE.update(of_picture)
    try:
        yield
    finally:
        _OF_PICTURE.clear()


def _slot(name: str) -> int:
    """Slot: a picture's own, else one derived from the name, always the same."""
    return _OF_PICTURE.get(name, zlib.crc32(name.encode()) % SLOTS)


def colour(name: str) -> str:
    """Colour of a provider or series as `#rrggbb`, the same in every figure."""
    return PALETTE[_slot(name) % len(PALETTE)]


def marker(name: str) -> str:
    """Matplotlib marker of a provider or series, the same in every figure."""
    return MARKERS[sum(divmod(_slot(name), len(PALETTE))) % len(MARKERS)]


def dash(name: str) -> Any:
    """Matplotlib line style of a provider or series; solid for the first seven slots."""
    return DASHES[_slot(name) // len(PALETTE) % len(DASHES)]


_RC = matplotlib.rc_params_from_file(
    paths.TEMPLATES / "fusedlib.mplstyle", use_default_template=False
)


def new(height: float = 3.2, ncols: int = 1, nrows: int = 1, **options: Any) -> tuple[Figure, Any]:
    """A figure and its axes, outside pyplot's state; its 6.4 inches fill the PDF's text block.

    Options go to `Figure.subplots` (`sharex`, `sharey`, `width_ratios`, `squeeze`, ...).
    """
    with matplotlib.rc_context(_RC):
        fig = Figure(figsize=(6.4, height), layout="constrained")
        axes = fig.subplots(nrows, ncols, **options)
    return fig, axes


def line(ax: Axes, x: Numbers, y: Numbers, name: str, **options: Any) -> None:
    """A line with markers in the colour of `name`."""
    drawn: dict[str, Any] = {
        "color": colour(name), "marker": marker(name), "markersize": 4.0,
        "markeredgewidth": 0.0, "linestyle": dash(name), "linewidth": 1.5, "label": name,
    }  # fmt: skip
    ax.plot(x, y, **(drawn | options))


def reference_line(ax: Axes, *, x: Any = None, y: Any = None, label: str | None = None) -> None:
    """A thin dashed grey line: horizontal at `y` or vertical at `x`."""
    drawn: dict[str, Any] = {
        "color": MUTED, "linestyle": (0, (4, 2)), "linewidth": 1.1, "label": label
    }  # fmt: skip
    if y is not None:
        ax.axhline(y, **drawn)
    else:
        ax.axvline(x, **drawn)


def text(ax: Axes, x: float, y: float, content: str, **options: Any) -> None:
    """A small note inside the axes, in ink; `x` and `y` in data units."""
    ax.text(x, y, content, **{"color": INK, "fontsize": 9.0, **options})


def title(ax: Axes, content: str, **options: Any) -> None:
    """A panel's title, above its left edge."""
    ax.set_title(content, **{"loc": "left", "fontsize": 10.5, "color": INK, **options})


def say_empty(fig: Figure) -> None:
    """Write "nothing measured" into panels that hold no line, bar, point or image of data.

    Axes that are off are no panel: a grid may have more of them than there are panels.
    """
    for ax in fig.axes:
        # Reference lines span the panel: one of their coordinates is a share of it.
        lines = [line for line in ax.lines if line.get_transform() == ax.transData]
        if ax.axison and not (lines or ax.patches or ax.collections or ax.images or ax.texts):
            centred: dict[str, Any] = {"transform": ax.transAxes, "ha": "center", "va": "center"}
            text(ax, 0.5, 0.5, "nothing measured", color=MUTED, **centred)


def legend(fig: Figure, ncols: int = 5) -> None:
    """A frameless legend below the axes, each name once, in as many columns as fit."""
    entries: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    for columns in range(min(len(entries), ncols), 0, -1):
        shown = fig.legend(
            entries.values(), entries.keys(), ncols=columns, loc="outside lower center",
            frameon=False, labelcolor=INK, fontsize=9.0,
        )  # fmt: skip
        if columns == 1 or shown.get_window_extent().width <= fig.bbox.width:
            return
        shown.remove()


def svg(fig: Figure) -> str:
    """The figure as an SVG document: the same bytes for the same figure."""
    for part in fig.findobj(Text):  # what was written outside of `new` has matplotlib's typeface
        part.set_fontfamily(_RC["font.family"])
    buffer = StringIO()
    with matplotlib.rc_context(_RC):
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # A hundredth of a point is finer than any eye and halves the file.
    return _PATH.sub(lambda path: _DIGITS.sub(r"\1", path[0]), buffer.getvalue())

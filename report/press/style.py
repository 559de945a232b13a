"""One look for all figures: colours, markers, sizes, and how they become SVG.

Colours are Okabe and Ito's (2008), told apart with any common colour blindness, some darkened so
that each has a contrast of at least 3:1 on white and on the report's dark page. Names also differ
by marker and dash, so no figure depends on colour alone.
"""

import re
from io import StringIO
from typing import Any

import matplotlib
from matplotlib import font_manager
from matplotlib.figure import Figure

from study import paths

# Figures are drawn from matplotlib's defaults, whatever this user's matplotlibrc sets.
matplotlib.rcdefaults()
font_manager.fontManager.addfont(paths.TEMPLATES / "fonts" / "libertinus-serif-regular.ttf")
RC = matplotlib.rc_params_from_file(
    paths.TEMPLATES / "fusedlib.mplstyle", use_default_template=False
)

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
RING = {"linestyle": "", "marker": "o", "markersize": 9, "markerfacecolor": "none",
        "markeredgewidth": 1.2}  # fmt: skip
"""What a formula gives, around what was measured."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1.2)), (0, (6, 1.5, 1.5, 1.5)))
SLOTS = len(PALETTE) * len(DASHES)
"""How many slots look unlike: those beyond the palette's length repeat its colours with the next
dash and the next marker."""


def look(slot: int) -> dict[str, Any]:
    """Colour, marker and dash of a slot."""
    again, colour = divmod(slot, len(PALETTE))
    return {
        "color": PALETTE[colour], "marker": MARKERS[(again + colour) % len(MARKERS)],
        "linestyle": DASHES[again % len(DASHES)],
    }  # fmt: skip


def legend(fig: Figure) -> None:
    """A legend below the axes, each name once, in as many columns as fit."""
    entries: dict[str, Any] = {}
    for ax in fig.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            entries.setdefault(name, handle)
    for columns in range(min(len(entries), 5), 0, -1):
        place: Any = "outside lower center"
        shown = fig.legend(entries.values(), entries.keys(), ncols=columns, loc=place)
        if columns == 1 or shown.get_window_extent().width <= fig.bbox.width:
            return
        shown.remove()


def svg(fig: Figure) -> str:
    """The figure as an SVG document: the same bytes for the same figure."""
    buffer = StringIO()
    with matplotlib.rc_context(RC):
        fig.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    # A hundredth of a point is finer than any eye and halves the file.
    return re.sub(
        r' d="[^"]*"', lambda path: re.sub(r"(\.\d\d)\d+", r"\1", path[0]), buffer.getvalue()
    )

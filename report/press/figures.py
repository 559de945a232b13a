"""`figures/`: the paper's figures as SVG, each with the data behind it as CSV."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fusedlib.bench import paths
from press.pages.outputs import PAPER, shown
from press.style import INK, PAPER_INK

FOLDER = paths.ROOT / "figures"


@dataclass(frozen=True)
class Drawn:
    """A figure of the paper: an SVG document, and its data as CSV."""

    name: str
    svg: str
    csv: str


def drawn(folder: Path) -> Iterator[Drawn]:
    """The figures in cells tagged `paper` of the executed notebooks in a folder of products.

    Raises:
        ValueError: a figure comes without data, or two have one name.
    """
    names = set()
    for path in sorted((folder / "notebooks").glob("*.ipynb")):
        for output, meaning in shown(path, PAPER):
            if meaning.get("kind") != "figure":
                continue
            name = meaning["name"]
            if not meaning["data"]:
                raise ValueError(
                    f"{path.name}: the figure {name} has no data beside it; draw it with "
                    "press.plots, or give display.figure the data"
                )
            if name in names:
                raise ValueError(f"{path.name}: another notebook has a figure {name}")
            names.add(name)
            yield Drawn(name, _on_white(output["data"]["image/svg+xml"]), meaning["data"])


def write(figures: Iterator[Drawn]) -> list[Path]:
    """Write each figure's two files, and give back their paths."""
    FOLDER.mkdir(exist_ok=True)
    written = []
    for figure in figures:
        for suffix, text in ((".svg", figure.svg), (".csv", figure.csv)):
            written.append(FOLDER / f"{figure.name}{suffix}")
            written[-1].write_text(text, encoding="utf-8")
    return written


def _on_white(svg: str) -> str:
    """In dark ink on white: the page of a repository may be dark, and shows the file as it is."""
    at = svg.index(">", svg.index("<svg")) + 1
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return (svg[:at] + ground + svg[at:]).replace(INK, PAPER_INK)

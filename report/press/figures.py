"""`figures/`: the paper's figures as SVG, each with the data behind it as CSV."""

from pathlib import Path

from fusedlib.bench import paths
from press.pages.outputs import PAPER, shown
from press.style import INK, PAPER_INK

FOLDER = paths.ROOT / "figures"


def drawn(folder: Path) -> dict[str, str]:
    """Files of the figures in cells tagged `paper` of the notebooks in a folder of products.

    Raises:
        ValueError: a figure comes without data, or two have one name.
    """
    files: dict[str, str] = {}
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
            if f"{name}.svg" in files:
                raise ValueError(f"{path.name}: another notebook has a figure {name}")
            files[f"{name}.svg"] = _on_white(output["data"]["image/svg+xml"])
            files[f"{name}.csv"] = meaning["data"]
    return files


def _on_white(svg: str) -> str:
    """In dark ink on white: the page of a repository may be dark, and shows the file as it is."""
    at = svg.index(">", svg.index("<svg")) + 1
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return (svg[:at] + ground + svg[at:]).replace(INK, PAPER_INK)

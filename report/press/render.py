"""Executed notebooks to what is read: the report in HTML and PDF, pages, and figures."""

from collections.abc import Sequence
from pathlib import Path

import nbformat

from press import run
from press.pages import ReportError
from press.pages.exporters import FusedlibHTMLExporter, FusedlibPDFExporter
from press.pages.outputs import meaning
from press.pages.paper import Section, combined
from press.style import GROUND, INK, PAPER_INK
from study import paths
from study.files import write_whole

FIGURES = paths.ROOT / "figures"
LEDGER = "claims"
"""Name of the ledger's notebook, a page beside the paper."""


def sections() -> list[Section]:
    """The sections of the paper, and the notebooks that have a page beside it."""
    return [
        Section(
            part.name, part.copy if part.copy.exists() else None, run.error_of(part.copy),
            guide=not part.only_shows or part.name == LEDGER,
        )
        for part in run.select()
    ]  # fmt: skip


def check_ready() -> None:
    """Make an empty paper, and learn now, not after an hour, that this Python can make none.

    Raises:
        ReportError: something that turns notebooks into pages is missing or does not work.
    """
    paper = combined([])
    try:
        for exporter in (FusedlibHTMLExporter, FusedlibPDFExporter):
            exporter().from_notebook_node(paper)
    except Exception as error:
        raise ReportError(
            f"this Python cannot make the report's pages ({type(error).__name__}: "
            f"{' '.join(str(error).split())}). "
            "Nothing was measured; mend what the message names, or `make study` measures without "
            "pages"
        ) from error


def render(sections: Sequence[Section], out_dir: Path) -> list[Path]:
    """Write `report.html`, `report.pdf` and `notebooks/<name>.html` into `out_dir`.

    `paper.ipynb`, the notebook that the report is rendered from, is kept beside them. The same
    notebooks give the same bytes. A section that failed, or that has no notebook, appears with its
    error.
    """
    paper = combined(sections)
    write_whole(out_dir / "paper.ipynb", nbformat.writes(paper) + "\n")
    page, _ = FusedlibHTMLExporter().from_notebook_node(paper)
    written = [write_whole(out_dir / "report.html", page)]
    pdf, _ = FusedlibPDFExporter().from_notebook_node(paper)
    written.append(write_whole(out_dir / "report.pdf", pdf))
    for section in sections:
        if section.notebook is not None:
            page, _ = FusedlibHTMLExporter().from_filename(str(section.notebook))
            write_whole(out_dir / "notebooks" / f"{section.name}.html", page)
    return written


def figures(folder: Path) -> dict[str, str]:
    """Files of the figures, SVG and the data behind it as CSV.

    Args:
        folder: of executed copies.
    """
    files: dict[str, str] = {}
    for path in sorted(folder.glob("*.ipynb")):
        cells = nbformat.read(path, as_version=4).cells
        for output in (output for cell in cells for output in cell.get("outputs", [])):
            shown = meaning(output)
            if shown.get("kind") != "figure":
                continue
            if f"{shown['name']}.svg" in files:
                raise ValueError(f"{path.name}: another notebook has a figure {shown['name']}")
            files[f"{shown['name']}.svg"] = _on_white(output["data"]["image/svg+xml"])
            files[f"{shown['name']}.csv"] = shown["data"]
    return files


def _on_white(svg: str) -> str:
    """In dark ink on white: the page of a repository may be dark, and shows the file as it is."""
    at = svg.index(">", svg.index("<svg")) + 1
    return (svg[:at] + GROUND + svg[at:]).replace(INK, PAPER_INK)

"""Executed notebooks to what is read: the report in HTML and PDF, pages, slides, and figures."""

from collections.abc import Sequence
from pathlib import Path

import nbformat

from measure.recording import paths
from measure.recording.files import write_whole
from press.pages import ReportError
from press.pages.exporters import FusedlibHTMLExporter, FusedlibPDFExporter
from press.pages.outputs import APPENDIX, PAPER, shown
from press.pages.paper import Section, combined
from press.pages.slides import FusedlibSlidesExporter, FusedlibSlidesPDFExporter
from press.running import config
from press.running.config import Config
from press.running.products import copy_path, read_metadata
from press.style import GROUND, INK, PAPER_INK

FIGURES = paths.ROOT / "figures"


def sections(config: Config, build: Path) -> list[Section]:
    """The parts of the report, as far as a folder of products has them executed."""
    parts = []
    for part in config.parts:
        copy = copy_path(part.name, build)
        noted = read_metadata(copy)
        missing = f"not executed yet; `make report ONLY={part.name}` does it"
        error = noted.get("error") if noted else missing
        executed, guide = copy if noted else None, part in config.guides
        parts.append(Section(part.name, part.title, executed, error, part.question, guide))
    return parts


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
            write_whole(copy_path(section.name, out_dir).with_suffix(".html"), page)
    return written


def slides(products: Path, out_dir: Path) -> list[Path]:
    """Write `slides.html` and `slides.pdf` of a folder with the executed notebooks."""
    paper = combined(sections(config.load(), products))
    page, _ = FusedlibSlidesExporter().from_notebook_node(paper)
    pdf, _ = FusedlibSlidesPDFExporter().from_notebook_node(paper)
    return [write_whole(out_dir / "slides.html", page), write_whole(out_dir / "slides.pdf", pdf)]


def figures(products: Path) -> dict[str, str]:
    """Files of the figures, SVG and the data behind it as CSV, of the paper and its appendix."""
    files: dict[str, str] = {}
    for path in sorted((products / "notebooks").glob("*.ipynb")):
        for output, meaning in (*shown(path, PAPER), *shown(path, APPENDIX)):
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
    return (svg[:at] + GROUND + svg[at:]).replace(INK, PAPER_INK)

"""Our exporters on notebooks that are not the study's, on machines of people with settings."""

import base64
import io
import os
import re
import subprocess
import sys
from html import unescape
from typing import Any

import numpy as np
import pytest
from nbformat.v4 import new_markdown_cell, new_notebook, new_output
from PIL import Image
from traitlets.config import Config

from press.pages import ReportError
from press.pages.exporters import (
    FusedlibHTMLExporter,
    FusedlibPDFExporter,
    FusedlibTypstExporter,
)
from printed import printed
from report_sample import code, stream, write

RASTERS = ("png", "jpeg", "gif", "webp")
DRAWING = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="20pt" height="10pt">'
    '<path d="M0 0 L20 10" stroke="#000000"/></svg>'
)
SPECIALS = [
    "C# and F#", "costs $5", "*bold", "_under", "a @ b", "@who", "a < b <c>", "= not a heading",
    "- not an item", "+ nor this", "/ term: no", "\\ back \\n", "[open", "close]", "`tick",
    "~ -- ...",
    "// no comment", "/* nor */ this", '"quoted" \'single\'', "#let x = 1", "https://example.org/#a",
    "{brace} ^ & %", "1. first",
]  # fmt: skip


def picture(kind: str, size: tuple[int, int] = (40, 30)) -> bytes:
    """A picture of noise, so that half of its bytes are not all of it."""
    noise = np.random.default_rng(0).integers(0, 255, (size[1], size[0], 3), dtype=np.uint8)
    content = io.BytesIO()
    Image.fromarray(noise).save(content, kind)
    return content.getvalue()


def shown(mime: str, content: str | bytes) -> Any:
    """An output of this content, as IPython writes it."""
    data = content if isinstance(content, str) else base64.encodebytes(content).decode()
    return new_output("display_data", {"text/plain": f"<the {mime} as text>", mime: data})


def notebook(*outputs: Any) -> Any:
    return new_notebook(cells=[code("show()", *outputs), new_markdown_cell("The rest.")])


def html(nb: Any, **options: Any) -> str:
    return FusedlibHTMLExporter(**options).from_notebook_node(nb)[0]


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def words(page: str) -> str:
    """The text of a page, without blanks."""
    return squeezed(
        unescape(re.sub(r"<(style|script)\b.*?</\1>|<[^>]+>", "", page, flags=re.DOTALL))
    )


# --- pictures ------------------------------------------------------------------------------------


def test_pictures_of_any_kind_stand_in_page_and_pdf():
    whole = {kind: picture(kind) for kind in RASTERS}
    drawn = shown("image/svg+xml", DRAWING)
    nb = notebook(*(shown(f"image/{kind}", data) for kind, data in whole.items()), drawn)
    page = html(nb)
    for kind, content in whole.items():
        assert f'src="data:image/{kind};base64,{base64.b64encode(content).decode()}"' in page
    with printed() as texts:
        content = FusedlibPDFExporter().from_notebook_node(nb)[0]
    assert len(re.findall(rb"/Subtype\s*/Image", content)) >= len(whole)
    for text in (words(page), texts[-1]):
        assert f"Figure{len(whole) + 1}." in text and "Therest." in text


def test_what_typst_refuses_is_said():
    unbound = DRAWING.replace("<path", "<nobody:path")
    with pytest.raises(ReportError, match=r"Typst cannot set the PDF: .*[Ff]ailed to parse"):
        FusedlibPDFExporter().from_notebook_node(notebook(shown("image/svg+xml", unbound)))


# --- text ----------------------------------------------------------------------------------------


def test_no_text_is_taken_for_code_of_typst_or_html(tmp_path):
    cells = [code(text, stream(f"printed {text}\n")) for text in SPECIALS]
    error = new_output("error", ename="E", evalue="x", traceback=[f"raised {t}" for t in SPECIALS])
    cells += [code("x", error), code("y", shown("text/plain", " ".join(SPECIALS)))]
    path = write(tmp_path / "$5 #1 [a] *b_c @d <e>.ipynb", *cells)
    page, _ = FusedlibHTMLExporter().from_filename(str(path))
    with printed() as texts:
        FusedlibPDFExporter().from_filename(str(path))
    for shown_text in (words(page), texts[-1]):
        for text in SPECIALS:
            assert shown_text.count(squeezed(text)) >= 3, text
            assert squeezed(f"printed {text}") in shown_text
        assert squeezed(" ".join(SPECIALS)) in shown_text
        assert squeezed(f"raised {SPECIALS[-1]}") in shown_text
        assert squeezed(path.stem) in shown_text, "the file's name is the title"


# --- settings of the user ------------------------------------------------------------------------

SETTINGS = Config()
for _name in ("HTMLExporter", "PDFExporter", "SlidesExporter", "LatexExporter", "MarkdownExporter"):
    SETTINGS[_name].template_name = "classic"
    SETTINGS[_name].preprocessors = ["nobody.there"]
SETTINGS.TemplateExporter.template_name = "lab"
SETTINGS.TemplateExporter.template_file = "nobody.j2"
SETTINGS.Exporter.file_extension = ".txt"
SETTINGS.NbConvertBase.display_data_priority = ["text/plain"]
SETTINGS.ExtractOutputPreprocessor.enabled = False
SETTINGS.ExtractOutputPreprocessor.extract_output_types = set()
SETTINGS.ExtractOutputPreprocessor.output_filename_template = "x"


@pytest.mark.parametrize(
    "exporter", [FusedlibHTMLExporter, FusedlibTypstExporter, FusedlibPDFExporter]
)
def test_what_a_user_set_for_nbconvert_s_own_exporters_changes_nothing_of_ours(exporter):
    nb = notebook(shown("image/png", picture("png")), shown("image/svg+xml", DRAWING))
    plain, _ = exporter().from_notebook_node(nb)
    actual, written = exporter(config=SETTINGS).from_notebook_node(nb)
    assert actual == plain and written["output_extension"] == exporter.suffix


MATPLOTLIBRC = """
text.usetex: True
font.size: 31
lines.linewidth: 17
axes.prop_cycle: cycler(color=["ff0000"])
savefig.bbox: tight
"""
DRAW = """
import sys
import pandas as pd
from press import show
rows = pd.DataFrame({"tokens": [1, 2], "median_ms": [1000, 2000.5], "provider": "fused"})
sys.stdout.write(show.lines(rows, "tokens", "median_ms").svg)
"""


def test_figures_are_the_same_whatever_the_user_s_matplotlibrc_says(tmp_path):
    settings = tmp_path / "matplotlibrc"
    settings.write_text(MATPLOTLIBRC)
    drawn = []
    for chosen in ({}, {"MATPLOTLIBRC": str(settings)}):
        done = subprocess.run(
            [sys.executable, "-c", DRAW], capture_output=True, text=True, check=False,
            env={**os.environ, **chosen},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-500:]
        drawn.append(done.stdout)
    assert drawn[0].startswith("<?xml") and drawn[0] == drawn[1]

"""From executed notebooks to HTML and PDF: nothing lost, nothing loaded, the same bytes."""

import re
import shutil
import subprocess
import sys
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote

import nbconvert
import nbformat
import pandas as pd
import pytest

from page_checks import loads
from press import display, plots, show
from press.pages.paper import Section
from press.pages.preprocessors import Numbers
from press.render import render
from printed import printed as printed_by_typst
from report_sample import (
    code,
    curves,
    failure,
    narrow,
    outputs_of,
    stated,
    stream,
    text,
    wide,
    write,
)

ODD = 'a <b> & "c" #d $e *f* _g_ @h `i` [j] \\k ~l'
LONG = "x" * 300
BROKEN = "ValueError: last line <x>"


class Page(HTMLParser):
    """What a page holds: ids, links, drawings, words."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.drawings: list[dict[str, str | None]] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self.source = path.read_text(encoding="utf-8")
        self.feed(self.source)
        self.text = re.sub(r"\s+", " ", "".join(self.words))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if given.get("id"):
            self.ids.append(str(given["id"]))
        if tag == "a":
            self.links.append(given.get("href") or "")
        elif tag == "svg":
            self.drawings.append(given)
        for name in ("aria-labelledby", "aria-describedby"):
            self.references += (given.get(name) or "").split()

    def handle_data(self, data: str) -> None:
        self.words.append(data)


@pytest.fixture(scope="module")
def sections(tmp_path_factory: pytest.TempPathFactory) -> list[Section]:
    folder = tmp_path_factory.mktemp("executed")
    return [
        Section("1_first", _first(folder / "1_first.ipynb"), None),
        Section("2_good", _good(folder / "2_good.ipynb"), None),
        Section("3_bad", _bad(folder / "3_bad.ipynb"), "ValueError: last line <x>"),
        Section("4_gone", None, "DeadKernelError: it died\nof #$*"),
        Section("5_end", _end(folder / "5_end.ipynb"), None),
        Section("04_guide", _guide(folder / "04_guide.ipynb"), None, guide=True),
    ]


def _first(path: Path) -> Path:
    return write(
        path,
        text("# The title with $n$\n\nThe lead."),
        code("p()", *outputs_of(lambda: display.prose("In short, see [](2_good.ipynb)."))),
    )


def _good(path: Path) -> Path:
    odd = pd.DataFrame({ODD: [ODD, "12.5 ms"], "Äöü 漢字": [LONG, "√n ≤ 10⁻⁷"]})
    tabs = {"one": tab("a"), "two": tab("b")}
    return write(
        path,
        text("# Good & true\n\nIs it?"),
        code("run()", stream("\rA 1/2\rA 2/2", "stderr"), stream("not secret")),
        text(
            "Inline $a_b^2$, cost is 5$ and $x$-axis. See [this](#curve), [it](#curve-again), "
            "[no](#no), [itself](2_good.ipynb), [another](3_bad.ipynb#narrow), "
            "[late](5_end.ipynb#late), [guide](../../notebooks/04_guide.ipynb#its-part) and "
            "[nobody](99_x.ipynb#part)."
        ),
        text(
            "## Method\n\n$$\\hat s = \\sum_{i=1}^n x_i$$\n\n"
            "$$\\begin{aligned}\na &= b \\\\\nc &\\le d\n"
            "\\end{aligned}$$\n\n![outside](https://example.org/x.png)\n\n<script>alert(1)</script>\n\n"
            "```python\n# not a heading $5\n```\n\n| a | b |\n|---|--:|\n| 1 | 2 |\n\n"
            "## Under\n\ntext"
        ),
        code("print()", stream("\x1b[31mshown\x1b[0m\n")),
        code(
            "show()",
            *outputs_of(
                lambda: display.table(wide(4, 5), caption=f"Wide {ODD}", name="wide", note="$n=3$"),
                lambda: display.table(odd, caption="Odd", name="odd", topic="kernels"),
                lambda: display.figure(curves(ODD), caption="C $x$", name="curve"),
                lambda: display.figure(curves("again"), caption="C2", name="curve-again"),
                lambda: display.figure(tabs, "Tabs", name="tabs", topic="kernels"),
                stated("It took 1.23 ms, see [it](#curve).", "kernels-time", "✓ A", "once B"),
                stated("# It is slow.", "kernels-slow", "✗ A"),
                lambda: display.prose("shown **bold**"),
            ),
        ),
    )


def tab(name: str) -> plots.Picture:
    frame = pd.DataFrame({"provider": ["fused"], "model": [name], "ratio": [2.0]})
    return show.bars(frame, "ratio", "model")


def _bad(path: Path) -> Path:
    write(
        path,
        text("# Bad\n\n## Method"),
        code("show()", *outputs_of(lambda: display.table(narrow(), caption="N", name="narrow"))),
        code("boom()", failure(f"broken {ODD}")),
        code("later()", ran=False),
    )
    noted = nbformat.read(path, as_version=4)
    noted.metadata["fusedlib"] = {"error": BROKEN, "values": {"tokens": 7}}
    nbformat.write(noted, path)
    return path


def _end(path: Path) -> Path:
    table = outputs_of(lambda: display.table(narrow(), caption="Late", name="late"))
    return write(path, text("# More of it", "appendix"), text("## Deep"), code("more()", *table))


def _guide(path: Path) -> Path:
    frame = {"text/plain": "<Styler at 0x1>", "text/html": "<table><td>of pandas</td></table>"}
    shown = nbformat.v4.new_output("execute_result", frame)
    words = text("# Guide\n\n## Its part\n\nWords.")
    return write(path, words, code("work()", stream("done"), shown))


@pytest.fixture(scope="module")
def build(
    sections: list[Section], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, list[str]]:
    """The folder of products, and the texts of the PDF that lies there."""
    folder = tmp_path_factory.mktemp("build")
    with printed_by_typst() as texts:
        render(sections, folder)
    return folder, texts


@pytest.fixture(scope="module")
def rendered(build: tuple[Path, list[str]]) -> Path:
    """The folder of products."""
    return build[0]


@pytest.fixture(scope="module")
def page(rendered: Path) -> Page:
    return Page(rendered / "report.html")


@pytest.fixture(scope="module")
def printed(build: tuple[Path, list[str]]) -> str:
    """The text of the PDF, without blanks."""
    return build[1][-1]


def squeezed(text: str) -> str:
    return re.sub(r"\s", "", text)


def test_pages_load_nothing(rendered: Path) -> None:
    for path in (rendered / "report.html", *rendered.rglob("notebooks/*.html")):
        assert loads(path.read_text(encoding="utf-8")) == []


def test_ids_are_unique_and_anchors_resolve(rendered: Path) -> None:
    for path in (rendered / "report.html", *rendered.rglob("notebooks/*.html")):
        page = Page(path)
        assert len(page.ids) == len(set(page.ids))
        inside = [link[1:] for link in page.links if link.startswith("#")]
        drawn = re.findall(r'(?:xlink:href="|url\()#([^")]+)', page.source)
        assert {*inside, *drawn, *page.references} <= set(page.ids)
        files = [link for link in page.links if link and not re.match(r"#|https?:|data:", link)]
        files = [link for link in files if "claims.html" not in link]  # not among these
        for file, _, anchor in (link.partition("#") for link in files):
            assert (path.parent / file).exists()
            assert not anchor or anchor in Page(path.parent / file).ids


def test_every_drawing_has_its_alternative_text(page: Page) -> None:
    assert len(page.drawings) == 4
    alts = (ODD, "again", tab("a").alt, tab("b").alt)
    for drawing, alt in zip(page.drawings, alts, strict=True):
        assert drawing["role"] == "img"
        title = re.search(rf'id="{drawing["aria-labelledby"]}">(.*?)</title>', page.source)
        assert title is not None and unescape(title[1]) == alt


def test_every_number_arrives_in_html(page: Page) -> None:
    for cell in wide(4, 5).to_numpy().ravel():
        assert cell in page.text
    assert "9.953" in page.text and "1.23\N{NO-BREAK SPACE}ms" in page.source


def test_every_number_arrives_in_pdf(printed: str) -> None:
    for cell in wide(4, 5).to_numpy().ravel():
        assert squeezed(cell) in printed
    assert "9.953" in printed


@pytest.mark.parametrize(
    "expected",
    [
        "The lead.", "In short, see Section 1.", "1 Good & true", "Is it?", "1.1 Method", "2 Bad",
        "2.1 Method", "A More of it", "A.1 Deep", "shown bold", "see Figure 1.",
        "See Figure 1, Figure 2, no, Section 1, Table 3, Table 4, guide and nobody.",
        "It took 1.23 ms, see Figure 1. ✓ A · once B", "# It is slow. ✗ A", "Late",
        "Execution stopped here: ValueError: broken a <b> &", "not secret",
        "report/sections/3_bad.ipynb failed", "ValueError: last line <x>",
        "report/sections/4_gone.ipynb gave nothing to show", "DeadKernelError: it died",
        "of #$*", "<script>alert(1)</script>", "# not a heading $5", "√n ≤ 10⁻⁷", "1.2 Under",
        "outside",
    ],
)  # fmt: skip
def test_text_arrives_in_both(page: Page, printed: str, expected: str) -> None:
    assert expected in page.text
    assert squeezed(expected) in printed


def test_a_figure_has_its_data_its_command_its_code_and_its_tabs(page: Page) -> None:
    assert "python -m study kernels --profile full" in page.text
    assert page.links.count("notebooks/2_good.html") == 5, "the code of each float"
    data = [link for link in page.links if link.startswith("data:text/csv")]
    assert len(data) == 7, "of tables and figures"
    assert "ratio" in unquote(data[4]) and "two" in unquote(data[4])
    assert page.source.count('type="radio"') == 2 and page.source.count('class="pane"') == 2
    assert {"#curve", "#method"} <= {*page.links}


def test_odd_characters_arrive_in_both(page: Page, printed: str) -> None:
    assert page.text.count(ODD) >= 3  # header, cell, alternative text
    assert printed.count(squeezed(ODD)) >= 2  # header, cell
    assert LONG in page.text and LONG in printed


@pytest.mark.parametrize("hidden", ["A 2/2", "boom()", "run()", "Words."])
def test_what_is_left_out(page: Page, hidden: str) -> None:
    assert hidden not in page.text


def test_links_to_notebooks_lead_to_their_sections_and_pages(page: Page, rendered: Path) -> None:
    for link in (
        '<a href="#good-true">Section 1</a>', '<a href="#narrow">Table 3</a>',
        '<a href="#late">Table 4</a>', '<a href="notebooks/04_guide.html#its-part">guide</a>',
        'href="notebooks/claims.html#kernels"',
    ):  # fmt: skip
        assert link in page.source
    own = Page(rendered / "notebooks" / "2_good.html")
    assert {"2_good.html", "3_bad.html#narrow", "claims.html#kernels"} <= {*own.links}
    assert b"(notebooks/04_guide.html#its-part)" in (rendered / "report.pdf").read_bytes(), (
        "the PDF leads there too"
    )


def test_a_link_to_a_file_goes_on_from_where_the_notebook_was_executed() -> None:
    origin = {"papermill": {"input_path": "/clone/notebooks/04.ipynb"}}
    read = nbformat.v4.new_notebook(cells=[text("[a](study/a.py)")], metadata=origin)
    page, _ = Numbers().preprocess(read, {"metadata": {"path": "/clone/report/build/notebooks"}})
    assert page.cells[0].source == "[a](../../../notebooks/study/a.py)"


def test_a_notebooks_page_shows_all_cells_and_code(rendered: Path) -> None:
    names = {path.stem for path in rendered.rglob("notebooks/*.html")}
    assert names == {"1_first", "2_good", "3_bad", "5_end", "04_guide"}
    good, bad = (Page(rendered / "notebooks" / f"{name}.html") for name in ("2_good", "3_bad"))
    assert "run()" in good.text and "not secret" in good.text and "A 2/2" in good.text
    assert "A 1/2" not in good.text
    assert "boom()" in bad.text and "later()" in bad.text and "3_bad.ipynb, failed" in bad.text
    assert "3_bad.ipynb, as executed, tokens = 7." in bad.text
    guide = Page(rendered / "notebooks" / "04_guide.html")
    assert "of pandas" in guide.text and "Styler at" not in guide.source, "pandas' own table"


def test_nbconvert_renders_a_notebook_by_hand(rendered, sections, tmp_path: Path):
    """By its name, which an installed distribution has registered, or else by its class."""
    name = "fusedlib_html"
    if name not in nbconvert.get_export_names():
        name = "press.pages.exporters.FusedlibHTMLExporter"
    copy = tmp_path / "2_good.ipynb"
    shutil.copytree(sections[1].notebook.parent, tmp_path, dirs_exist_ok=True)
    command = [sys.executable, "-m", "nbconvert", "--to", name, str(copy)]
    subprocess.run(command, check=True, capture_output=True)
    assert (
        copy.with_suffix(".html").read_bytes()
        == (rendered / "notebooks" / "2_good.html").read_bytes()
    )


def test_same_notebooks_give_same_bytes(
    rendered: Path, sections: list[Section], tmp_path: Path
) -> None:
    again = render(sections, tmp_path / "ä b")
    for path in (*again, *(tmp_path / "ä b" / "notebooks").glob("*.html")):
        assert path.read_bytes() == (rendered / path.relative_to(tmp_path / "ä b")).read_bytes()
    assert not list((tmp_path / "ä b").rglob(".*"))


def test_pdf_has_pages_contents_and_a_title(rendered: Path) -> None:
    content = (rendered / "report.pdf").read_bytes()
    assert content.startswith(b"%PDF-") and b"/Outlines" in content
    assert b"/StructTreeRoot" in content  # tagged, for screen readers
    assert b"CreationDate" not in content

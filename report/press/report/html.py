"""A document as one HTML file that loads nothing: maths as MathML, figures as inline SVG."""

import base64
import html
import re
from collections.abc import Callable, Iterable
from typing import Any

import jinja2
from pygments import highlight  # type: ignore[import-untyped]
from pygments.formatters import HtmlFormatter  # type: ignore[import-untyped]
from pygments.lexers import PythonLexer  # type: ignore[import-untyped]

from fusedlib.bench import paths
from press.display import LONG, table_rows
from press.report import model, svg
from press.report.fragments import converted

_FACES = (
    ("STIX Two Math Subset", "stix-two-math-subset.woff2", "woff2", ""),
    ("Libertinus Serif", "libertinus-serif-regular.ttf", "truetype", ""),
    ("Libertinus Serif", "libertinus-serif-italic.woff", "woff", "font-style: italic; "),
    ("Libertinus Serif", "libertinus-serif-bold.woff", "woff", "font-weight: 600 800; "),
)


def page(document: model.Document, *, home: str | None = None) -> str:
    """The whole HTML file.

    Args:
        document: numbered, with unique anchors.
        home: relative address of the report, for a notebook's page; None for the report itself.
    """
    written = converted(document, "html")
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(paths.TEMPLATES),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    return environment.get_template("page.html.j2").render(
        title=written.title,
        plain_title=plain_text(document.title),
        lead=written.lead,
        contents=_contents(written.blocks),
        body="\n".join(_WRITERS[type(block)](block) for block in written.blocks),
        style=(paths.TEMPLATES / "page.css").read_text(encoding="utf-8"),
        script=(paths.TEMPLATES / "page.js").read_text(encoding="utf-8"),
        fonts=font_faces(),
        home=home,
        wide=any(isinstance(block, model.Code) for block in document.blocks),
    )


def font_faces() -> str:
    """The style sheet's rules for the fonts, with the fonts in them."""
    return "\n".join(map(_font_face, _FACES))


def _font_face(face: tuple[str, str, str, str]) -> str:
    family, file, kind, style = face
    data = base64.b64encode((paths.TEMPLATES / "fonts" / file).read_bytes()).decode()
    source = f'src: url("data:font/{kind};base64,{data}") format("{kind}")'
    return f'@font-face {{ font-family: "{family}"; {style}{source}; }}'


def plain_text(markdown: str) -> str:
    """Text of a line of Markdown for places without markup: window title, PDF's metadata."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", markdown)
    return re.sub(r"(?<!\\)[`*$]", "", text).replace("\\", "")


def _contents(blocks: Iterable[model.Block]) -> list[dict[str, Any]]:
    """Entries of the table of contents: sections, each with its subsections."""
    entries: list[dict[str, Any]] = []
    for block in blocks:
        if not isinstance(block, model.Heading) or block.level > 2:
            continue
        text = re.sub(r"</?a\b[^>]*>", "", block.text)
        entry = {"anchor": block.anchor, "number": block.number, "text": text, "parts": []}
        if block.level == 1 or not entries:
            entries.append(entry)
        else:
            entries[-1]["parts"].append(entry)
    return entries


def _heading(block: model.Heading) -> str:
    tag = f"h{min(block.level + 1, 6)}"
    number = f'<span class="number">{block.number}</span> ' if block.number else ""
    return f'<{tag} id="{block.anchor}">{number}{block.text}</{tag}>'


def _abstract(block: model.Abstract) -> str:
    return (
        f'<section class="abstract" aria-labelledby="abstract"><h2 id="abstract">Abstract</h2>\n'
        f"{block.text}\n</section>"
    )


def _claim(block: model.Claim) -> str:
    verdicts = " · ".join(
        f"<strong>{html.escape(text)}</strong>" if fails else html.escape(text)
        for text, fails in block.verdicts
    )
    return (
        f'<div class="claim" id="{block.anchor}"><p>{block.sentence}\n'
        f'<span class="verdict">{verdicts}</span></p></div>'
    )


def _table(block: model.Table) -> str:
    head, body = (re.sub(r' style="[^"]*"', "", part) for part in table_rows(vars(block)))
    caption = f"{block.anchor}-caption"
    # The row's name stays in view when scrolled; beside long text all text may wrap.
    named = " named" if block.stub == 1 else ""
    worded = " worded" if any(len(cell) > LONG for row in block.rows for cell in row) else ""
    note = f'<p class="note">{block.note}</p>' if block.note else ""
    return (
        f'<figure class="table" id="{block.anchor}">\n'
        f'<figcaption id="{caption}"><span class="label">Table {block.number}.</span> '
        f"{block.caption}</figcaption>\n"
        f'<div class="scroll" role="region" tabindex="0" aria-labelledby="{caption}">'
        f'<table class="data{named}{worded}" aria-labelledby="{caption}">\n<thead>{head}</thead>\n'
        f"<tbody>\n{body}\n</tbody>\n</table></div>\n{note}</figure>"
    )


def _figure(block: model.Figure) -> str:
    if block.svg:
        picture = svg.inline(block.svg, f"f{block.number}", block.alt)
    else:
        data = base64.b64encode(block.png or b"").decode()
        picture = f'<img src="data:image/png;base64,{data}" alt="{html.escape(block.alt)}">'
    return (
        f'<figure class="picture" id="{block.anchor}">\n{picture}\n'
        f'<figcaption><span class="label">Figure {block.number}.</span> '
        f"{block.caption}</figcaption>\n</figure>"
    )


def _text(block: model.Text) -> str:
    return f'<pre class="output" tabindex="0">{html.escape(block.text)}</pre>'


def _code(block: model.Code) -> str:
    names = f'<p class="tags">{html.escape(", ".join(block.tags))}</p>' if block.tags else ""
    code = f'<pre tabindex="0"><code>{highlighted(block.source)}</code></pre>'
    return f'<div class="cell">{names}{code}</div>'


def highlighted(source: str) -> str:
    """HTML of Python source; magics and anything else that is not Python stays as it is."""
    lexer = PythonLexer(stripnl=False, ensurenl=False)
    marked: str = highlight(source, lexer, HtmlFormatter(nowrap=True))
    return marked


def _failure(block: model.Failure) -> str:
    return (
        f'<div class="failure" role="alert"><p><strong>{html.escape(block.title)}</strong></p>'
        f'<pre tabindex="0">{html.escape(block.lines)}</pre></div>'
    )


def _origin(block: model.Origin) -> str:
    question = f"<em>{block.question}</em> " if block.question else ""
    name = html.escape(block.name)
    link = f'<a href="{html.escape(block.page)}">{name}</a>' if block.page else name
    return f'<p class="origin">{question}<span>Notebook: {link}</span></p>'


_WRITERS: dict[type, Callable[..., str]] = {
    model.Heading: _heading,
    model.Prose: lambda block: block.text,
    model.Abstract: _abstract,
    model.Claim: _claim,
    model.Table: _table,
    model.Figure: _figure,
    model.Text: _text,
    model.Code: _code,
    model.Failure: _failure,
    model.Origin: _origin,
}

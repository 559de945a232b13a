"""From one cell of an executed notebook to blocks of the report."""

import base64
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import nbformat

from press import published
from press.display import TABLE_MIME
from press.report.model import Block, Claim, Failure, Figure, Heading, Prose, Table, Text

_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
_UNDERLINE = re.compile(r" {0,3}(=+|-+)\s*$")
ERROR_LINES = 14


@dataclass
class Numbering:
    """Numbers and anchors of one document; every anchor is given out once."""

    tables: int = 0
    figures: int = 0
    anchors: set[str] = field(default_factory=set)

    def anchor(self, *parts: str) -> str:
        """An anchor `part-part` that no other element has."""
        wanted = "-".join(filter(None, (slugify(part) for part in parts))) or "part"
        anchor, count = wanted, 1
        while anchor in self.anchors:
            count += 1
            anchor = f"{wanted}-{count}"
        self.anchors.add(anchor)
        return anchor


def slugify(text: str) -> str:
    """Lower-case ASCII letters, digits and single dashes."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def plain(text: str) -> str:
    """Terminal output without colours, control characters and overwritten lines."""
    text = _ANSI.sub("", text).replace("\r\n", "\n")
    lines = (line.rstrip("\r").rsplit("\r", 1)[-1] for line in text.split("\n"))
    return _CONTROL.sub("", "\n".join(lines)).strip("\n")


def last_lines(text: str) -> str:
    """The end of an error, where its cause stands."""
    lines = plain(text).split("\n")
    return "\n".join(["…", *lines[-ERROR_LINES:]] if len(lines) > ERROR_LINES else lines)


def tags(cell: Any) -> list[str]:
    """Tags of a cell."""
    return list(cell.metadata.get("tags", []))


def was_executed(cell: Any) -> bool:
    """Whether a code cell has run, as far as the file tells."""
    return cell.cell_type == "code" and bool(cell.execution_count or cell.outputs)


def markdown_blocks(text: str, slug: str, numbering: Numbering) -> Iterator[Heading | Prose]:
    """Headings and the text between them; headings keep their level and have no number yet."""
    pending: list[str] = []
    fence = ""
    for line in text.split("\n"):
        if mark := _FENCE.match(line):
            if not fence:
                fence = mark[1]
            elif mark[1].startswith(fence):
                fence = ""
        found = _HEADING.match(line) if not fence else None
        ruled = _UNDERLINE.match(line) if not fence and pending and pending[-1].strip() else None
        if not found and not (ruled and _is_title(pending)):
            pending.append(line)
            continue
        title = found[2] if found else pending.pop().strip()
        if any(part.strip() for part in pending):
            yield Prose("\n".join(pending).strip("\n"))
        pending = []
        level = len(found[1]) if found else 1 if ruled and ruled[1][0] == "=" else 2
        yield Heading(level, title, numbering.anchor(slug, title))
    if any(part.strip() for part in pending):
        yield Prose("\n".join(pending).strip("\n"))


def _is_title(lines: list[str]) -> bool:
    """Whether the last line stands alone and can be underlined to a heading."""
    alone = len(lines) == 1 or not lines[-2].strip()
    return alone and not re.match(r"\s*([-*+|>]|\d+[.)])", lines[-1])


def shown(notebook: Path, tag: str = "") -> Iterator[tuple[Any, dict[str, Any]]]:
    """Outputs of an executed notebook, each with what `display` says of it; none without one.

    With a tag, those of cells that carry it.
    """
    cells = nbformat.read(notebook, as_version=4).cells if notebook.exists() else []
    for cell in cells:
        for output in cell.get("outputs", []) if not tag or tag in tags(cell) else []:
            yield output, output.get("metadata", {}).get("fusedlib", {})


def output_blocks(
    cell: Any, slug: str, numbering: Numbering, *, only_errors: bool = False, whole: bool = False
) -> Iterator[Block]:
    """Blocks of a code cell's outputs; an error is always among them.

    As a `whole`, as on a notebook's page, with warnings.
    """
    for output in cell.outputs:
        kind = output.output_type
        if kind == "error":
            lines = "\n".join(output.traceback) or f"{output.ename}: {output.evalue}"
            title = plain(f"{output.ename}: {output.evalue}").split("\n")[0]
            yield Failure(f"Execution stopped here: {title}", last_lines(lines))
        elif only_errors:
            continue
        elif kind == "stream":
            text = plain(output.text)
            if text and (whole or output.name == "stdout"):
                yield Text(text)
        else:
            yield from _rich(output, slug, numbering)


def _rich(output: Any, slug: str, numbering: Numbering) -> Iterator[Block]:
    data, meaning = output.data, output.metadata.get("fusedlib", {})
    kind = meaning.get("kind")
    if kind == "table" and TABLE_MIME in data:
        yield _table(data[TABLE_MIME], slug, numbering)
    elif kind == "claim":
        yield _claim(meaning, slug, numbering)
    elif "image/svg+xml" in data or "image/png" in data:
        yield _figure(data, meaning, slug, numbering)
    elif "text/markdown" in data:
        yield from markdown_blocks(data["text/markdown"], slug, numbering)
    elif text := plain(data.get("text/plain", "")):
        yield Text(text)


def _claim(meaning: dict[str, Any], slug: str, numbering: Numbering) -> Claim:
    verdicts = []
    told = [v for v in meaning["verdicts"] if v["measured"] or v["errors"]]
    # What nobody measured is said once; else what a machine lacks goes without saying.
    told = told or [v for v in meaning["verdicts"] if not v["own"]][:1] or meaning["verdicts"][:1]
    for verdict in sorted(told, key=lambda verdict: verdict["own"]):
        fails = bool(verdict["errors"]) or verdict["held"] < verdict["measured"]
        said = verdict["text"] if verdict["measured"] or verdict["errors"] else "not measured"
        where = "here" if verdict["own"] else f"on the {verdict['label']}"
        alone = said == "not measured" or verdict["machine"] == published.MACHINE
        verdicts.append((said if alone else f"{said} {where}", fails))
    name = meaning["name"]
    return Claim(numbering.anchor(slug, name), name, meaning["sentence"], tuple(verdicts))


def _table(content: dict[str, Any], slug: str, numbering: Numbering) -> Table:
    numbering.tables += 1
    return Table(
        anchor=numbering.anchor(slug, content["name"]),
        number=numbering.tables,
        name=content["name"],
        caption=content["caption"],
        note=content.get("note"),
        columns=tuple(tuple(column) for column in content["columns"]),
        stub=content["stub"],
        align=tuple(content["align"]),
        rows=tuple(tuple(row) for row in content["rows"]),
    )


def _figure(
    data: dict[str, Any], meaning: dict[str, Any], slug: str, numbering: Numbering
) -> Figure:
    numbering.figures += 1
    name = meaning.get("name", "figure")
    caption = meaning.get("caption", "Picture without a caption.")
    svg, png = data.get("image/svg+xml"), data.get("image/png")
    return Figure(
        anchor=numbering.anchor(slug, name),
        number=numbering.figures,
        name=name,
        caption=caption,
        alt=meaning.get("alt") or plain(data.get("text/plain", "")) or caption,
        svg="".join(svg) if svg else None,
        png=base64.b64decode("".join(png)) if png and not svg else None,
    )

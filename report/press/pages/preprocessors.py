"""What happens to a notebook before nbconvert writes it: headings, numbers, links, Markdown.

What a preprocessor finds out stands in `metadata.press` of a cell, an output or the notebook:

    notebook   paper, title, lead, addresses of notebooks; see `press.pages.paper`
    cell       study, least (its headings' least level), role ("heading", "origin", "index" or
               "failure") with what the role needs
    output     anchor, number
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from nbconvert.preprocessors import Preprocessor
from nbformat.v4 import new_markdown_cell

from press.display import TABLE_MIME
from press.pages import pandoc
from press.pages.outputs import MARKDOWN, is_figure, meaning, press, slugify

_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")
_HEADING = re.compile(r" {0,3}(#{1,6})\s+(.*?)\s*#*\s*$")
_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?:#([^)\s]+)|([\w/.-]*?)([\w-]+)\.ipynb(?:#[^)\s]*)?)\)")
_FROM_TARGET = ("", "Figure", "Table", "Section")


class Headings(Preprocessor):
    """Each heading of a Markdown cell becomes a cell of its own; the title is the notebook's."""

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Split cells at headings; a heading's level is no less than its cell's `least`."""
        cells = []
        for cell in nb.cells:
            if cell.cell_type != "markdown" or "role" in press(cell):
                cells.append(cell)
                continue
            for level, text in parts(cell.source):
                known = {**press(cell)}
                if level:
                    known |= {"role": "heading", "level": max(level, known.get("least", 1))}
                metadata = {**cell.metadata, "press": known}
                cells.append(new_markdown_cell(text, metadata=metadata))
        first = press(cells[0]) if cells else {}
        if first.get("role") == "heading" and first["level"] == 1:
            press(nb).title = cells.pop(0).source
        nb.cells = cells
        return nb, resources


def parts(text: str) -> Iterator[tuple[int, str]]:
    """Headings of a Markdown text with their levels, and with level 0 the text between them."""
    pieces: list[tuple[int, list[str]]] = [(0, [])]
    fence = ""
    for line in text.split("\n"):
        if mark := _FENCE.match(line):
            fence = "" if fence and mark[1].startswith(fence) else fence or mark[1]
        if heading := None if fence else _HEADING.match(line):
            pieces += [(len(heading[1]), [heading[2]]), (0, [])]
        else:
            pieces[-1][1].append(line)
    for level, lines in pieces:
        if any(line.strip() for line in lines):
            yield level, "\n".join(lines).strip("\n")


@dataclass
class _Targets:
    """What links can lead to: titles by anchor, anchors by name."""

    titles: dict[str, str] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    def add(self, anchor: str, title: str, name: str) -> None:
        self.titles[anchor] = title
        self.names.setdefault(name, anchor)


class Numbers(Preprocessor):
    """Headings, tables and figures get numbers and anchors; links find what they name.

    A link `[](#name)` finds a target of its own notebook first, then of any; its text, if it is
    empty or only says "Figure", becomes "Figure 2". A link that finds nothing is only its text;
    one to a notebook takes the address that the paper or the folder knows.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Number in the order of the cells, then resolve all links."""
        self._anchors: set[str] = set()
        self._counts = {"Table": 0, "Figure": 0}
        self._levels, self._letters, self._first = [0] * 6, 0, ""
        targets = _Targets()
        for cell in nb.cells:
            self._number(cell, targets, paper=bool(press(nb).get("paper")))
        for cell in nb.cells:
            if press(cell).get("role") == "index":
                cell.source = _index(nb)
        known = press(nb).get("addresses") or _neighbours(resources)
        for cell in nb.cells:
            _rewrite(cell, partial(_mended, targets, known, press(cell).get("study", "")))
        resources["anchors"] = sorted(self._anchors)
        return nb, resources

    def _number(self, cell: Any, targets: _Targets, *, paper: bool) -> None:
        at = press(cell)
        study = at.get("study", "")
        if at.get("role") == "heading":
            named = (study,) if at.get("whole") else (study, at.get("after") or cell.source)
            at.update(anchor=self._anchor(*named), first=not self._levels[0] and not self._letters)
            at.level = max(at.level - 1, 1)
            number = self._section(at.level, at.get("appendix", False))
            at.number = number if paper else ""
            title = f"Section {at.number}" if at.number else cell.source
            targets.add(at.anchor, title, slugify(cell.source))
        for output in cell.get("outputs", []):
            shown = meaning(output)
            if shown.get("kind") == "claim":
                press(output).anchor = self._anchor(study or "cell", shown.name)
                targets.add(press(output).anchor, "the claim", shown.name)
                continue
            table = TABLE_MIME in output.get("data", {})
            if table or is_figure(output):
                kind = "Table" if table else "Figure"
                self._counts[kind] += 1
                name = shown.get("name", "figure")
                anchor = self._anchor(study or "cell", name)
                press(output).update(number=self._counts[kind], anchor=anchor)
                targets.add(anchor, f"{kind} {self._counts[kind]}", name)

    def _anchor(self, *words: str) -> str:
        """An anchor `word-word` that nothing else has."""
        wanted = "-".join(filter(None, map(slugify, words))) or "part"
        anchor, count = wanted, 1
        while anchor in self._anchors:
            count += 1
            anchor = f"{wanted}-{count}"
        self._anchors.add(anchor)
        return anchor

    def _section(self, level: int, appendix: bool) -> str:
        """1, 1.1, ... or A, A.1, ...; deeper headings have no number."""
        self._levels[level:] = [0] * (6 - level)
        if level == 1 and appendix:
            self._letters += 1
            self._first = chr(ord("A") + self._letters - 1)
        else:
            self._levels[level - 1] += 1
            self._first = str(self._levels[0]) if level == 1 else self._first
        number = ".".join([self._first, *map(str, self._levels[1:level])])
        return number if level <= 2 else ""


def _index(nb: Any) -> str:
    """A line a study: its notebook, the command that repeats it, its tables and figures."""
    floats: dict[str, list[str]] = {}
    for cell in nb.cells:
        for output in cell.get("outputs", []):
            if "number" in press(output):
                floats.setdefault(press(cell).study, []).append(f"[](#{press(output).anchor})")
    lines = ["| Notebook | Command | Shows |", "|:--|:--|:--|"]
    for origin in (press(c) for c in nb.cells if press(c).get("role") == "origin"):
        link = f"[{origin.study}]({origin.page})" if origin.page else origin.study
        shown = ", ".join(floats.get(origin.study, ["its claims"]))
        lines.append(f"| {link} | `make study ONLY={origin.study}` | {shown} |")
    return "\n".join(lines)


def _neighbours(resources: Any) -> dict[str, str]:
    """Pages of the notebooks in the same folder."""
    folder = resources.get("metadata", {}).get("path")
    return {p.stem: f"{p.stem}.html" for p in Path(folder).glob("*.ipynb")} if folder else {}


def _mended(targets: _Targets, addresses: dict[str, str], study: str, text: str) -> str:
    def link(match: re.Match[str]) -> str:
        words, anchor, _, notebook = match.groups()
        if notebook:
            address = addresses.get(notebook)
            return f"[{words}]({address})" if address else words
        target = slugify(anchor)
        local = "-".join(filter(None, (slugify(study) or "cell", target)))
        known = next((a for a in (local, target) if a in targets.titles), targets.names.get(target))
        if known is None:
            return words or anchor
        return f"[{targets.titles[known] if words in _FROM_TARGET else words}](#{known})"

    return _LINK.sub(link, text)


def _lines(output: Any) -> Iterator[tuple[Any, str]]:
    """Where an output's one-line Markdown stands: a dictionary and its key."""
    content = output.get("data", {}).get(TABLE_MIME) or meaning(output)
    for name in ("sentence", "caption", "note"):
        if content.get(name):
            yield content, name


def _rewrite(cell: Any, rewritten: Callable[[str], str]) -> None:
    """Put every Markdown text of a cell and its outputs through a function."""
    if cell.cell_type == "markdown":
        cell.source = rewritten(cell.source)
    for output in cell.get("outputs", []):
        for content, name in _lines(output):
            content[name] = rewritten(content[name])
        if MARKDOWN in output.get("data", {}):
            output.data[MARKDOWN] = rewritten(output.data[MARKDOWN])


class Fragments(Preprocessor):
    """All Markdown of a notebook, converted at once: starting pandoc costs more than its work.

    The templates look a text up in `resources.texts`, or in `resources.lines` where it stands in
    one line, as a heading or a caption. `resources["as_source"]` names texts to show unconverted.
    """

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Fill `resources.texts` and `resources.lines`."""
        texts = dict.fromkeys([press(nb).get("lead", "")])
        lines = dict.fromkeys([press(nb).get("title", "")])
        for cell in nb.cells:
            if cell.cell_type == "markdown":
                one_line = press(cell).get("role") in ("heading", "origin")
                (lines if one_line else texts)[cell.source] = None
            for output in cell.get("outputs", []):
                own = [content[name] for content, name in _lines(output)]
                lines |= dict.fromkeys(own)
                if not own and MARKDOWN in output.get("data", {}):
                    texts[output.data[MARKDOWN]] = None
        kept = resources.get("as_source", {})
        for name, fragments, convert in (
            ("texts", texts, pandoc.convert),
            ("lines", lines, pandoc.convert_inline),
        ):
            done = dict(zip(fragments, convert(list(fragments), resources["target"]), strict=True))
            resources[name] = done | {text: kept[text] for text in fragments if text in kept}
        return nb, resources

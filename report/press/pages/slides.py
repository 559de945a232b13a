"""The paper's notebook as a deck of slides, one HTML file or PDF.

It holds at most fifteen slides: a title with the question, the method, the studies in the order of
the report, advice, and limits. A study's slide shows its question, its first figure and all its
headline claims. Where there are more studies than slides left for them, the last ones stand two on
a slide, each with its first headline claim. No word about a result is written here: sentences,
numbers and where they hold are the claims', everything else but the method is the report's.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, ClassVar

from nbconvert.exporters import Exporter
from nbconvert.preprocessors import Preprocessor

from press.display import TABLE_MIME
from press.pages import ReportError, outputs, pandoc
from press.pages.exporters import PressExporter, compiled
from press.pages.outputs import ABSTRACT, DRAWING, meaning, plain_text, press, tags
from press.pages.preprocessors import Headings, Numbers
from study import paths

MOST = 15
"""Slides of a deck."""
ADVICE = 17, 4
"""Rows and columns of the table of advice that fit a slide; the paper has all."""

Slide = dict[str, Any]
"""Its `kind`; Markdown; figures."""

_REFERENCE = re.compile(r"\[((?:Table|Figure|Section) [\w.]+)\]\(#[^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")


@dataclass(frozen=True)
class Drawing:
    """A figure of the paper; its caption is Markdown, and stands beside it."""

    number: int
    svg: str
    alt: str


class Deck(Preprocessor):
    """The slides of a paper's notebook, as `resources.slides`, their text in HTML or Typst."""

    def preprocess(self, nb: Any, resources: Any) -> Any:
        """Fill `resources.slides` and `resources.title`."""
        resources["slides"] = _converted(deck(nb), resources["target"])
        resources["title"] = plain_text(press(nb).title)
        return nb, resources


class FusedlibSlidesExporter(PressExporter):
    """A deck as one HTML file that loads nothing."""

    export_from_notebook = "Slides of fusedlib's report"
    output_mimetype = "text/html"
    suffix, folder = ".slides.html", "fusedlib_slides"
    steps: ClassVar[list[type]] = [Headings, Numbers, Deck]


class FusedlibSlidesPDFExporter(FusedlibSlidesExporter):
    """A deck as PDF, a page a slide; text is set smaller where it would not fit."""

    export_from_notebook = "PDF slides of fusedlib's report"
    output_mimetype = "application/pdf"
    target, suffix = "typst", ".slides.pdf"

    def from_notebook_node(self, nb: Any, resources: Any = None, **more: Any) -> tuple[Any, Any]:
        """The PDF's bytes."""
        _, written = Exporter.from_notebook_node(self, nb, resources, **more)
        files: dict[str, bytes] = {}

        def saved(drawing: Drawing) -> dict[str, str]:
            name = f"{drawing.number}.svg"
            files[name] = drawing.svg.encode()
            return {"file": name, "alt": drawing.alt}

        content = {"title": written["title"], "slides": written["slides"]}
        files["deck.json"] = json.dumps(content, default=saved).encode()
        try:
            return compiled('#include "slides.typ"', "fusedlib_slides/slides.typ", files), written
        except RuntimeError as error:
            raise ReportError(f"Typst cannot set the slides: {str(error)[:400]}") from error


def deck(nb: Any) -> list[Slide]:
    """The slides of the paper's notebook, whose headings and floats are numbered."""
    if not press(nb).get("paper"):
        raise ReportError("slides are of the whole paper: report/build/paper.ipynb")
    outputs = [output for cell in nb.cells for output in cell.get("outputs", [])]

    following = zip(nb.cells, nb.cells[1:], strict=False)
    shown = {
        "figure": (o for o in outputs if DRAWING in o.get("data", {})),
        "abstract": (c for c in nb.cells if ABSTRACT in tags(c)),
        "table “advice”": (o for o in outputs if meaning(o).get("name") == "advice"),
        "section “Limits”": (b for a, b in following if _is_section(a, "Limits")),
    }
    firsts: dict[str, Any] = {
        name: next(iter(candidates), None) for name, candidates in shown.items()
    }
    if lacking := [name for name, part in firsts.items() if part is None]:
        raise ReportError(f"the report has no {lacking[0]}; report/report.ipynb makes it")
    figure, abstract, advice, limits = firsts.values()
    origins = [at for at, cell in enumerate(nb.cells) if press(cell).get("role") == "origin"]
    studies = [_study(nb.cells[at - 1 :]) for at in origins]
    for_studies = MOST - 4
    alone = min(len(studies), 2 * for_studies - len(studies))
    shared = [studies[at : at + 2] for at in range(alone, len(studies), 2)]
    table, claims = advice.data[TABLE_MIME], [c for study in studies for c in study["claims"]]
    return [
        {"kind": "title", "heading": press(nb).title, "lead": press(nb).lead,
         "figure": _drawing(figure), "caption": meaning(figure).caption,
         "text": abstract.source.split("\n\n")[0]},
        {"kind": "method", "heading": "The way of one number", "steps": _method(),
         "example": next(filter(None, (claim["example"] for claim in claims)), "")},
        *({"kind": "study", **study} for study in studies[:alone]),
        *({"kind": "pair", "parts": [{**s, "claims": s["claims"][:1]} for s in two]}
          for two in shared),
        {"kind": "advice", "heading": "What to do with it", "note": table["caption"],
         "columns": [names[-1] for names in table["columns"]][:ADVICE[1]],
         "rows": [row[: ADVICE[1]] for row in table["rows"][: ADVICE[0]]]},
        {"kind": "limits", "heading": "What this does not show",
         "points": re.split(r"^[-*] ", limits.source, flags=re.MULTILINE)[1:]},
    ]  # fmt: skip


def _method() -> list[list[str]]:
    """The steps of a number from case to slide, a name and what happens."""
    text = (paths.TEMPLATES / "fusedlib_slides" / "method.md").read_text(encoding="utf-8")
    return [line.split(": ", 1) for line in text.splitlines()]


def _is_section(cell: Any, title: str = "") -> bool:
    """True for a heading of the first level, of this title if one is given."""
    at = press(cell)
    return (at.get("role"), at.get("level")) == ("heading", 1) and title in ("", cell.source)


def _drawing(output: Any) -> Drawing:
    return Drawing(press(output).number, output.data[DRAWING], outputs.alternative(output))


def _study(cells: Sequence[Any]) -> dict[str, Any]:
    """A study's title, question and headline claims, from its heading on, and its first drawing.

    What awaits rows has nothing to draw: without claims there is no drawing.
    """
    heading, origin, *rest = cells
    own = takewhile(lambda cell: not _is_section(cell), rest)
    outputs = [output for cell in own for output in cell.get("outputs", [])]
    claims = [
        {"headline": claim.headline, "sentence": _with_bold_numbers(claim),
         "example": _example(claim),
         "standing": f"{_summary(claim)} · `{claim.study}/{claim.name}`"}
        for claim in map(meaning, outputs) if claim.get("kind") == "claim" and claim.headline
    ]  # fmt: skip
    drawn = [o for o in outputs if claims and DRAWING in o.get("data", {})]
    return {"title": heading.source, "heading": origin.source, "claims": claims,
            "figure": _drawing(drawn[0]) if drawn else None,
            "caption": meaning(drawn[0]).caption if drawn else ""}  # fmt: skip


def _recorded(claim: Any) -> list[dict[str, Any]]:
    """How it stands on the recorded machines that measured it, some in part."""
    return [s for s in claim.standings if outputs.answered(s) and not s["own"]]


def _summary(claim: Any) -> str:
    recorded = _recorded(claim)
    named = [f"{s['text']} on the {s['label']}" for s in recorded]
    texts = named if len(recorded) > 1 else [s["text"] for s in recorded]
    return ", ".join(texts) or "not recorded yet"


def _numbers(claim: Any) -> list[str]:
    """The computed values that are numbers, and no names, as the sentence has them."""
    numbers = [text for text in claim.numbers.values() if re.search(r"\d", text)]
    return sorted(numbers, key=claim.sentence.find)


def _with_bold_numbers(claim: Any) -> str:
    """A sentence whose computed numbers stand out; code and maths stay as they are."""
    numbers = sorted(_numbers(claim), key=len, reverse=True)
    either = "|".join(map(re.escape, numbers)) or "(?!)"
    pattern = rf"`[^`]*`|\$[^$]*\$|(?<![\w.,·])(?P<number>{either})(?![\w·]|[.,]\d)"

    def bold(match: re.Match[str]) -> str:
        whole = match[0].replace("–", "–\N{WORD JOINER}")
        return f"**{whole}**" if match["number"] else match[0]

    return re.sub(pattern, bold, claim.sentence)


def _example(claim: Any) -> str:
    """Where a claim's first number comes from; nothing if it has none."""
    numbers, recorded = _numbers(claim), _recorded(claim)
    rows = " and ".join(f"`report/results/{s['machine']}`" for s in recorded)
    if not numbers or not recorded:
        return ""
    return (
        f"For instance **{numbers[0]}**: computed from rows in {rows} by the claim "
        f"`{claim.study}/{claim.name}`, which {_summary(claim)}."
    )


def _converted(deck: Sequence[Slide], target: str) -> Any:
    """The deck with its Markdown, which is every string, as `target`; links are only text."""
    texts: dict[str, str] = {}

    def mapped(value: Any, done: dict[str, str] | None) -> Any:
        if isinstance(value, str):
            texts.setdefault(value, _LINK.sub(r"\1", _REFERENCE.sub(r"\1 of the paper", value)))
            return done[value] if done else value
        if isinstance(value, dict):
            return {key: mapped(entry, done) for key, entry in value.items()}
        return [mapped(v, done) for v in value] if isinstance(value, list | tuple) else value

    mapped(deck, None)
    converted = pandoc.convert_inline(list(texts.values()), target)
    return mapped(deck, dict(zip(texts, converted, strict=True)))

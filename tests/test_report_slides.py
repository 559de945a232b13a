"""The slides: how many, what each shows, and that what does not fit is refused in words."""

from typing import Any

import pandas as pd
import pytest
from nbformat import from_dict
from nbformat.v4 import new_output

from press import display
from press.pages import ReportError, slides
from press.pages.paper import combined
from press.pages.slides import FusedlibSlidesExporter, FusedlibSlidesPDFExporter
from press.render import Section
from report_sample import code, numbered, outputs_of, text, write
from slides_checks import loads, pages, words

CARD = {
    "machine": "card", "label": "CARD", "own": False, "held": 2, "measured": 3, "count": "2 of 3",
    "text": "holds in 2 of 3", "errors": [], "parts": 0, "contrary": 0,
}  # fmt: skip
MINE = {
    "machine": "me", "label": "me", "own": True, "held": 1, "measured": 1, "count": "1 of 1",
    "text": "holds here", "errors": [], "parts": 0, "contrary": 0,
}  # fmt: skip
SVG = (
    '<svg xmlns="http://www.w3.org/2000/svg" width="400pt" height="200pt" viewBox="0 0 400 200">'
    '<path d="M0 0 L400 200" stroke="#010203"/></svg>'
)


def stated(study: str, name: str = "speed", sentence: str = "", **more: Any) -> Any:
    given = {
        "headline": "Ours is faster",
        "numbers": {"gain": "2.5×", "who": "ours"},
        "standings": [CARD, MINE],
    }
    sentence = sentence or f"In {study} the {name} of ours is 2.5× that of `x = 2.5×`."
    [output] = outputs_of(lambda: display.claim(sentence, "", name, study=study, **given | more))
    return output


def drawing(number: int) -> Any:
    more = {"kind": "figure", "name": f"f{number}", "caption": f"Caption {number}.", "alt": "alt"}
    data = {"image/svg+xml": SVG, "text/plain": "alt"}
    return new_output("display_data", data, metadata={"fusedlib": more})


def shown(*outputs: Any, tag: str = "frame") -> Any:
    return code("show()", *outputs, tags=(tag,))


def report(folder: Any, studies: int, claims: list[Any], *, lacking: str = "") -> Any:
    """The paper of so many studies, each with two figures, made of notebooks in a folder."""
    sections = []
    for at in range(studies):
        own = [c for c in claims if c.metadata.fusedlib.study == name(at)]
        drawn = [drawing(2 * at + 2), drawing(2 * at + 3)]
        path = write(folder / f"{name(at)}.ipynb", text("# S"), shown(*drawn, *own, tag="paper"))
        sections.append(Section(name(at), f"Study {at}", path, None, f"Why {at}?"))
    advice = pd.DataFrame({"if": ["slow"], "then": ["warm up"]})
    parts = {
        "title": text("# What *is* true\n\nVersion 1, rows of card."),
        "abstract": text("Much is claimed.\n\nMore.", "abstract"),
        "figure": shown(drawing(1)),
        "studies": text("s", "studies"),
        "table “advice”": shown(
            *outputs_of(lambda: display.table(advice, "Advice.", "advice")),
        ),
        "section “Limits”": text(
            "## Limits\n\n- One card, see [Table](#advice).\n- One\n  [day](#x)."
        ),
    }
    frame = write(folder / "report.ipynb", *(cell for key, cell in parts.items() if key != lacking))
    return combined([*sections, Section("report", "Report", frame, None)])


def name(at: int) -> str:
    return f"{at:02}_study"


def claims_of(studies: int) -> list[Any]:
    claims = [stated(name(at), n) for at in range(studies) for n in ("speed", "memory")]
    return claims + [stated(name(at), "hidden", headline="") for at in range(studies)]


def page(paper: Any) -> str:
    return FusedlibSlidesExporter().from_notebook_node(paper)[0]


def compiled(paper: Any) -> bytes:
    return FusedlibSlidesPDFExporter().from_notebook_node(paper)[0]


@pytest.mark.parametrize(
    ("studies", "count", "pairs"),
    [(1, 5, 0), (11, 15, 0), (12, 15, 1), (22, 15, 11)],
)
def test_every_study_is_shown_on_fifteen_slides_at_most(tmp_path, studies, count, pairs):
    paper = report(tmp_path, studies, claims_of(studies))
    deck = slides.deck(numbered(from_dict(paper)))
    kinds = [slide["kind"] for slide in deck]
    assert (len(deck), kinds.count("pair")) == (count, pairs)
    shown = [part["heading"] for s in deck[2:-2] for part in s.get("parts", [s])]
    assert shown == [f"Why {at}?" for at in range(studies)]
    assert pages(compiled(paper)) == count
    html = page(paper)
    assert html.count("<section") == count and not loads(html)
    assert html.count("Caption ") == html.count("<figcaption>") == studies + 1
    text = words(html)
    for at in range(studies):
        alone = at < studies - 2 * pairs
        for claim, there in (("speed", True), ("memory", alone), ("hidden", False)):
            assert (f"In {name(at)} the {claim} of ours" in text) == there
            assert (f"holds in 2 of 3 · {name(at)}/{claim}" in text) == there


def test_what_does_not_fit_names_its_slide(tmp_path):
    long = [stated(name(1), sentence="word " * 900)]
    with pytest.raises(ReportError, match="Why 1.*too long; shorten its claims"):
        compiled(report(tmp_path, 2, long))


def test_a_study_without_recorded_claims_shows_its_question_and_no_empty_axes(tmp_path):
    html = page(report(tmp_path, 2, []))
    assert words(html).count("None of its headline claims rests on recorded rows yet") == 2
    assert html.count("<figure>") == 1 and "Why 1?" in html

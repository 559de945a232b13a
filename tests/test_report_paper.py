"""The paper as it stands, made from the recorded rows: cited, complete, drawn anew alike."""

import io
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pandas as pd
import pytest

from press import headlines, render, run, say, words
from press.display import TABLE_MIME
from press.pages import outputs, slides
from press.pages.outputs import meaning, plain_text, press, tags
from press.pages.paper import combined
from report_sample import numbered
from slides_checks import loads, pages
from slides_checks import words as text_of
from study import paths
from study.rows import load

PAGES = [page.name for page in run.pages()]


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All pages and the frame as they execute on the repository's rows alone."""
    folder = tmp_path_factory.mktemp("paper")
    with run.recorded_rows(), run.environment({"FUSEDLIB_BUILD": str(folder)}):
        assert not run.run([part for part in run.select() if part.only_shows], {})
        yield folder


@pytest.fixture(scope="module")
def paper(products: Path) -> Any:
    return numbered(combined(render.sections()))


@pytest.fixture(scope="module")
def deck(products: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    html, pdf = render.slides(tmp_path_factory.mktemp("slides"))
    return html.read_text(encoding="utf-8"), pdf.read_bytes()


def floats(cells: list[Any]) -> list[Any]:
    """Tables and figures."""
    return [o for cell in cells for o in cell.get("outputs", []) if "number" in press(o)]


def test_every_topic_has_its_page_and_every_page_a_headline(products: Path) -> None:
    assert sorted(PAGES) == sorted(path.stem for path in run.SECTIONS.glob("*.ipynb"))
    headed = {claim.study for claim in headlines.stated() if claim.headline}
    assert headed == {*PAGES}


def test_every_reference_has_its_number(paper: Any) -> None:
    assert press(paper).dead == []


def test_linked_numbers_in_prose_are_those_of_the_claims(products: Path) -> None:
    assert words.rewritten_all() == {}, "run `make figures`"


def test_nothing_failed_and_every_page_states_a_claim(paper: Any) -> None:
    stated = {
        press(cell).study for cell in paper.cells for o in cell.get("outputs", [])
        if meaning(o).get("kind") == "claim"
    }  # fmt: skip
    assert stated == {*PAGES}
    assert not [c for c in paper.cells if press(c).get("role") == "failure"]


def test_every_claim_that_is_shown_is_stated_and_every_stated_one_is_shown(paper: Any) -> None:
    shown = {
        (o.metadata.fusedlib.study, o.metadata.fusedlib.name)
        for cell in paper.cells for o in cell.get("outputs", [])
        if meaning(o).get("kind") == "claim"
    }  # fmt: skip
    assert shown == {(claim.topic, claim.name) for claim in say.every()}


@pytest.mark.parametrize("topic", PAGES)
def test_the_page_of_a_topic_names_what_is_there(products: Path, topic: str) -> None:
    read = nbformat.read(products / "notebooks" / f"{topic}.ipynb", as_version=4)
    shown = [meaning for _, meaning in shown_by(products, topic)]
    names = [one.name for one in shown if "name" in one]
    assert len({*names}) == len(names)
    links = re.findall(r'\]\(#([\w-]+)(?: "(\w+)")?\)', "".join(c.source for c in read.cells))
    numbers = {(claim.name, n) for claim in say.every(topic) for n in claim.numbers()}
    assert {(name, n) for name, n in links if n} <= numbers
    assert {name for name, n in links if not n} <= {*names}


def test_page_one_and_the_advice_have_their_numbers(paper: Any) -> None:
    tables = {meaning(o).name: o.data.get(TABLE_MIME) for o in floats(paper.cells)}
    assert not [row for row in tables["advice"].rows if "\N{EM DASH}" in " ".join(row[:3])]
    (abstract,) = [cell.source for cell in paper.cells if "abstract" in tags(cell)]
    assert "\N{EM DASH}" not in abstract


def shown_by(products: Path, topic: str) -> list[tuple[Any, Any]]:
    """Every output of a page's copy with its meaning."""
    return list(outputs.shown(products / "notebooks" / f"{topic}.ipynb"))


def rows_of(topic: str, **fields: Any) -> pd.DataFrame:
    """The recorded rows of a topic that are ok and have these fields."""
    rows = load(topic).query("status == 'ok'")
    for name, value in fields.items():
        rows = rows[rows[name] == value]
    return rows


PLANS = "model-memory-plans"


def test_a_time_over_a_pass_that_did_not_fit_is_not_drawn(products: Path) -> None:
    """It was taken as 3/4 of the checkpointed one, so that a mark lay on the line of 4/3."""
    [drawn] = [m for _, m in shown_by(products, "model_memory") if m.get("name") == PLANS]
    points = pd.read_csv(io.StringIO(drawn["data"]))
    fields = {"experiment": "checkpoint", "precision": "bf16", "model": "2.7b"}
    kept = rows_of("model_memory", **fields, context_length=2944)
    peaks, times = (points[points["what"] == what] for what in ("peak_gib", "ratio"))
    assert len(peaks) + len(times) == len(points)
    peaks, times = (part[part["precision"] == "bf16"] for part in (peaks, times))
    for machine, measured in kept.groupby("machine"):
        marks = times.loc[times["machine"] == machine, "cost"]
        assert sorted(marks) == pytest.approx(sorted(measured["ratio"].dropna())), machine
        held = (peaks["machine"] == machine).sum()
        assert held == measured["provider"].nunique(), "what it holds was measured, and is drawn"
    assert {*times["machine"]} <= {*peaks["machine"]} == {"H200", "H100"}


def test_how_much_of_a_gain_launching_costs_is_counted(products: Path) -> None:
    """ "Most of the gain is the cost of launching" was false at width 512."""
    for answer in (a for s in say.evaluate("kernels/few-tokens").standings for a in s.answers):
        assert 0 <= answer.values["most"] < answer.values["widths"] == 4


def test_the_committed_figures_show_what_the_rows_say(products: Path) -> None:
    fresh = render.figures(run.copies())
    assert {path.name for path in render.FIGURES.iterdir()} == set(fresh), "run `make figures`"
    for name in (name for name in fresh if name.endswith(".csv")):
        old = pd.read_csv(render.FIGURES / name)
        new = pd.read_csv(io.StringIO(fresh[name]))
        pd.testing.assert_frame_equal(old, new, rtol=1e-6, obj=f"{name}: run `make figures`;")


def test_the_readme_block_is_what_the_rows_say(products: Path) -> None:
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    block = headlines.readme_block(headlines.stated(), headlines.table_of(*headlines.REGIMES))
    assert text == headlines.updated_readme(text, block), "run `python -m press readme --write`"


def test_slides_show_every_topic_with_its_headlines_and_each_machine_s_standing(products, deck):
    html, pdf = deck
    assert 12 <= pages(pdf) == html.count("<section") <= slides.MOST and not loads(html)
    alone = 2 * (slides.MOST - 4) - len(PAGES)
    stated, shown = list(headlines.stated()), text_of(html)
    for at, page in enumerate(run.pages()):
        assert page.question in shown
        claims = [c for c in stated if c.study == page.name and c.headline]
        for claim in claims if at < alone else claims[:1]:
            sentence = " ".join(plain_text(claim.sentence).split())
            recorded = [s for s in claim.standings if outputs.answered(s) and not s["own"]]
            assert recorded, f"{claim.study}/{claim.name} is measured nowhere"
            places = [f"{v['text']} on the {v['label']}" for v in recorded]
            standing = ", ".join(places) if len(places) > 1 else recorded[0]["text"]
            standing = " ".join(plain_text(standing).split())  # it may quote a recording's sentence
            assert f"{claim.headline}. {sentence} {standing}" in shown
    assert "not recorded yet" not in shown and "error in the claim" not in shown

"""The paper as it stands, made from the recorded rows: cited, complete, drawn anew alike."""

import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pandas as pd
import pytest
from matplotlib.colors import to_rgba_array

from claims_checks import (
    check_each_holds_or_says_where_not,
    check_some_change_makes_each_false,
)
from measure.recording import paths, results
from press import headlines, render, replay, style
from press.claims import Claim
from press.display import TABLE_MIME
from press.pages import outputs, slides
from press.pages.outputs import meaning, plain_text, press, tags
from press.pages.paper import combined
from press.render import sections
from press.running import config
from press.running.config import DETAILS, FRAME
from press.running.products import copy_path
from press.words import numbers_of, rewritten
from report_sample import numbered
from slides_checks import loads, pages
from slides_checks import words as text_of
from study import run
from study.rows import load

GUIDES = [guide.name for guide in config.load().guides]
STUDIES = [part.name for part in config.load().with_details(config.load().studies)]


LOOK = ("get_marker", "get_linestyle", "get_markerfacecolor")
ALIKE: list[str] = []
"""Names that look alike in one of the figures of the notebooks that have executed."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("paper")


def of_one_look(fig: Any) -> list[str]:
    """Names of a figure's lines and bars that have one colour, marker and dash."""
    names: dict[Any, set[str]] = {}
    for ax in fig.axes:
        for handle, name in zip(*ax.get_legend_handles_labels(), strict=True):
            part = handle[0] if isinstance(handle, tuple) else handle  # bars are several
            colour = (getattr(part, "get_color", None) or part.get_facecolor)()
            look = [str(getattr(part, get)()) for get in LOOK if hasattr(part, get)]
            names.setdefault((to_rgba_array(colour).tobytes(), *look), set()).add(name)
    return [" and ".join(sorted(alike)) for alike in names.values() if len(alike) > 1]


@pytest.fixture(scope="module")
def claims_of(folder: Path) -> Callable[[str], list[Claim]]:
    """The claims of a notebook, which executes on the repository's rows alone, once."""

    drawn = style.svg

    def svg(fig: Any) -> str:
        ALIKE.extend(of_one_look(fig))
        return drawn(fig)

    @cache
    def with_details(study: str) -> dict[str, list[Claim]]:
        with mock.patch.object(style, "svg", svg):
            return replay.executed(config.load(), folder, [study])

    return lambda name: with_details(name.removesuffix(DETAILS))[name]


@pytest.mark.parametrize(
    "check",
    [check_each_holds_or_says_where_not, check_some_change_makes_each_false],
    ids=["holds", "can_be_false"],
)
@pytest.mark.parametrize("name", [name for name in STUDIES if name not in run.topics()])
def test_claims_of_a_study(claims_of, name, check):
    check(claims_of(name))


@pytest.mark.parametrize("name", [n for n in STUDIES if not n.endswith(DETAILS)])
def test_a_study_has_a_headline_and_its_numbers_are_linked(claims_of, name):
    """`make figures` writes linked numbers in Markdown anew; here they are what it would write."""
    details = name + DETAILS
    claims = [*claims_of(name), *(claims_of(details) if details in STUDIES else ())]
    assert any(claim.headline for claim in claims)
    numbers = numbers_of(claims)
    notebook = next(part.notebook for part in config.load().studies if part.name == name)
    assert rewritten(notebook, name, numbers) is None, "run `make figures`"


@pytest.fixture(scope="module")
def products(folder: Path, claims_of: Callable[[str], list[Claim]]) -> Path:
    """All notebooks as they execute on the repository's rows alone."""
    for name in (*STUDIES, *GUIDES, FRAME):
        claims_of(name)
    return folder


@pytest.fixture(scope="module")
def paper(products: Path) -> Any:
    return numbered(combined(sections(config.load(), products)))


@pytest.fixture(scope="module")
def deck(products: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, bytes]:
    html, pdf = render.slides(products, tmp_path_factory.mktemp("slides"))
    return html.read_text(encoding="utf-8"), pdf.read_bytes()


def floats(cells: list[Any]) -> list[Any]:
    """Tables and figures."""
    return [o for cell in cells for o in cell.get("outputs", []) if "number" in press(o)]


def test_every_reference_has_its_number(paper: Any) -> None:
    assert press(paper).dead == []


def test_nothing_failed_and_every_study_states_a_claim(paper: Any) -> None:
    stated = {
        press(cell).study for cell in paper.cells for o in cell.get("outputs", [])
        if meaning(o).get("kind") == "claim"
    }  # fmt: skip
    assert stated == {name.removesuffix(DETAILS) for name in STUDIES}
    assert not [c for c in paper.cells if press(c).get("role") == "failure"]


def test_page_one_and_the_advice_have_their_numbers(paper: Any) -> None:
    tables = {meaning(o).name: o.data.get(TABLE_MIME) for o in floats(paper.cells)}
    assert not [row for row in tables["advice"].rows if "\N{EM DASH}" in " ".join(row[:3])]
    (abstract,) = [cell.source for cell in paper.cells if "abstract" in tags(cell)]
    assert "\N{EM DASH}" not in abstract


def test_no_two_names_of_a_figure_look_alike(products: Path) -> None:
    assert products and ALIKE == []


def shown_by(products: Path, study: str) -> list[tuple[Any, Any]]:
    """Every output of a notebook's copy with its meaning."""
    return list(outputs.shown(copy_path(study, products)))


def rows_of(study: str, **fields: Any) -> pd.DataFrame:
    """The recorded rows of a topic that are ok and have these fields."""
    rows = load(study).query("status == 'ok'")
    for name, value in fields.items():
        rows = rows[rows[name] == value]
    return rows


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


PLANS = "model-memory-plans"


def test_how_much_of_a_gain_launching_costs_is_counted(claims_of) -> None:
    """ "Most of the gain is the cost of launching" was false at width 512."""
    [claim] = [c for c in claims_of("kernels") if c.name == "few-tokens"]
    for evaluation in (e for s in claim.standings for e in s.answers):
        assert 0 <= evaluation.values["most"] < evaluation.values["widths"] == 4


def test_the_committed_figures_show_what_the_rows_say(products: Path) -> None:
    fresh = render.figures(products)
    assert {path.name for path in render.FIGURES.iterdir()} == set(fresh), "run `make figures`"
    for name in (name for name in fresh if name.endswith(".csv")):
        old = pd.read_csv(render.FIGURES / name)
        new = pd.read_csv(io.StringIO(fresh[name]))
        pd.testing.assert_frame_equal(old, new, rtol=1e-6, obj=f"{name}: run `make figures`;")


def test_the_readme_block_is_what_the_rows_say(products: Path) -> None:
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    new = headlines.updated_readme(text, headlines.readme_block_of(products))
    assert text == new, "run `python -m press readme --write`"


def test_recorded_rows_are_those_of_the_repository_seen_from_nowhere(monkeypatch, tmp_path):
    for name in ("card", "mine", "empty"):
        (tmp_path / name / "one").mkdir(parents=True)
    for name in ("card", "mine"):
        described = {"schema": 2, "profile": "full", "runs": [{}]}
        (tmp_path / name / "one" / "machine.json").write_text(json.dumps(described))
        (tmp_path / name / "one" / "01_x.jsonl").write_text('{"case": "a", "status": "ok"}\n')
    (tmp_path / "mine" / ".gitignore").write_text("*\n")
    monkeypatch.setattr(paths, "RECORDED", tmp_path)
    with replay.recorded_rows():
        assert [one.machine for one in results.recordings()] == ["card"]
    assert {one.machine for one in results.recordings()} >= {"card", "mine"}


def test_slides_show_every_study_with_its_headlines_and_each_machine_s_standing(products, deck):
    html, pdf = deck
    assert 12 <= pages(pdf) == html.count("<section") <= slides.MOST and not loads(html)
    studies = config.load().studies
    alone = 2 * (slides.MOST - 4) - len(studies)
    stated = list(headlines.read_claims(products))
    shown = text_of(html)
    for at, study in enumerate(studies):
        assert study.question in shown
        claims = [c for c in stated if c.study == study.name and c.headline]
        for claim in claims if at < alone else claims[:1]:
            sentence = " ".join(plain_text(claim.sentence).split())
            recorded = [s for s in claim.standings if outputs.answered(s) and not s["own"]]
            assert recorded, f"{claim.study}/{claim.name} is measured nowhere"
            places = [f"{v['text']} on the {v['label']}" for v in recorded]
            standing = ", ".join(places) if len(places) > 1 else recorded[0]["text"]
            standing = " ".join(plain_text(standing).split())  # it may quote a recording's sentence
            assert f"{claim.headline}. {sentence} {standing}" in shown
    assert "not recorded yet" not in shown and "error in the claim" not in shown

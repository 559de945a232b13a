"""The paper as it stands, made from the recorded rows: cited, short, complete, drawn anew alike."""

import io
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from page_checks import loads, pages, words
from press import render, run, say
from press.display import TABLE_MIME
from press.factors import factors
from press.pages.outputs import meaning, press
from press.pages.paper import combined
from report_sample import numbered
from study.rows import load

MOST_PAGES, MOST_OF_APPENDIX, MOST_WORDS = 12, 8, 9_000


@pytest.fixture(scope="module")
def products(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """All sections as they execute on the repository's rows alone, and what is made of them."""
    folder = tmp_path_factory.mktemp("paper")
    with run.recorded_rows(), run.environment({"FUSEDLIB_BUILD": str(folder)}):
        assert not run.run(run.sections(), {})
        render.render(render.sections(), folder)
        yield folder


@pytest.fixture(scope="module")
def paper(products: Path) -> Any:
    return numbered(combined(render.sections()))


def shown(paper: Any) -> list[Any]:
    """Every output with what it says of itself."""
    return [o for cell in paper.cells for o in cell.get("outputs", []) if meaning(o)]


def test_nothing_failed_and_every_reference_finds_its_target(paper: Any) -> None:
    assert press(paper).dead == []
    assert not [c for c in paper.cells if press(c).get("role") == "failure"]


def test_the_body_and_the_appendix_are_short(products: Path) -> None:
    html = (products / "report.html").read_text(encoding="utf-8")
    assert not loads(html)
    main = html[html.index("<main") : html.index("</main>")]
    assert len(re.sub(r"<[^>]+>", " ", words(main)).split()) <= MOST_WORDS
    whole = pages((products / "report.pdf").read_bytes())
    with run.environment({"FUSEDLIB_BUILD": str(products)}):
        body = [s for s in render.sections() if s.name != "8_published"]
    render.render(body, products / "body")
    alone = pages((products / "body" / "report.pdf").read_bytes())
    assert alone <= MOST_PAGES and whole - alone <= MOST_OF_APPENDIX


def test_page_one_has_three_results_their_commands_and_a_verdict_a_factor(paper: Any) -> None:
    first = [o for cell in paper.cells for o in cell.get("outputs", [])
             if press(cell).study == "1_results"]  # fmt: skip
    text = "".join(
        o.data.get("text/markdown", "") for o in first if meaning(o).get("kind") == "prose"
    )
    results = re.split(r"^\d\. ", text, flags=re.MULTILINE)[1:]
    assert len(results) == 3 and "\N{EM DASH}" not in text
    commands = "".join(
        cell.source for cell in paper.cells
        if press(cell).study == "1_results" and cell.cell_type == "markdown"
    )  # fmt: skip
    [topics] = re.findall(r"^for t in (.+); do .*python -m study \$t ", commands, re.MULTILINE)
    assert len(topics.split()) == 3 and all(len(load(topic)) for topic in topics.split())
    [table] = [o.data[TABLE_MIME] for o in first if TABLE_MIME in o.data]
    assert len(table.rows) <= 9 and not any(meaning(o).get("kind") == "figure" for o in first)
    verdicts = Counter(factors()["verdict"])
    for row in table.rows:
        for each in row[2].split(", "):
            count, name = re.fullmatch(r"(?:(\d+) )?(.+)", each).groups()
            verdicts[name] -= int(count or 1)
    assert not any(verdicts.values())


def test_every_claim_has_its_number_and_the_ledger_has_it(products: Path, paper: Any) -> None:
    stated = {f"{one.topic}-{one.name}" for one in say.every()}
    said = {meaning(o).name for o in shown(paper) if meaning(o).kind == "claim"}
    assert said <= stated
    for output in shown(paper):
        assert "\N{EM DASH}" not in meaning(output).get("sentence", "")
    [ledger] = [part for part in run.sections() if part.name == render.LEDGER]
    source = ledger.notebook.read_text(encoding="utf-8")
    assert {one.topic for one in say.every()} == {*re.findall(r'ledger\(\\"(\w+)\\"\)', source)}
    page = (products / "notebooks" / "claims.html").read_text(encoding="utf-8")
    for one in say.every():
        assert f'id="{one.topic.replace("_", "-")}"' in page, "where its mark leads"


def test_every_published_table_stands_in_the_paper_and_says_why_ours_is_missing(paper: Any) -> None:
    tables = {meaning(o).name: o.data[TABLE_MIME] for o in shown(paper) if TABLE_MIME in o.data}
    lines = {name: len(one.rows) for name, one in tables.items() if name.startswith("published-")}
    assert lines == {
        "published-factors": 30, "published-mlp-times": 18, "published-mlp-factors": 7,
        "published-mlp-peaks": 7, "published-mlp-stack": 7, "published-mlp-test": 2,
        "published-mnist": 12, "published-course": 30, "published-laptop": 12,
        "published-sums": 4, "published-attention": 8, "published-warmup": 15,
        "published-llama": 14, "published-llama-peaks": 14, "published-llama-files": 17,
        "published-compilers": 21,
    }  # fmt: skip


def test_a_figure_has_data_a_topic_and_no_machine_that_nobody_recorded(paper: Any) -> None:
    figures = [meaning(o) for o in shown(paper) if meaning(o).kind == "figure"]
    assert len({one.name for one in figures}) == len(figures) >= 3
    for one in figures:
        data = pd.read_csv(io.StringIO(one.data))
        assert one.topic and {*data["tab"]} == {"H200", "H100"}
        assert {*data.get("machine", pd.Series(dtype=str)).dropna()} <= {"H200", "H100"}


def test_the_committed_figures_show_what_the_rows_say(products: Path) -> None:
    fresh = render.figures(run.copies())
    assert {path.name for path in render.FIGURES.iterdir()} == set(fresh), "run `make figures`"
    for name in (name for name in fresh if name.endswith(".csv")):
        old = pd.read_csv(render.FIGURES / name)
        new = pd.read_csv(io.StringIO(fresh[name]))
        pd.testing.assert_frame_equal(old, new, rtol=1e-6, obj=f"{name}: run `make figures`;")

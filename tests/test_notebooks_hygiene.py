"""Committed notebooks and the README keep the rules of the house, and the rules have teeth."""

import copy
import json

import pytest

from measure.recording import paths
from notebook_rules import Notebook, problems
from press.running import config, parameters
from prose import measured_numbers, readme_prose

NOTEBOOKS = [
    path for folder in (paths.NOTEBOOKS, paths.REPORT, paths.REPORT / "sections")
    for path in sorted(folder.glob("*.ipynb"))
]  # fmt: skip

# --- what is committed ---------------------------------------------------------------------------


def test_every_notebook_belongs_to_the_study():
    assert set(NOTEBOOKS) == {part.notebook for part in config.load().parts}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.name)
def test_notebook_keeps_the_rules(path):
    notebook = json.loads(path.read_text(encoding="utf-8"))
    [part] = (part for part in config.load().parts if part.notebook == path)
    guide = part in config.load().guides
    assert problems(notebook, frame=path.parent != paths.NOTEBOOKS, guide=guide) == []
    assert all(knob.help for knob in parameters.knobs(part).values())


def test_readme_states_no_measured_number_outside_its_generated_block():
    text = (paths.ROOT / "README.md").read_text(encoding="utf-8")
    assert measured_numbers(readme_prose(text)) == []


# --- teeth: the detector of measured numbers -----------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "The step takes 3 ms.",
        "It takes **3.2** ms on average.",
        r"about $12\,\mu s$ a launch",
        r"$4.5\ \mathrm{ms}$ a step",
        "it renders in 3 seconds",
        "a bandwidth of 4,300 GB/s",
        "reaches 640TFLOPS",
        "41,000 tokens/s",
        "is 2.5× faster",
        "is 2.5 × faster",
        "a speed-up of 3",
        r"a gain of $2\times$.",
        "runs 2x as fast",
        "is 3 times slower",
        "a 3-fold gain",
        "uses 40 % less",
        r"within 1\% of it",
        "half a per cent, or 0.5 per cent",
        "an 80-GB card",
        "drew 690 W",
        "the sum is 9.9531, not ten",
        "| small | 12.4 |",
        "3&nbsp;ms",
        "between 3\u202fms and more",
    ],
)
def test_detector_rejects(text):
    assert measured_numbers(text)


def test_readme_prose_leaves_out_the_block_and_marked_requirements_only():
    text = (
        "A GPU with 80 GB. <!-- requirement -->\nIt takes 3 ms.\n"
        "<!-- claims:begin -->\n5 ms\n<!-- claims:end -->\nand 7 ms"
    )
    assert measured_numbers(readme_prose(text)) == ["3 ms", "7 ms"]


# --- teeth: the rules of notebooks ---------------------------------------------------------------


def good_notebook() -> Notebook:
    def cell(kind: str, text: str, *tags: str) -> dict:
        content = {"cell_type": kind, "metadata": {"tags": list(tags)}, "source": text}
        return content | ({"outputs": [], "execution_count": None} if kind == "code" else {})

    claims = "@claim('a', rows)\ndef _(rows):\n    x = 1\n\n\n@claim('b', rows)\ndef _(rows): x = 2"
    knobs = "".join(f"knob_{n}: int = {n}  # how many\n" for n in range(4))
    measured = "from press.rows import run_here\nfrom a import b\nrows = run_here('x', sizes)"
    built = 'names = [n for n in b]\nnames += [n for n in b]\nshow(rows, shown="this machine")'
    cells = [
        cell("markdown", "# Title\n\nThe answer. ![picture](../figures/x.svg)"),
        cell("code", f"{knobs}sizes: dict = {{}}  # all others", "parameters"),
        cell("code", measured),
        cell("markdown", "**Predict:** how many?\n\n<details>x</details> [Two](02_two.ipynb)."),
        cell("code", claims, "paper"),
        cell("markdown", "**Break it.** Change it."),
        cell("code", f"{built}\nrows.explore('width')"),
    ]
    cells = [content | {"id": f"cell-{number}"} for number, content in enumerate(cells)]
    return {"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": cells}


def test_a_good_notebook_has_no_problem():
    assert problems(good_notebook()) == []


def many_cells(count: int, lines: int = 1) -> list[dict]:
    empty = {"cell_type": "code", "metadata": {}, "outputs": [], "execution_count": None}
    return [empty | {"id": f"more-{n}", "source": "x()\n" * lines} for n in range(count)]


def set_source(index: int, text: str):
    return lambda notebook: notebook["cells"][index].update(source=text)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (set_source(0, "No title"), "not a markdown title"),
        (set_source(0, "# Title\n\nIt takes 3 ms."), "states '3 ms'"),
        (set_source(0, "# Title"), "does not open with a picture"),
        (set_source(4, "f(\n" + "\n" * 9 + "1,\n" * 29 + ")"), "has 31 lines, more than 30"),
        (set_source(4, "f(\n" + "1,\n" * 11 + ")"), "a cell has 13 lines, more than 12"),
        (set_source(4, "sizes = 1"), "sizes is assigned in 2 cells"),
        (set_source(4, "import b.c"), "b is assigned in 2 cells"),
        (set_source(4, "for names in y: pass"), "names is assigned in 2 cells"),
        (set_source(4, "def names(): pass"), "names is assigned in 2 cells"),
        (set_source(4, "names += 1"), "names is assigned in 2 cells"),
        (set_source(4, "import press.rows"), "imports the whole module press.rows"),
        (
            set_source(4, "from press.rows import a, c, d, e, f, g, h, i, j, k"),
            "imports 11 names of ours, more than 10",
        ),
        (set_source(3, "<details>x</details> [Two](02_two.ipynb)"), "asks for no prediction"),
        (set_source(3, "**Predict:** how many? [Two](02_two.ipynb)"), "folds no answer"),
        (set_source(3, "**Predict:** how many?"), "links to no other notebook"),
        (set_source(5, "The end."), "breaks nothing"),
        (set_source(5, "See [](#x)."), "a link without words, [](#x)"),
        (set_source(6, "names = 'this machine'"), "has nothing to explore"),
        (set_source(6, "rows.explore('width')"), "does not show this machine"),
        (set_source(2, "from a import b"), "measures nothing"),
        (set_source(1, "sizes: dict = {}"), "has 0 knobs, not 4 to 6"),
        (lambda n: n["cells"].extend(many_cells(14)), "has 18 cells of code, more than 16"),
        (lambda n: n["cells"].extend(many_cells(12, lines=12)), "lines of code, more than 150"),
        (lambda n: n["cells"][4]["metadata"].clear(), "no cell is tagged paper"),
        (lambda n: n["cells"][2]["metadata"].update(tags=["paper"]), "measures in a cell of"),
        (lambda n: n["cells"][4]["metadata"].update(tags=["aside"]), "unknown tags: aside"),
        (set_source(2, "%matplotlib inline"), "no plain Python"),
        (lambda n: n["cells"][2].update(execution_count=1), "execution count"),
        (
            lambda n: n["cells"][2].update(
                outputs=[{"output_type": "stream", "name": "stdout", "text": "1"}]
            ),
            "has outputs",
        ),
        (lambda n: n["cells"][2]["metadata"].update(papermill={}), "metadata of a run"),
        (lambda n: n["cells"][2].pop("id"), "no id of its own"),
        (lambda n: n["cells"][2].update(id="cell-1"), "no id of its own"),
        (lambda n: n["cells"][2].pop("outputs"), "not a valid notebook"),
        (lambda n: n.update(nbformat_minor=4), "not nbformat 4.5"),
    ],
)
def test_rules_reject_a_damaged_notebook(damage, message):
    notebook = copy.deepcopy(good_notebook())
    damage(notebook)
    assert any(message in problem for problem in problems(notebook)), problems(notebook)

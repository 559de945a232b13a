"""Small executed notebooks, made without a kernel from what `display` really emits."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import nbformat
import pandas as pd

from press import display, show
from press.pages.preprocessors import Numbers, Pieces
from press.plots import Picture


def outputs_of(*shows: Callable[[], None]) -> list[Any]:
    """The outputs that these calls of `display` leave in a notebook."""
    with mock.patch.object(display, "emit") as emit:
        for show in shows:
            show()
    return [
        nbformat.v4.new_output("display_data", data, metadata={"fusedlib": meaning})
        for data, meaning in (call.args for call in emit.call_args_list)
    ]


def numbered(notebook: Any) -> Any:
    """A notebook with its headings apart, numbered, its links resolved: before it is written."""
    for step in (Pieces(), Numbers()):
        notebook, _ = step.preprocess(notebook, {})
    return notebook


def text(source: str, *tags: str) -> Any:
    """A Markdown cell."""
    return nbformat.v4.new_markdown_cell(source, metadata={"tags": list(tags)})


def code(source: str, *outputs: Any, tags: tuple[str, ...] = (), ran: bool = True) -> Any:
    """A code cell with its outputs."""
    return nbformat.v4.new_code_cell(
        source,
        outputs=list(outputs),
        metadata={"tags": list(tags)},
        execution_count=1 if ran else None,
    )


def stream(content: str, name: str = "stdout") -> Any:
    """Printed text."""
    return nbformat.v4.new_output("stream", name=name, text=content)


def failure(message: str) -> Any:
    """An error with a coloured traceback."""
    return nbformat.v4.new_output(
        "error",
        ename="ValueError",
        evalue=message,
        traceback=["\x1b[31mTraceback\x1b[0m (most recent call last)", f"ValueError: {message}"],
    )


def write(path: Path, *cells: Any) -> Path:
    """A notebook file."""
    for at, cell in enumerate(cells):
        cell.id = f"cell-{at}"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(nbformat.v4.new_notebook(cells=list(cells)), path)
    return path


def stated(sentence: str, name: str, *marks: str) -> Callable[[], None]:
    """What states a claim."""
    return lambda: display.claim(sentence, marks, name=name)


def narrow() -> pd.DataFrame:
    """A small table."""
    return pd.DataFrame(
        {"Sum": ["fp32", "fp16"], "Published": [10.0001, 9.9531], "Measured": [10.000134, None]}
    )


def wide(groups: int, rows: int) -> pd.DataFrame:
    """A table with groups of three columns and two levels of row names."""
    lines = [(f"model {at // 4}", str(at % 4)) for at in range(rows)]
    columns = [
        (f"Times {n}, ms", what) for n in range(groups) for what in ("theirs", "H200", "own")
    ]
    cells = [
        [f"{(at + 1) * 37.13 + 11.7 * n:.2f}" for n in range(len(columns))] for at in range(rows)
    ]
    index = pd.MultiIndex.from_tuples(lines, names=["Model", "Warm-up"])
    return pd.DataFrame(cells, index, pd.MultiIndex.from_tuples(columns))


def curves(alt: str) -> Picture:
    """A drawing with clip paths and a legend."""
    rows = [{"tokens": at, "median_ms": top / at + 1, "provider": name}
            for name, top in (("fused", 4.0), ("eager", 7.0)) for at in range(1, 11)]  # fmt: skip
    return replace(show.lines(pd.DataFrame(rows), "tokens", "median_ms"), alt=alt)

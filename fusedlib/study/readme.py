"""The README's figures: a block generated from the recorded rows, which a test compares.

python -m fusedlib.study.readme            prints the block
python -m fusedlib.study.readme --write    puts it into README.md
"""

import argparse
import re
from collections.abc import Iterator
from pathlib import Path

import pandas as pd

from fusedlib import paths
from fusedlib.bench import results
from fusedlib.study import gains, headlines
from fusedlib.study.kernels.rows import rejected
from fusedlib.study.running import config
from fusedlib.study.selection import is_finding

MACHINE = "nvidia-h200"
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"


class ReadmeError(ValueError):
    """The block cannot be made or placed; the message says what is missing."""


def recorded(study: str, directory: Path | None = None) -> pd.DataFrame:
    """Rows of one study from the recorded machine, of the profile `full`.

    A visitor's own rows, wherever they lie, never reach the README, and the text is the same when
    it is made on that very machine. Raises ReadmeError when the machine has no row of the study.
    """
    directory = directory or paths.REPORT / "results"
    frame = results.load(study, directory=directory, profile="full")
    frame = frame[frame["machine"] == MACHINE].reset_index(drop=True)
    if frame.empty:
        raise ReadmeError(
            f"{directory / MACHINE} holds no row of {study} in profile full; "
            "record it there first: make study PROFILE=full"
        )
    return frame.assign(own=False)


def block(directory: Path | None = None) -> str:
    """The generated block, markers included: what ours gives and where it gives nothing, from the
    rows of studies 03 and 04, and the headline of every study.

    Raises ReadmeError when a study has no row or its rows give no headline.
    """
    studies = []
    for study in config.load().studies:
        headline = headlines.HEADLINES[study.name]
        rows = recorded(study.name, directory)
        sentences = [s for s in (headline.short or headline.sentences)(rows) if is_finding(s)]
        if not sentences:
            raise ReadmeError(
                f"the rows of {study.name} on {MACHINE} give no headline; record it whole"
            )
        studies.append(f"- [{study.title}](notebooks/{study.name}.ipynb): {sentences[0]}")
    return "\n".join([BEGIN, *_gains(directory), "", *studies, END])


def _gains(directory: Path | None) -> Iterator[str]:
    rows, steps = recorded("03_kernels", directory), recorded("04_memory", directory)
    table = gains.table(rows, steps)
    if table.empty:
        raise ReadmeError(f"the rows of 03_kernels on {MACHINE} time no work side by side")
    device = ", ".join(sorted(set(rows["device_name"].dropna())))
    yield f"A rival's time over ours on {device}, least–most over the shapes; in the last line its"
    yield (
        f"memory over ours. Above 1 ours is better. Rows: `report/results/{MACHINE}`, times "
        f"measured at commit {_commits(rows)}, memory at {_commits(steps)}; `git diff COMMIT -- "
        "fusedlib/kernels` shows what has changed in the kernels since."
    )
    yield ""
    yield f"| {' | '.join([table.index.name, *table.columns])} |"
    yield f"| --- |{' --: |' * len(table.columns)}"
    for name, cells in table.iterrows():
        yield f"| {' | '.join([str(name), *cells])} |"
    yield ""
    # One line, as long as it gets: how many lines the README has must not hang on the rows.
    sentences = []
    if wrong := "; ".join(rejected(rows)):
        sentences.append(f"**Rejected** by the check against float64, hence untimed: {wrong}.")
    if clauses := "; ".join(gains.nothing(rows, steps)):
        sentences.append(
            "**It gives nothing** or nothing certain where the best rival needs no more than ours "
            "within the 95 % interval, a case being a "
            f"shape, a direction and a launch: {clauses}."
        )
    yield " ".join(sentences)


def _commits(rows: pd.DataFrame) -> str:
    """The commits whose code was measured: a reader must see which code the figures are of."""
    return ", ".join(sorted({str(commit)[:7] for commit in rows["commit"].dropna()}))


def updated(text: str, directory: Path | None = None) -> str:
    """The README `text` with its block made anew. Raises ReadmeError without exactly one block."""
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ReadmeError(f"README.md needs exactly one block from {BEGIN} to {END}")
    new = block(directory)
    return pattern.sub(lambda _: new, text)


def main(arguments: list[str] | None = None) -> None:
    """Print the block, or write it into README.md."""
    parser = argparse.ArgumentParser(prog="python -m fusedlib.study.readme", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the block into README.md")
    if not parser.parse_args(arguments).write:
        print(block())
        return
    path = paths.ROOT / "README.md"
    path.write_text(updated(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    try:
        main()
    except ReadmeError as error:
        raise SystemExit(f"readme: {error}") from error

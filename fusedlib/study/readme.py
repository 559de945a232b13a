"""The README's figures: a block generated from the recorded rows, which a test compares.

python -m fusedlib.study.readme            prints the block
python -m fusedlib.study.readme --write    puts it into README.md
"""

import argparse
import re
from collections.abc import Callable
from pathlib import Path

import pandas as pd

from fusedlib import paths
from fusedlib.bench import results
from fusedlib.study.anatomy import findings as anatomy
from fusedlib.study.display import MISSING
from fusedlib.study.kernels import findings as kernels
from fusedlib.study.memory import findings as memory
from fusedlib.study.precision import findings as precision
from fusedlib.study.warmup import findings as warmup

MACHINE = "nvidia-h200"
SENTENCES = 2  # a study: the README is a first look, the report has them all
BEGIN, END = "<!-- figures:begin -->", "<!-- figures:end -->"

_HEADLINES: dict[str, tuple[str, Callable[[pd.DataFrame], list[str]]]] = {
    "01_warmup": ("Warm-up", warmup.headline),
    "02_precision": ("Precision and accumulation", precision.headline),
    "03_kernels": ("Kernels", kernels.headline),
    "04_memory": ("Memory", memory.headline),
    "05_anatomy": ("Anatomy of a speed-up", anatomy.headline),
}


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
    """The generated block, markers included: the headline of every study, from its rows.

    Raises ReadmeError when a study has no row or its rows give no headline.
    """
    parts = []
    devices = set()
    for study, (title, headline) in _HEADLINES.items():
        frame = recorded(study, directory)
        devices |= set(frame["device_name"].dropna())
        sentences = [s for s in headline(frame) if s != MISSING][:SENTENCES]
        if not sentences:
            raise ReadmeError(f"the rows of {study} on {MACHINE} give no headline; record it whole")
        findings = "\n".join(f"- {sentence}" for sentence in sentences)
        parts.append(f"**{title}** ([notebook](notebooks/{study}.ipynb))\n{findings}")
    where = f"Recorded on {', '.join(sorted(devices))}; rows in `report/results/{MACHINE}`."
    return "\n\n".join([BEGIN, where, *parts, END])


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

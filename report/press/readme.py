"""The README's claims, and whose MLP is fastest in which regime: a block from the recorded rows.

A test compares it with what stands there.

python -m press.readme            prints the block
python -m press.readme --write    puts it into README.md
"""

import argparse
import re
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from fusedlib.bench import paths
from press import headlines, recording
from press.headlines import ShownClaim
from press.running import config

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"


REGIMES = "03_kernels", "kernels-whose"


def block(stated: Iterable[ShownClaim], regimes: Mapping[str, Any] | None = None) -> str:
    """The block, markers included: a line a headline claim, and in how many recordings it holds.

    Args:
        stated: the claims.
        regimes: a table that follows, with its caption, as `display.table_json` has it; None where
            nobody has recorded it.
    """
    lines = ["| | Claim | Holds in |", "| --- | --- | --- |"]
    before = None
    for claim in (c for c in stated if c.headline):
        link = f"[{claim.title}](notebooks/{claim.study}.ipynb)" if claim.study != before else ""
        lines.append(f"| {link} | {claim.sentence} | {claim.verdict(own=False)} |")
        before = claim.study
    if regimes:
        rules = [":--" if side == "left" else "--:" for side in regimes["align"]]
        cells = [[names[-1] for names in regimes["columns"]], rules, *regimes["rows"]]
        lines += ["", regimes["caption"], "", *(f"| {' | '.join(row)} |" for row in cells)]
    return "\n".join([BEGIN, *lines, END])


def block_of(folder: Path) -> str:
    """The block from a folder of products."""
    return block(headlines.read_claims(folder), headlines.table_of(*REGIMES, folder))


def updated(text: str, new: str) -> str:
    """The README `text` with a new block in the place of its own.

    Raises:
        ValueError: it has not exactly one block.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md needs exactly one block from {BEGIN} to {END}")
    return pattern.sub(lambda _: new, text)


def main(arguments: list[str] | None = None) -> None:
    """Print the block, or write it into README.md."""
    parser = argparse.ArgumentParser(prog="python -m press.readme", description=__doc__)
    parser.add_argument("--write", action="store_true", help="put the block into README.md")
    write = parser.parse_args(arguments).write
    with tempfile.TemporaryDirectory(prefix="fusedlib-readme-") as name:
        recording.executed(config.load(), Path(name))
        new = block_of(Path(name))
    path = paths.ROOT / "README.md"
    if write:
        path.write_text(updated(path.read_text(encoding="utf-8"), new), encoding="utf-8")
    else:
        print(new)


if __name__ == "__main__":
    main()

"""The README's table of claims: a block made from the recorded rows, which a test compares.

python -m fusedlib.study.readme            prints the block
python -m fusedlib.study.readme --write    puts it into README.md
"""

import argparse
import re

from fusedlib import paths
from fusedlib.study import headlines

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"


def block() -> str:
    """The block, markers included: a line a headline claim, with its recordings."""
    lines = ["| Claim | Holds in recordings |", "| --- | --: |"]
    for claim in headlines.recorded():
        link = f"[{claim.title}](notebooks/{claim.study}.ipynb)"
        lines.append(f"| {link}: {claim.sentence} | {claim.verdict(False)} |")
    return "\n".join([BEGIN, *lines, END])


def updated(text: str) -> str:
    """The README `text` with its block made anew.

    Raises:
        ValueError: it has not exactly one block.
    """
    pattern = re.compile(f"{re.escape(BEGIN)}.*?{re.escape(END)}", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"README.md needs exactly one block from {BEGIN} to {END}")
    new = block()
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
    main()

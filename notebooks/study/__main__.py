"""Measure a topic on this machine, or add rows that were carried here.

python -m study kernels --profile full models='["8192·2048·5632"]'
python -m study add nvidia-h100.2026-12-01-abc1234.tar.xz
"""

import argparse
import ast
import math
import sys
from pathlib import Path
from typing import Any

from study import run
from study.errors import SentenceError


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise SystemExit(f"{text!r} is no setting: write name=value")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def main() -> None:
    """Read the command line and do what it says."""
    parser = argparse.ArgumentParser(prog="python -m study", description=__doc__.split("\n")[0])
    parser.add_argument("what", help=f"a topic ({', '.join(run.topics())}), or add")
    sizes = "sizes as name=value, lists of texts as 'name=[\"a\"]'; of add the files"
    parser.add_argument("settings", nargs="*", help=sizes)
    parser.add_argument("--profile", default="quick", help="quick, or full for a large GPU")
    parser.add_argument("--into", default="", help="the recording that the rows go into")
    parser.add_argument("--only", type=Path, help="a file of the races that are measured")
    parser.add_argument("--until", type=float, default=math.inf, help="then no race begins")
    given = parser.parse_intermixed_args()
    try:
        if given.what == "add":
            for file in map(Path, given.settings):
                print(f"{file}: {run.add(file)} rows added")
        else:
            only = given.only and given.only.read_text(encoding="utf-8").split()
            how = {"into": given.into, "until": given.until, "only": only, "as_given": True}
            run.run(given.what, given.profile, **how, **dict(map(_setting, given.settings)))
    except SentenceError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()

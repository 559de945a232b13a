"""`python -m press`: the command line of the study.

`doctor` goes its own way: it must run where the packages that it looks for are missing.
"""

import importlib.util
import sys
from typing import NoReturn

from fusedlib.bench import paths


def main() -> None:
    """Run the command line; exit status 2 where the study's files or packages are not there."""
    if not paths.NOTEBOOKS.is_dir():
        _refuse(
            f"{paths.NOTEBOOKS} does not exist: the study runs in a checkout of the repository, "
            "where `make report` sets everything up, or `pip install -e . -e notebooks -e report`"
        )
    if sys.argv[1:2] == ["doctor"]:
        from press.running import doctor

        raise SystemExit(doctor.main(sys.argv[2:]))
    if importlib.util.find_spec("typer") is None:
        _refuse(
            f"{sys.executable} lacks the packages of the study; in the checkout {paths.ROOT} "
            "run `pip install -e . -e notebooks -e report`, or `make report`"
        )
    from press import cli

    cli.main()


def _refuse(why: str) -> NoReturn:
    print(f"fusedlib: {why}", file=sys.stderr)
    raise SystemExit(2)


if __name__ == "__main__":
    main()

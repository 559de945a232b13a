"""The press's command line, called in this process."""

from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from typing import NamedTuple

from press import cli


class Ended(NamedTuple):
    """How a command ended, and what it printed."""

    status: int
    stdout: str
    stderr: str


def called(*arguments: object) -> Ended:
    """`python -m press` with these arguments."""
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            status = cli.command([*map(str, arguments)])
        except SystemExit as stop:
            status = int(str(stop.code))
    return Ended(status, out.getvalue(), err.getvalue())

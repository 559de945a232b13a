"""`python -m fusedlib.study`: the command line of the study.

`doctor` goes its own way: it must run where the packages that it looks for are missing.
"""

import sys


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] == ["doctor"]:
        from fusedlib.study.running import doctor

        raise SystemExit(doctor.main(sys.argv[2:]))
    from fusedlib.study import cli

    cli.main()


if __name__ == "__main__":
    main()

"""`python -m press`: the command line of the study."""

from press.cli import main

if __name__ == "__main__":
    main()

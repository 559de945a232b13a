"""A command as one types it, folded so that no line of the report breaks inside an option."""

import shlex


def folded(command: str) -> str:
    r"""One option a line, joined by ` \`, for a shell.

    A line begins at `python` and at each word that begins with `--`; a shell reads the same words.
    """
    lines: list[list[str]] = [[]]
    for word in shlex.split(command):
        if lines[-1] and (word.startswith("--") or word == "python"):
            lines.append([])
        lines[-1].append(word)
    return " \\\n  ".join(shlex.join(line) for line in lines)

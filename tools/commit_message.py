"""Refuse a commit message without a body: a git hook, which gets the file of the message.

A subject says what changed, a body why and what was checked. Merges need both as well.
"""

import re
import sys
from pathlib import Path

ADVICE = """this commit message has no body. Write
    the change, in one line

    why it was made, and what was checked
with `git commit`, or `git merge -m CHANGE -m WHY`; what you wrote is still in {file}"""
_NO_BODY = re.compile(r"#|[\w-]+-by: ")  # comments of git, trailers such as Signed-off-by
_SCISSORS = re.compile(r"^# -+ >8 -+$.*", re.MULTILINE | re.DOTALL)
_FOLDED_LATER = ("fixup! ", "squash! ", "amend! ")  # into a commit that has a body


def has_body(message: str) -> bool:
    """True if text follows the subject after an empty line."""
    lines = _SCISSORS.sub("", message).splitlines()
    lines = [line.strip() for line in lines if not _NO_BODY.match(line)]
    subject, *below = "\n".join(lines).strip().split("\n")
    return subject.startswith(_FOLDED_LATER) or (below[:1] == [""] and any(below))


def main(file: str) -> int:
    """1 for a message without a body."""
    if has_body(Path(file).read_text(encoding="utf-8")):
        return 0
    print("fusedlib:", ADVICE.format(file=file), file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))

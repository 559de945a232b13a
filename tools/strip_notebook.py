"""A notebook without what running it left, from stdin to stdout: git's filter of `*.ipynb`.

`make setup` names it in git's configuration, so that a notebook that was run and saved adds nothing
to a diff. Where it is not named, or fails, git takes the file as it is. Imports nothing outside the
standard library: git may call it for every notebook whenever it is asked for a status.
"""

import json
import sys


def stripped(text: str) -> str:
    """The notebook as it is committed: no outputs, counts or metadata that editors write."""
    notebook = json.loads(text)
    notebook["metadata"] = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook["cells"]:
        cell["metadata"] = {name: cell["metadata"][name] for name in {"tags"} & {*cell["metadata"]}}
        if cell["cell_type"] == "code":
            cell |= {"outputs": [], "execution_count": None}
    return json.dumps(notebook, indent=1, sort_keys=True, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    sys.stdout.buffer.write(stripped(sys.stdin.buffer.read().decode()).encode())

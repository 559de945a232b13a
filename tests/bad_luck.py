"""What the tests of bad luck share: a tiny study that sweeps, run by real processes."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import nbformat

import limits
from measure.recording import paths
from visitor import search_path

NAME = "tiny"
STUDY = f"""
frame = "{(paths.REPORT / "report.ipynb").as_posix()}"
[[study]]
name = "{NAME}"
title = "Tiny"
question = "Does it go on?"
quick = {{}}
full = {{}}
"""
PARAMETERS = """
profile: str = "quick"  # which profile the rows are filed under
samples: int = 1  # figures of the last case [1..1000000]
""".strip()
SWEEP = """
import os
import time

from measure.recording import results

def measure(case):
    print("measuring", case["case_no"], flush=True)
    time.sleep(float(os.environ.get("TINY_S", "0")))
    if case["needs"] == "triton":
        import study.accumulate_kernel
    if case["needs"] == "gpu":
        from study import precision, tensor_core

        [first, *_] = precision.tensor_cores(16)
        return tensor_core.measure(first)
    return {"median_ms": 1.0, "samples_ms": [1.0] * (samples if case["case_no"] == 4 else 1)}

cases = [{"case_no": i, "needs": n} for i, n in enumerate(NEEDS)]
recorder = results.Recorder("tiny", profile=profile)
recorder.sweep(cases, measure)
""".strip()
SHOW = """
from press import display

rows = recorder.rows()
display.table(rows[["case_no", "status"]].astype(str), caption="Tiny", name="tiny-rows")
display.prose(f"own {rows['own'].all()}")
""".strip()

# Python as on a machine where triton was never installed: neither module nor metadata is found.
WITHOUT_TRITON = """
from importlib import metadata
from importlib.machinery import PathFinder

find, version = PathFinder.find_spec, metadata.version

def find_all_else(name, path=None, target=None):
    return None if name.partition(".")[0] == "triton" else find(name, path, target)

def version_of_all_else(name):
    if name == "triton":
        raise metadata.PackageNotFoundError(name)
    return version(name)

PathFinder.find_spec = staticmethod(find_all_else)
metadata.version = version_of_all_else
"""
# Every attempt to leave the machine is noted and fails as it does where no cable is plugged in.
WITHOUT_NETWORK = """
import errno, os, socket

def note(what):
    with open(os.environ["ATTEMPTS"], "a") as file:
        file.write(f"{what}\\n")

connect = socket.socket.connect

def connect_locally(self, address):
    if self.family == socket.AF_UNIX:
        return connect(self, address)
    note(address)
    raise OSError(errno.ENETUNREACH, "Network is unreachable")

def look_up(host, *rest, **more):
    note(host)
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

socket.socket.connect = connect_locally
socket.getaddrinfo = look_up
"""


def write_study(folder: Path, bare: bool = False) -> Path:
    """A study of one notebook, whose five cases ask for nothing, Triton or a GPU; its file.

    A bare one's cases ask for nothing, and it shows nothing: its kernel imports little.
    """
    folder.mkdir(parents=True)
    needs = [""] * 5 if bare else ["", "", "triton", "gpu", ""]
    cells = [
        nbformat.v4.new_markdown_cell("# Tiny", id="title"),
        nbformat.v4.new_code_cell(PARAMETERS, id="parameters", metadata={"tags": ["parameters"]}),
        nbformat.v4.new_code_cell(f"NEEDS = {needs}", id="needs"),
        nbformat.v4.new_code_cell(SWEEP, id="sweep"),
        nbformat.v4.new_code_cell(SHOW, id="show"),
    ]
    notebook = nbformat.v4.new_notebook(cells=cells[:-1] if bare else cells)
    nbformat.write(notebook, folder / f"{NAME}.ipynb")
    (folder / "study.toml").write_text(STUDY)
    return folder / "study.toml"


class Study:
    """The tiny study in folders of its own.

    Args:
        folder: where notebook, rows and products lie.
        sitecustomize: what every Python started for it runs first.
        bare: whether its cases ask for nothing, and nothing is shown.
        variables: added to the environment.
    """

    def __init__(
        self, folder: Path, sitecustomize: str = "", *, bare: bool = False, **variables: str
    ) -> None:
        self.config = write_study(folder / "notebooks", bare)
        self.rows = folder / "rows"
        self.build = folder / "build"
        self.before: list[str] = []
        start = folder / "start"
        start.mkdir()
        (start / "sitecustomize.py").write_text(sitecustomize)
        self.env = {
            **{k: v for k, v in os.environ.items() if k not in ("FRESH", "FUSEDLIB_PROGRESS")},
            "FUSEDLIB_RESULTS": str(self.rows),
            "FUSEDLIB_BUILD": str(self.build),
            "FUSEDLIB_MACHINE": "here",
            "PYTHONPATH": search_path(start),
            "CUDA_VISIBLE_DEVICES": "",
            **variables,
        }

    def command(self, name: str, *arguments: str) -> list[str]:
        """One of our commands on this study."""
        given = [*arguments, "--config", str(self.config)] if name != "machine" else arguments
        return [*self.before, sys.executable, "-m", "press", name, *given]

    def call(self, name: str, *arguments: str, **options: object) -> subprocess.CompletedProcess:
        """Run a command to its end."""
        settings: Mapping[str, object] = {
            "check": False, "timeout": limits.PROCESS_S, "text": True, **options
        }  # fmt: skip
        return subprocess.run(
            self.command(name, *arguments), env=self.env, capture_output=True, **settings
        )

    def path(self) -> Path:
        """The one file that its rows were written to."""
        [path] = self.rows.glob(f"here/*/{NAME}.jsonl")
        return path

    def printed(self) -> str:
        """The executed notebook's text, outputs and errors of its cells included."""
        copy = nbformat.read(self.build / "notebooks" / f"{NAME}.ipynb", as_version=4)
        outputs = [output for cell in copy.cells for output in cell.get("outputs", [])]
        return "\n".join(o.get("text", "") or o.get("evalue", "") for o in outputs)

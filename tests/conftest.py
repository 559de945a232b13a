"""What all tests share: what a machine lacks is said, never passed over."""

import gc
import os
import shutil
import sys
import tempfile
from importlib.util import find_spec

import pytest

from interpreter import INTERPRETED

if INTERPRETED:  # both mend Triton's interpreter when they are imported
    import fusedlib.launch  # noqa: F401
    import quicker_interpreter  # noqa: F401

# A GPU node that only measures may lack what turns notebooks into pages; `make test` never does.
RENDERING = ("nbconvert", "typst", "pypandoc")
MISSING = [name for name in RENDERING if find_spec(name) is None]
collect_ignore_glob = ["test_report_*.py"] if MISSING else []
# These import kernels, and there is no Triton but for Linux.
OF_KERNELS = ["linear", "loss", "rope", "swiglu"]
if find_spec("triton") is None:
    MISSING.append("triton")
    collect_ignore_glob += [f"test_{name}.py" for name in OF_KERNELS]


def pytest_configure(config):
    """Workers share the cores, also the processes that their tests start, and what torch.compile
    keeps: by default that lies with what other checkouts have kept, and a graph is found by the
    operators that it calls, whatever these did when it was made.

    Two on two cores with torch's own choice of two threads each wait for one another: study 06's
    notebook beside split products in the interpreter took 227 s, with a thread each 156 s.
    """
    if "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
        folder = os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp(prefix="fusedlib-tests-")
        config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if workers > 1:
        threads = max(1, (os.cpu_count() or 1) // workers)
        os.environ.setdefault("OMP_NUM_THREADS", str(threads))


def pytest_generate_tests(metafunc):
    """A test that asks for `device` is one of kernels. It runs on a GPU and, with
    TRITON_INTERPRET=1, on the CPU in Triton's interpreter; marked `plain`, also where nothing is
    interpreted and plain PyTorch computes; marked `interpreter`, there alone.
    """
    own = "".join(str(m.args[0]) for m in metafunc.definition.iter_markers("parametrize"))
    if "device" not in metafunc.fixturenames or "device" in own:
        return
    marks = {mark.name for mark in metafunc.definition.iter_markers()}
    if INTERPRETED:
        devices = [pytest.param("cpu", id="interpreter")]
    else:
        devices = [pytest.param("cpu", id="plain")] * ("plain" in marks)
        if "interpreter" not in marks:
            devices.append(pytest.param("cuda", id="gpu", marks=pytest.mark.gpu))
    metafunc.parametrize("device", devices)


@pytest.fixture(autouse=True)
def same_numbers():
    """What a test draws does not depend on those that ran before it."""
    if "torch" in sys.modules:
        sys.modules["torch"].manual_seed(0)


@pytest.fixture(scope="module", autouse=True)
def garbage_is_looked_for_among_what_a_file_makes():
    """A race frees memory before each problem. To look through all that was imported took 0.3 s,
    three quarters of the time of `test_compare.py`.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture
def limit_memory():
    """Leaves this process so many GiB of the GPU's memory, until the test ends."""
    import torch

    def limit(gib: float) -> None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)

    yield limit
    torch.cuda.set_per_process_memory_fraction(1.0)


def pytest_report_header():
    missing = ", ".join(MISSING)
    return f"tests of the report or of kernels are left out: no {missing}" if MISSING else None


def pytest_collection_modifyitems(config, items):
    _leave_out_tests_of_other_processes(config, items)
    _long_files_first(items)
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if not marked:
        return
    import torch

    if not torch.cuda.is_available():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU"))


def _leave_out_tests_of_other_processes(config, items):
    """In the interpreter run tests of kernels alone; elsewhere not those marked `interpreter`."""

    def runs_here(item):
        if INTERPRETED:
            return "device" in item.fixturenames or not item.path.name.startswith("test_")
        return not item.get_closest_marker("interpreter")

    config.hook.pytest_deselected(items=[item for item in items if not runs_here(item)])
    items[:] = filter(runs_here, items)


def _long_files_first(items):
    """A worker takes a file at a time: with short ones at the end none waits for the other."""
    long = {
        item.path for item in items
        if item.get_closest_marker("slow") or item.name.startswith("test_in_the_interpreter")
    }  # fmt: skip
    items.sort(key=lambda item: item.path not in long)


@pytest.fixture
def one_thread():
    """Tensors of tiny models wait longer for a second thread than they take."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def no_warm_compiler(monkeypatch):
    """Where no arm is timed by Inductor, which takes seconds to begin."""
    monkeypatch.setattr("study.compiling.warm_compiler", lambda device: None)

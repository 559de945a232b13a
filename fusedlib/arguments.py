"""What functions and modules say of arguments of another kind than theirs."""

from numbers import Integral

from torch import Tensor


def require_tensors(**given: object) -> None:
    """Raise a TypeError that names the first argument that is neither a tensor nor None."""
    for name, value in given.items():
        if not isinstance(value, Tensor) and value is not None:
            kind = type(value)
            raise TypeError(f"{name} must be a torch.Tensor, got the {kind.__name__} {value!r:.60}")


def require_size(name: str, value: object) -> None:
    """Raise a ValueError where a width is no whole number of at least 1."""
    if not isinstance(value, Integral) or int(value) < 1:
        raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")

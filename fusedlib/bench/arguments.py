"""What a call is asked for, refused with the name of what does not fit."""

from collections.abc import Collection, Iterable


def require_known(name: str, given: str | Iterable[str], known: Collection[str]) -> None:
    """Refuse a text, or one of several, that is not among the known ones.

    Raises:
        ValueError: with the field's name, the first unknown text, and what is known.
    """
    for text in [given] if isinstance(given, str) else given:
        if text not in known:
            raise ValueError(f"unknown {name} {text!r}; known: {', '.join(known)}")


def require_least(least: float, **numbers: float | Iterable[float]) -> None:
    """Refuse a number, or one of several, that is below `least`.

    Raises:
        ValueError: with the field's name and the number.
    """
    for name, given in numbers.items():
        for number in given if isinstance(given, Iterable) else [given]:
            if number < least:
                raise ValueError(f"{name} must be at least {least}, got {number}")

"""What is said to people in one sentence."""


class SentenceError(ValueError):
    """A choice that cannot be met. A notebook shows its sentence alone, without our lines above."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows for it."""
        return [f"{type(self).__name__}: {self}"]


class SizesError(SentenceError):
    """A size that a topic or study does not have, or a value that it does not take."""

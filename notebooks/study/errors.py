"""What is said to people in one sentence."""

import time


class SentenceError(ValueError):
    """A choice that cannot be met. A notebook shows its sentence alone, without our lines above."""

    def _render_traceback_(self) -> list[str]:
        """What IPython shows for it, once the cells below have arrived: a kernel drops those that
        wait when a cell fails, and runs those that JupyterLab sends a moment later.
        """
        time.sleep(0.5)
        return [f"{type(self).__name__}: {self}"]


class SizesError(SentenceError):
    """A size that a topic or study does not have, or a value that it does not take."""

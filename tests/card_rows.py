"""What every row of a study holds that a recorded GPU measured, and the frame without rows."""

import pandas as pd


def head(study: str) -> dict[str, object]:
    """Fields of a row of `study` of profile full, measured on a card that is not this machine."""
    return {
        "study": study, "profile": "full", "machine": "gpu", "device_name": "Test Card",
        "device_type": "cuda", "device": "cuda", "own": False, "status": "ok", "reason": None,
    }  # fmt: skip


EMPTY = pd.DataFrame(
    columns=["machine", "profile", "device_type", "device_name", "own", "status", "reason"]
)

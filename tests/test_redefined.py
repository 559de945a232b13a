"""The paper lists the rivals that are defined otherwise today than when they were recorded."""

import pandas as pd
import pytest

from measure import mlp_rivals, swiglu
from measure.racing import rivals
from measure.recording import provenance
from press import redefined

SWIGLU, MLP = "notebooks/measure/swiglu.py", "notebooks/measure/mlp_rivals.py"
TODAY = {SWIGLU: "1" * 40, MLP: "2" * 40}
BEFORE = {SWIGLU: "3" * 40, "notebooks/measure/old_place.py": "2" * 40}


@pytest.fixture(autouse=True)
def today(monkeypatch):
    monkeypatch.setattr(provenance, "files", lambda: TODAY)


def row(recording: str, provider: str, experiment: str, **fields):
    return {"machine": "m", "recording": recording, "provider": provider,
            "experiment": experiment, **fields}  # fmt: skip


FILES = {("m", "now"): TODAY, ("m", "then"): BEFORE, ("m", "nothing hashed"): {}}


@pytest.mark.parametrize(
    ("rows", "names"),
    [
        ([row("now", "eager", "swiglu")], set()),
        ([row("now", "eager", "swiglu"), row("then", "eager", "swiglu")], {"eager"}),
        ([row("then", "eager", "mlp")], set()),  # another task's, in a file that only moved
        ([row("then", "eager", "sustained", race="swiglu")], {"eager"}),
        ([row("then", "eager", "peak", settings="Plain PyTorch, an operation at a time")],
         {"eager"}),
        ([row("then", "eager", "peak", settings="another")], set()),
        ([row("then", "fused-input", "swiglu")], {"fused-input"}),  # a partial
        ([row("then", "nobody", "swiglu")], set()),
        ([row("nothing hashed", "eager", "swiglu")], set()),
    ],
)  # fmt: skip
def test_who_is_defined_in_a_file_that_the_recording_did_not_hash(rows, names, monkeypatch):
    tasks = {swiglu.TASK, mlp_rivals.MODULE}
    known = {key: one for key, one in rivals.RIVALS.items() if key[0] in tasks}
    monkeypatch.setattr(rivals, "RIVALS", known)
    actual = redefined.redefined(pd.DataFrame(rows), FILES)
    assert actual == {(name, "m") for name in names}

"""Every kernel compiled for its architectures without a GPU: it fits and spills nothing."""

from functools import cache

import pytest
import torch

import ahead

pytest.importorskip("triton")
from fusedlib.launch import SHARED_MEMORY
from fusedlib.ops import blocks
from fusedlib.ops.matmul import function as matmul
from fusedlib.ops.mlp import few_tokens, hopper
from fusedlib.ops.mlp import kernels as swiglu

ARCHITECTURES = sorted(SHARED_MEMORY)
# How many there are; Hopper has several widths for few tokens, and products in Gluon.
COUNTS = {
    "swiglu": {arch: 51 if arch == 90 else 26 for arch in ARCHITECTURES},
    "split": {arch: 12 if arch == 90 else 8 for arch in ARCHITECTURES},
    "loss": dict.fromkeys(ARCHITECTURES, 16),
    "hopper": {90: 16},
}
# Of `rows`: the usual width, and the one of each kernel that needs most registers.
ROWS = ("fwd half 4096", "fwd fp32 32768", "bwd half 4096", "bwd fp32 8192", "bwd fp32 32768",
        "rope half 64 of 64", "rope back at positions half 32 of 96",
        "normed rope half 128 of 128", "normed rope back half 128 of 128")  # fmt: skip
# Two programs of a multiprocessor's 65,536 registers; some for every instruction in flight.
MOST_REGISTERS = {
    "bwd half 4096": 128, "fwd half 4096": 64, "rope half 64 of 64": 64,
    "normed rope half 128 of 128": 64, "normed rope back half 128 of 128": 128,
}  # fmt: skip


# A process each: (family, architectures, how many share them).
PROCESSES = [
    *(("swiglu", (arch,), 3 if arch == 90 else 1) for arch in ARCHITECTURES),
    *((family, tuple(COUNTS[family]), 1) for family in ("split", "loss", "hopper")),
]


@cache
def compiled(family: str, archs: tuple[int, ...], part: str) -> dict[int, list[dict]]:
    """Every kernel's figures by architecture."""
    return ahead.kernels_ahead(family, archs=archs, part=part)


def faults(family: str, row: dict) -> list[str]:
    """What a kernel must not do on its architecture."""
    name = row["name"]
    if family == "loss":  # 16 bytes at a time
        stores = row.get("STG") or "alone" in name
        wide = (row.get("LDG") and stores) or "gradient, 64 " in name
        return ahead.misfits(row) + [f"{name}: narrow"] * (not wide)
    plain = any(word in name for word in ("ieee", "pointwise", "rows", "columns"))
    found = ahead.faults(row, on_tensor_cores=not plain)
    if (family == "hopper" or name.startswith("gluon")) and not row.get("UTMALDG"):
        found.append(f"{name}: not by TMA")
    if family == "hopper" and row["REG"] != 168:  # 384 threads get it; setmaxnreg deals them anew
        found.append(f"{name}: {row['REG']} registers")
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "archs", "part"),
    [(family, archs, f"{n}/{of}") for family, archs, of in PROCESSES for n in range(of)],
)
def test_kernels_fit_spill_nothing_and_use_the_card(family, archs, part):
    found = compiled(family, archs, part)
    assert [fault for rows in found.values() for row in rows for fault in faults(family, row)] == []


@pytest.mark.slow
def test_norms_and_rotations_fit_spill_nothing_and_load_by_16_bytes():
    rows = [row for of_one in ahead.kernels_ahead("rows", *ROWS).values() for row in of_one]
    assert {(r["name"], r["arch"]) for r in rows} >= {(n, a) for n in ROWS for a in ARCHITECTURES}
    assert [fault for row in rows for fault in ahead.misfits(row)] == []
    for row in rows:
        assert not row["narrow"] and row["REG"] <= MOST_REGISTERS.get(row["name"], 255), row


@pytest.mark.parametrize("inner", [1, 35, 4096, 2**20])
def test_a_packed_weight_and_a_pair_start_the_same_binaries(monkeypatch, inner):
    """Whose keys know nothing of where up begins, or of rows that lie in two tensors."""
    monkeypatch.setattr(blocks, "architecture", lambda _: 90)
    x, all_three = torch.zeros(37, 48), (True, True, True)
    found = {"tiles": set(), "roles": set(), "few": set(), "rows": set(), "columns": set()}
    for up_row in (0, inner):
        launch = swiglu.fwd_launch(x.device, *x.shape, inner, up_row, True)
        found["tiles"].add(launch.binary_key(0, *[x] * 5))
        launch = few_tokens.gradients_launch(all_three, x.device, *x.shape, inner, up_row)
        found["few"].add(launch.binary_key(0, *[x] * 9))
        launch = hopper.forward_launch(x.device, *x.shape, inner, up_row, True)
        found["roles"].add(launch.binary_key(0, *[x] * 5))
    for rows, has_lower_half in ((2 * inner, False), (inner, True)):
        like = torch.empty(rows, 48, device="meta")
        by_rows, by_columns = (
            matmul.FactorSplitter(x.device, like, c, has_lower_half) for c in (False, True)
        )
        found["rows"].add(by_rows.launch.binary_key(0, *[x] * 4))
        found["columns"].add(by_columns.launch.binary_key(0, *[x] * 4))
    assert {name: len(keys) for name, keys in found.items()} == dict.fromkeys(found, 1)


RIGHT = {"arch": 90, "REG": 168, "STACK": 0, "shared": 200_000, "HGMMA": 8, "UTMALDG": 1}


@pytest.mark.parametrize(("family", "name"), [("split", "gluon 00"), ("hopper", "fwd")])
def test_faults_are_found(family, name):
    right = RIGHT | {"name": name}
    assert faults(family, right) == []
    for change in ({"STACK": 8}, {"STL": 1}, {"shared": 232_449}, {"HGMMA": 0}, {"UTMALDG": 0}):
        assert faults(family, right | change)
    assert faults("hopper", right | {"REG": 255})
    assert faults("loss", right) and not faults("loss", right | {"LDG": 1, "STG": 1})

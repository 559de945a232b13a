"""What study 02 found about torch itself: sums, matmul settings, autocast; sentences from rows."""

import pandas as pd

from fusedlib.study.display import number
from fusedlib.study.precision import tables
from fusedlib.study.precision.tables import rows_of
from fusedlib.study.wording import listed


def no_rows(experiment: str) -> list[str]:
    """The sentence in place of a finding whose rows are missing."""
    return [f"No rows of experiment `{experiment}` yet: run notebook 02_precision to measure them."]


def places(rows: pd.DataFrame) -> str:
    """How many places rows with a column `place` come from."""
    count = rows["place"].nunique()
    return "one place" if count == 1 else f"{count} places"


def with_article(dtype: str) -> str:
    """The format's name after a or an."""
    return f"{'an' if dtype.startswith('f') else 'a'} {dtype}"


def torch_itself(frame: pd.DataFrame) -> list[str]:
    """Whether torch accumulates half precision in a wider format; what its settings change."""
    return _torch_sums(frame) + _matmul_settings(frame) + _autocast(frame)


def _torch_sums(frame: pd.DataFrame) -> list[str]:
    rows = tables.placed(tables.per_machine(frame, "torch_sum"))
    if rows.empty:
        return no_rows("torch_sum")
    half = rows[rows["dtype"].isin(["fp16", "bf16"]) & (rows["n_terms"] == rows["n_terms"].max())]
    summed = half[half["provider"] == "torch.sum"]
    naive = half[half["provider"] == "one by one"]
    if summed.empty or naive.empty:
        return []
    worst, best = summed["error_in_roundoffs"].max(), naive["error_in_roundoffs"].min()
    verdict = "accumulates in a wider format and rounds at the end"
    if worst > 1:
        verdict = "accumulates in a wider format, but does not always return the nearest number"
    if worst > 4:
        verdict = "loses more than the rounding of its result"
    return [
        f"`torch.sum` of {summed['n_terms'].max():,.0f} fp16 or bf16 terms errs by at most "
        f"{number(worst, 2)} u ({places(summed)}), adding one by one in the same format by "
        f"{number(best, 2)} u or more: torch {verdict}."
    ]


def _matmul_settings(frame: pd.DataFrame) -> list[str]:
    rows = rows_of(frame, "torch_matmul")
    sentences = []
    fp32 = tables.placed(rows[rows["dtype"] == "fp32"] if len(rows) else rows)
    for where, group in fp32.groupby("place", sort=False):
        # One profile's rows are enough to say what a setting does at a place.
        one = group[group["profile"] == group["profile"].iloc[0]].set_index("precision")
        if not {"highest", "high", "medium"} <= set(one.index):
            continue
        errors = {name: float(one.loc[name, "relative_error"]) for name in one.index}
        changed = [name for name in ("high", "medium") if one.loc[name, "changed_fraction"] > 0]
        if changed:
            factors = [
                f"{name} {number(errors[name] / errors['highest'], 2)} times" for name in changed
            ]
            sentences.append(
                f"On {where}, `set_float32_matmul_precision` changes the error of fp32 products: "
                f"{listed(factors)} that of highest ({number(errors['highest'], 2)})."
            )
        else:
            sentences.append(
                f"On {where}, `set_float32_matmul_precision` changes no bit of an fp32 product."
            )
    return sentences + _reduced_reductions(rows)


def _reduced_reductions(rows: pd.DataFrame) -> list[str]:
    half = rows[rows["dtype"].isin(["fp16", "bf16"])] if len(rows) else rows
    allowed = half[half["reduced_reduction"].astype(bool)] if len(half) else half
    if allowed.empty:
        return []
    changed = allowed[allowed["changed_fraction"] > 0]
    if changed.empty:
        return [
            f"Allowing reduced-precision reductions changed no bit in {len(allowed)} measured "
            "products."
        ]
    worst = changed.loc[changed["relative_error"].idxmax()]
    return [
        f"Allowing reduced-precision reductions changed {len(changed)} of {len(allowed)} products, "
        f"{worst['changed_fraction']:.0%} of the elements in {worst['dtype']}, whose error became "
        f"{number(worst['relative_error'], 2)} against a least possible "
        f"{number(worst['best_possible_error'], 2)}."
    ]


def _autocast(frame: pd.DataFrame) -> list[str]:
    rows = tables.placed(tables.per_machine(frame, "autocast"))
    sentences = []
    for where, group in rows.groupby("place", sort=False):
        kinds = {
            kind: list(dict.fromkeys(part["provider"])) for kind, part in group.groupby("kind")
        }
        if "half" in kinds:
            sentences.append(
                f"Autocast on {where} runs {listed(kinds['half'])} in half precision"
                + (f", {listed(kinds['fp32'])} in fp32" if "fp32" in kinds else "")
                + "; the others follow their input or ordinary type promotion."
            )
    return sentences

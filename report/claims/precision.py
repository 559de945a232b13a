"""What the study claims of number formats, sums, torch's settings and tensor cores."""

import pandas as pd

from press.say import claim

ON_GPU = "experiment == 'torch_matmul' and device == 'cuda' and precision != 'medium'"
KERNELS = ["in the tensor core", "promoted", "cuBLAS"]


@claim(
    "precision/tensor-core",
    "A tensor core cuts the digits of its sums, by a rule that predicts every bit",
    of=lambda rows: rows.query("adds == 'in the tensor core' and modelled_share.notna()"),
    repeats="same seeds",
)
def tensor_core(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Tensor cores do not add as fp32 does. Our rule: a tensor core shifts sixteen products (eight
    of TF32) and its accumulator to the largest exponent among them, and cuts all digits more than
    two bits below fp32's last. The rule gives the same bits in {share:3%} of the results, with
    fp16, bf16 and TF32, for K up to {k:,d}."""
    share = rows.groupby("dtype")["modelled_share"].min()
    all_ran = (rows["status"] == "ok").all() and len(share) == 3
    return {"share": share.min(), "k": rows["k"].max()}, all_ran and share.min() == 1


@claim(
    "precision/flags",
    of=lambda rows: rows.query(ON_GPU),
    repeats="same seeds",
)
def flags(rows: pd.DataFrame) -> tuple[dict, bool]:
    """On a GPU an fp32 product at "high" has {tf32:2×} the error of one at "highest". Allowing
    reduced sums changed {reduced:2%} of the results of one product in fp16 and one in bf16, with
    K = {k:,d}."""
    error = rows.groupby("provider")["relative_error"].median()
    halves = rows[rows["dtype"] != "fp32"]
    tf32 = error['precision "high"'] / error['precision "highest"']
    say = {"tf32": tf32, "reduced": halves["changed_fraction"].max(), "k": halves["k"].max()}
    return say, tf32 > 10 and say["reduced"] == 0 and (halves["status"] == "ok").all()


@claim(
    "precision/flags-shapes",
    of=lambda rows: rows.query("experiment == 'flags' and device == 'cuda'"),
    repeats="same seeds",
)
def flags_shapes(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At {shapes:,d} shapes of one K the flags of reduced sums changed {reduced:2%} of the results
    of fp16 and bf16 products. There "high" changed at least {high:4%} of those of fp32 products,
    but for a product with a single row, of which it changed none. K is {k:,d}."""
    halves, high = rows[rows["dtype"] != "fp32"], rows[rows["precision"] == "high"]
    changed = high.set_index("m")["changed_fraction"]
    several = changed[changed.index > 1].min()
    say = {"shapes": len(high), "k": rows["k"].max(), "high": several,
           "reduced": halves["changed_fraction"].max()}  # fmt: skip
    return say, say["reduced"] == 0 and several > 0.999 and (changed[changed.index == 1] == 0).all()


@claim(
    "precision/stagnation",
    of=lambda rows: rows.query("experiment == 'stagnation'"),
    repeats="same seeds",
)
def stagnation(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A running sum of equal terms stops exactly at the first power of two where half the gap
    between a format's numbers is at least one term, in {right:,d} of {cases:,d} cases. Adding 0.01
    stops at {bf16:,d} in bf16, {fp16:,d} in fp16 and {fp32:,d} in fp32, and a counter in bf16
    counts to {counter:,d}."""
    value = rows.groupby(["term_text", "dtype"])["value"].median()
    right = (rows["value"] == rows["predicted_value"]).sum()
    numbers = {name: value["0.01", name] for name in ("bf16", "fp16", "fp32")}
    counted = {"right": right, "cases": len(rows), "counter": value["1", "bf16"]}
    return numbers | counted, right == len(rows) == 2 * rows["dtype"].nunique() == 8


@claim(
    "precision/signed",
    of=lambda rows: rows.query(
        "adds == 'in the tensor core' and k == 4096 and distribution == 'normal'"
    ),
    repeats="same seeds",
)
def signed(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With signed data and K = {k:,d} a sum kept in the tensor core has, in the worst of three
    formats, a relative error of at most {inside:3}. Rounding a result to bf16 may cost
    {rounding:2}."""
    error = rows.groupby("dtype")["relative_error"].median()
    say = {"k": rows["k"].max(), "inside": error.max(), "rounding": 2.0**-8}
    return say, len(error) == 3 and error.max() < 2.0**-8 / 50


def longest(rows: pd.DataFrame) -> pd.DataFrame:
    """Sums of positive products of the largest K in the tensor core, by who adds."""
    core = rows[rows["experiment"] == "tensor_core"]
    core = core[(core["k"] == core["k"].max()) & (core["distribution"] == "uniform")]
    return core[core["adds"].isin(KERNELS)]


@claim("precision/promotion", of=longest)
def promotion(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At K = {k:,d} a positive sum kept in the tensor core errs {inside:2×} as much as a promoted
    one, and each such sum is too small. A sum by cuBLAS errs {cublas:2×} as much."""
    error = rows.pivot_table("relative_error", "dtype", "adds", observed=True)
    inside, cublas = (error[name] / error["promoted"] for name in KERNELS[::2])
    small = rows.set_index("adds")["toward_zero_share"]["in the tensor core"].min()
    say = {"inside": (inside.min(), inside.max()), "cublas": (cublas.min(), cublas.max())}
    holds = inside.min() > 100 and small > 0.99 and 3 < cublas.min() < inside.min()
    return say | {"k": rows["k"].max()}, holds


def count(changed: pd.Series) -> int | None:
    """How many cases there are; where one has no figure, nobody can tell."""
    return len(changed) if changed.notna().all() else None


BESIDE = ["batch", "longer", "padding"]
"""What stands beside a sequence in a row or batch of its own: not another document in its row."""
INSIDE = "fused-invariant"


@claim(
    "precision/batch-invariant",
    of=lambda rows: rows.query(
        "experiment == 'neighbours' and device == 'cuda' and provider.str.endswith('invariant')"
    ),
    repeats="same seeds",
)
def batch_invariant(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Inside of `fusedlib.batch_invariant` a row of fusedlib's linear layer, SwiGLU MLP and norm
    has the same bits alone and among up to {rows:,d} rows, in all {cases:,d} cases of bf16 and
    fp32. torch's own products keep theirs in bf16 alone: in fp32 up to {torch:2%} of a row's
    elements change."""
    of_torch = rows["provider"].str.startswith("torch")
    causes = rows[[f"changed_by_{cause}" for cause in ("size", "place", "values")]]
    changed = causes.max(axis=1, skipna=False)
    ours, torchs = changed[~of_torch], changed[of_torch].groupby(rows["dtype"]).max()
    say = {"rows": rows["m"].max(), "cases": count(ours), "torch": torchs["fp32"]}
    kept = ours.max() == 0 and rows.loc[~of_torch, "provider"].nunique() == 3
    return say, kept and torchs["bf16"] == 0 < torchs["fp32"]


def bits(dtype: str, providers: str = "") -> str:
    """A query: bits of log-probabilities of whole models on a card."""
    of = f"experiment == 'token bits' and device == 'cuda' and dtype == '{dtype}'"
    return f"{of} and {providers}" if providers else of


@claim("precision/token-bits", of=lambda rows: rows.query(bits("bfloat16")), repeats="same seeds")
def token_bits(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Inside of `fusedlib.batch_invariant` a patched Llama in bf16 (Llama-3.2-1B's widths, four
    layers) gives a sequence the same log-probabilities alone, in a batch, before later tokens and
    beside padding, to the bit, in all {cases:,d} situations. Outside some change in each of them
    with every implementation, by up to {least:2} to {most:2} nats."""
    rows = rows[rows["situation"].isin(BESIDE)]
    inside = rows["provider"].str.endswith("invariant")
    ours = rows[rows["provider"] == INSIDE]
    others = rows[~inside].groupby("provider", observed=True)
    largest = others["largest_change"].max()
    cases = count(ours["changed_fraction"])
    say = {"cases": cases, "least": largest.min(), "most": largest.max()}
    kept = ours["changed_fraction"].max() == 0 and {*ours["situation"]} == {*BESIDE}
    return say, kept and others["changed_fraction"].min().min() > 0


@claim(
    "precision/packed-bits",
    of=lambda rows: rows.query(bits("bfloat16", f"provider == '{INSIDE}'")),
    repeats="same seeds",
)
def packed_bits(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A document that is packed behind another in one row does not keep its bits inside of
    `fusedlib.batch_invariant` either: {changed:2%} of its log-probabilities change in bf16, by up
    to {largest:2} nats."""
    packed = rows[rows["situation"] == "packed"]
    say = {"changed": packed["changed_fraction"].max(), "largest": packed["largest_change"].max()}
    return say, say["changed"] > 0 and say["largest"] < 0.05


@claim(
    "precision/token-bits-fp32",
    of=lambda rows: rows.query(bits("float32", f"provider == '{INSIDE}'")),
    repeats="same seeds",
)
def token_bits_fp32(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In fp32 the same Llama keeps its bits inside of `fusedlib.batch_invariant` in a batch and
    before up to {short:,d} later tokens, but not before {long:,d}, with padding or in a packed row.
    There up to {changed:2%} of the log-probabilities change, by {largest:2} nats at most."""
    later = (rows["tokens"] - rows["context_length"]).where(rows["situation"] == "longer")
    changed = rows["changed_fraction"] > 0
    kept, lost = rows[~changed], rows[changed]
    say = {"short": later[~changed].max(), "long": later[changed].min()}
    say |= {"changed": lost["changed_fraction"].max(), "largest": lost["largest_change"].max()}
    where = {*kept["situation"]} == {"batch", "longer"}
    where &= {*lost["situation"]} == {"longer", "padding", "packed"}
    return say, where and say["short"] < say["long"] and say["largest"] < 1e-5

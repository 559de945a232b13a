"""What the paper's own words compare: each sentence is held against the recorded rows.

A sentence that a program fills or decides is a claim, and held elsewhere.
"""

import json
import re
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pandas as pd
import pytest

from fusedlib.bench.machine import label
from press import run
from press.published import OF_TOPIC
from press.published import load as published
from study.anatomy import from_tables
from study.compilers import by_iteration
from study.rows import load, newest, ratio
from study.warmup import after_warmup

Rows = pd.DataFrame
NOTEBOOKS = {part.name: part.notebook for part in run.select()}


SHAPE = ["tokens", "hidden_size", "intermediate_size"]
NEWEST = "2026-11-28-c120bf3"  # of both GPUs


@pytest.fixture(scope="module")
def rows() -> Callable[[str, str], Rows]:
    """Rows of a topic that are ok, of one recorded machine; of anatomy wrong ones too."""

    def of(topic: str, machine: str) -> Rows:
        every = load(topic, sessions=True)
        statuses = ["ok", "wrong"] if topic == "anatomy" else ["ok"]  # wrong is timed there
        every = every[(every["machine"] == label(machine)) & every["status"].isin(statuses)]
        return every.assign(recording=every["set"], case=every["old_id"])

    return of


def of(measured: Rows, **fields: object) -> Rows:
    """The rows that have these fields."""
    for name, value in fields.items():
        measured = measured[measured[name] == value]
    return measured


def steps_of(measured: Rows, group: str) -> Rows:
    """Forward and backward of a group's MLPs in bf16."""
    return of(measured, group=group, dtype="bfloat16", direction="forward+backward")


def interleaved(measured: Rows) -> Rows:
    """The same at the shapes of models, started from Python and timed in turns."""
    return of(steps_of(measured, "models"), launch="python", experiment="race")


def peaks(measured: Rows, index: str) -> Rows:
    return measured.pivot_table("peak_mib", index, "provider", "median", observed=True)


def a_sixteenth_above_with_as_many(measured: Rows) -> bool:
    """Above Liger and torch.compile; with half or a quarter level or lower."""
    bf16 = of(measured, experiment="step", dtype="bfloat16")
    bf16 = bf16.assign(over=bf16["tokens"] / bf16["hidden_size"])
    table = bf16.pivot_table("peak_mib", ["over", *SHAPE], "provider", "median")
    over = table[["liger", "inductor"]].rdiv(table["fused"], axis=0).stack().dropna() - 1
    alike, few = over.loc[1], over.loc[0.25:0.5]
    return len(alike) == 3 and alike.between(0.05, 0.07).all() and few.between(-0.05, 0).all()


def lowest_with_four_times_as_many(measured: Rows) -> bool:
    bf16 = of(measured, experiment="step", dtype="bfloat16", hidden_size=4096, tokens=16384)
    mib = bf16.groupby("provider")["peak_mib"].median()
    return len(mib) > 3 and mib.drop(["fused", "fused-input"]).min() > 1.2 * mib["fused"]


def x_alone_lowers_no_peak(measured: Rows) -> bool:
    bf16 = of(measured, experiment="step", dtype="bfloat16")
    mib = bf16.pivot_table("peak_mib", SHAPE, "provider", "median")
    return len(mib) == 9 and (mib["fused-input"] / mib["fused"]).between(0.999, 1.001).all()


def half_the_plan_for_half_the_price(measured: Rows) -> bool:
    plans = of(measured, experiment="checkpoint", precision="bf16")
    plans = plans[plans["ratio"].notna()].set_index(["context_length", "plan_name"])
    peak, ratio = plans["peak_mib"].unstack(), plans["ratio"].unstack()
    first, every = "first 16 blocks", "every block"
    back = peak.rsub(peak["no checkpoint"], axis=0)
    halves = [back[first] / back[every], (ratio[first] - 1) / (ratio[every] - 1)]
    return len(peak) > 0 and all(half.between(0.4, 0.6).all() for half in halves)


def reserve_up_to_a_sixth(measured: Rows) -> bool:
    """Of a step's reserve above its count."""
    steps = of(measured, mode="step", device="cuda")
    above = steps["reserved_peak_mib"] / 1024 / steps["counted_gib"] - 1
    return bool(len(above) > 11 and above.between(0.03, 1 / 6).all() and above.max() > 0.155)


def called(measured: Rows, launch: str = "graph") -> pd.DataFrame:
    """Times of ways to call attention, by context, head width and way."""
    ran = of(measured, experiment="call", launch=launch)
    return ran.pivot_table("median_ms", ["context_length", "head_dim"], "provider", "median")


def a_mask_tensor_costs(measured: Rows) -> bool:
    """Of 64 wide heads, in either launch."""
    calls = of(measured, experiment="call", head_dim=64)
    longest = of(calls, context_length=16384)
    ms, mib = (
        longest.pivot_table(value, "launch", "provider", "median", observed=True)
        for value in ("median_ms", "peak_mib")
    )
    longer, more = (table["mask-tensor"] / table["causal-flag"] for table in (ms, mib))
    return bool(len(longer) == 2 and longer.between(3, 4.5).all() and more.between(4.8, 5.2).all()
                and {*calls["backend"]} == {"cudnn"})  # fmt: skip


def heads_of_100(measured: Rows) -> bool:
    """Padded by rope they go to cuDNN, as they are to flash, and with a mask tensor to math."""
    graph, python = (called(measured, launch).xs(100, level="head_dim").loc[4096:]
                     for launch in ("graph", "python"))  # fmt: skip
    ran = of(measured, experiment="call", head_dim=100).groupby("provider")["backend"].unique()
    took = {name: [*found] for name, found in ran.items()}
    padded = python["padded-heads"] / python["causal-flag"]
    return bool(
        took == {"causal-flag": ["flash"], "mask-tensor": ["math"], "padded-heads": ["cudnn"]}
        and (graph["padded-heads"] / graph["causal-flag"]).between(0.45, 0.6).all()
        and padded[16384] < 0.7
        and padded[4096] > 1
        and (graph["mask-tensor"] > 10 * graph["causal-flag"])[16384]
    )


def cudnn_waits_at_4096(measured: Rows) -> bool:
    python, graph = (called(measured, launch)["causal-flag"] for launch in ("python", "graph"))
    return bool(python[4096, 64] > 2 * graph[4096, 64])


def times_of_attention(measured: Rows, width: int = 64) -> pd.DataFrame:
    """Forward and backward in bf16 from Python, by context."""
    half = of(measured, direction="forward+backward", head_dim=width, dtype="bfloat16")
    half = half[half["grid"].isin(["course", "long"])]
    return half.pivot_table("median_ms", "context_length", "provider", "median")


def four_passes_cudnn(measured: Rows) -> bool:
    ms = times_of_attention(measured)
    over = (ms["flash-4"] / ms["cudnn"]).dropna()
    return bool((over.loc[:8192] > 1.1).all() and (over.loc[16384:] < 0.97).all())


def four_a_tenth_faster_with_wide_heads(measured: Rows) -> bool:
    ms = times_of_attention(measured, width=128).loc[16384]
    return bool(1.07 < ms["cudnn"] / ms["flash-4"] < 1.14)


def plain_ends_with_the_card(measured: Rows) -> bool:
    """The last context of plain attention; math and torch.compile end at 16,384 tokens."""
    ms = times_of_attention(measured)
    last = {name: ms[name].dropna().index.max() for name in ("plain", "math", "inductor", "flash")}
    known = {"math": 16384, "inductor": 16384, "flash": 65536}
    half = of(measured, provider="plain", direction="forward+backward", head_dim=64)
    held = peaks(half[half["dtype"] == "bfloat16"], "context_length")["plain"]
    grows = 3.8 < held.iloc[-1] / held[held.index[-1] / 2] < 4.1
    return last == last | known and held.index[-1] == last["plain"] < 65536 and bool(grows)


def longest_plans(measured: Rows) -> bool:
    """With 5,120 tokens; all of the inputs and the casts are at the end of the forward pass."""
    plans = of(measured, plan="segments", experiment="checkpoint", context_length=5120)
    best = {}
    for precision, part in plans.groupby("precision", observed=True):
        lowest = part.loc[part["peak_mib"].idxmin()]
        best[precision] = lowest["blocks"], lowest["peak_in"]
    nested = of(measured, plan="nested", context_length=5120).groupby("precision")["peak_mib"]
    least = plans.groupby("precision")["peak_mib"].min()
    return best == {"bf16": (1, "backward"), "bf16 autocast": (2, "forward")} and bool(
        (nested.min() < least).all()
    )


def gains_of_attention(measured: Rows) -> bool:
    """Of fused attention over plain, by context, in bf16."""
    ms = times_of_attention(measured)[["plain", "flash", "cudnn", "efficient", "flash-4"]]
    gain = (1 / ms).mul(ms["plain"], axis=0).dropna(subset="plain").drop(columns="plain")
    upto, beyond = gain.loc[4096:16384], gain.loc[32768:]
    longer = (ms / ms.shift()).loc[8192:16384]
    spread = gain.max(axis=1) / gain.min(axis=1)
    return bool(
        all(upto[name].is_monotonic_increasing for name in upto)
        and longer["plain"].between(3.5, 4.1).all()
        and (longer[["cudnn", "flash-4"]] < 2.9).all().all()
        and (ms["cudnn"] / ms["cudnn"].shift()).loc[32768:].between(3.7, 3.9).all()
        and (beyond / gain.loc[16384]).stack().dropna().between(0.8, 1.05).all()
        and spread.idxmax() >= 16384
    )


def short_attention(measured: Rows) -> bool:
    """From 256 to 1,024 tokens, by launch."""
    short = of(measured, grid="short", dtype="bfloat16", direction="forward+backward")
    ms = short.pivot_table("median_ms", ["launch", "provider"], "context_length", "median")
    longer = ms[1024] / ms[256]
    ways = ["plain", "efficient", "flash", "sdpa"]
    python, graph = longer["python"][ways], longer["graph"][ways]
    twice = graph[["flash", "sdpa"]].between(1.7, 2.5).all()
    return bool(
        python.between(0.9, 1.2).all() and (graph[["plain", "efficient"]] > 3).all() and twice
        and {*of(short, provider="sdpa")["backend"]} == {"cudnn"}
        and (ms[1024]["python"] > ms[1024]["graph"]).all()
        and 1 < ms[1024]["graph"]["plain"] / ms[1024]["graph"]["efficient"] < 1.1
        and ms[1024]["python"]["plain"] > 2 * ms[1024]["python"]["efficient"]
    )  # fmt: skip


def most_in_the_products(measured: Rows) -> bool:
    times = interleaved(measured).pivot_table("median_ms", SHAPE, "provider", "median")
    shares = times["products"] / times["eager"]
    return len(shares) == 8 and shares.between(0.5, 1).all()


def products_of_torch(measured: Rows) -> pd.Series:
    """Errors of torch's products by device, dtype and setting."""
    by = ["device", "dtype", "precision"]
    return of(measured, experiment="torch_matmul").groupby(by)["relative_error"].median()


def high_is_tf32_on_a_card_alone(measured: Rows) -> bool:
    error = products_of_torch(measured)
    card, host = error["cuda", "fp32"], error["cpu", "fp32"]
    on_card = card["medium"] == card["high"] > 100 * card["highest"]
    return bool(on_card and host["medium"] > 1000 * host["high"] == 1000 * host["highest"])


def longest_sums(measured: Rows) -> Rows:
    """Errors at the largest K by format, data and how a card added."""
    core = of(measured, experiment="tensor_core", device="cuda", k=131_072)
    return core.pivot_table("relative_error", ["distribution", "dtype"], "provider")


def cut_errs_a_hundred_times_as_much(measured: Rows) -> bool:
    positive = longest_sums(measured).loc["uniform"]
    times = positive["in the tensor core"] / positive["IEEE fp32"]
    return len(times) == 3 and bool(times.between(90, 170).all())


def cublas_errs_as_the_tensor_core_up_to_2048(measured: Rows) -> bool:
    """Of 16-bit factors, positive and signed."""
    added = of(measured, experiment="tensor_core", device="cuda")
    added = added[added["dtype"].isin(["fp16", "bf16"])]
    errors = added.pivot_table("relative_error", ["k", "dtype", "distribution"], "provider")
    share = errors["cuBLAS"] / errors["in the tensor core"]
    return bool((share.loc[:2048].between(0.98, 1.02)).all() and (share.loc[4096:] < 0.4).all())


def high_errs_as_tf32_in_the_tensor_core(measured: Rows) -> bool:
    layers = of(measured, experiment="linear", precision="high", distribution="uniform")
    added = of(measured, experiment="tensor_core", dtype="tf32", distribution="uniform")
    added = of(added, device="cuda", provider="in the tensor core").groupby("k")["relative_error"]
    share = layers.groupby("k")["relative_error"].median() / added.median()
    return bool(share.loc[4096:].dropna().between(0.97, 1.03).all() and share.loc[1024] > 1.5)


def bf16_results_lose_more(measured: Rows) -> bool:
    rounded = products_of_torch(measured)["cuda"]["bf16", "highest"]
    return bool(longest_sums(measured).max().max() < rounded)


def fusedlib_errs_less_than_highest(measured: Rows) -> bool:
    layers = of(measured, experiment="linear", precision="highest")
    error = layers.pivot_table("relative_error", ["distribution", "k"], "provider")
    return len(error) == 10 and bool((error["linear"] < error["eager"]).all())


def only_the_number_of_rows_changes_bits(measured: Rows) -> bool:
    beside = of(measured, experiment="neighbours")
    beside = beside[~inside(beside)]
    moved = beside[["changed_by_place", "changed_by_values"]].max().max()
    return len(beside) >= 180 and beside["changed_by_size"].max() > 0 == moved


def inside(measured: Rows) -> "pd.Series[bool]":
    """What ran inside of `fusedlib.batch_invariant`."""
    return measured["provider"].str.endswith("invariant")


def inside_fusedlib_changes_nowhere(measured: Rows) -> bool:
    ran = of(measured, experiment="neighbours", device="cuda")
    ran = ran[inside(ran) & ran["provider"].str.startswith("fusedlib")]
    causes = ["changed_by_size", "changed_by_place", "changed_by_values"]
    return ran["provider"].nunique() == 3 and ran[causes].max().max() == 0


def huggingface_keeps_bits_where_the_patched_does(measured: Rows) -> bool:
    ran = of(measured, experiment="token bits", dtype="bfloat16")
    changed = ran.pivot_table("changed_fraction", ["situation", "tokens"], "provider") > 0
    both = changed.reindex(columns=["fused-invariant", "huggingface-invariant"])
    return len(both) == 7 and both.nunique(axis=1).max() == 1 and 0 < both.iloc[:, 0].sum() < 7


def most_elements_in_fp32_and_few_in_bf16(measured: Rows) -> bool:
    """Of products; in bf16 of an MLP most again, from some number of rows on."""
    beside = of(measured, experiment="neighbours")
    fp32 = of(beside, dtype="fp32", provider="torch.mm")["changed_by_size"]
    bf16 = of(beside, dtype="bf16").groupby(["provider", "k"])["changed_by_size"].max()
    return bool((fp32 > 0.5).all() and 0 < bf16["torch.mm"].max() < 1 / 300
                and (bf16["fusedlib.swiglu_mlp"] > 0.5).all())  # fmt: skip


def norms_by_rows(measured: Rows) -> bool:
    """fusedlib's changes in fp32 at width 1,024 from 4,096 rows on, torch's nowhere."""
    norms = of(measured, experiment="neighbours")
    changed = norms[norms["changed_by_size"] > 0]
    torch_s, ours = (of(changed, provider=n) for n in ("torch rms_norm", "fusedlib.rms_norm"))
    where = {*zip(ours["dtype"], ours["k"], ours["m"], strict=True)}
    return torch_s.empty and where == {("fp32", 1024, 4096), ("fp32", 1024, 8192)}


def log_probs_of_150k(measured: Rows) -> Rows:
    """With gradients, at the larger vocabulary."""
    both = of(measured, experiment="log-probs", direction="forward+backward")
    return of(both, vocabulary=151_936)


def a_quarter_of_the_compiled_formulas_memory(measured: Rows) -> bool:
    whole = of(log_probs_of_150k(measured), ignored_share=0).groupby("provider")
    ms, mib = whole["median_ms"].median().drop("products"), whole["peak_mib"].median()
    share = mib["fused"] / mib.drop("products")
    return bool(ms["inductor"] == ms.min() and 0.22 < share["inductor"] < 0.28
                and [*share.index[share > 1]] == ["liger-scaled"])  # fmt: skip


def half_of_the_time_with_half_ignored(measured: Rows) -> bool:
    ms = log_probs_of_150k(measured).pivot_table("median_ms", "provider", "ignored_share")
    half = ms.reindex(columns=[0.0, 0.5]).pipe(lambda by: by[0.5] / by[0.0])
    return bool(0.45 < half["fused"] < 0.55 and 0.9 < half["inductor"] < 1)


def last_times(measured: Rows) -> "pd.Series[float]":
    """The newest time of each implementation."""
    return measured.sort_values("measured_at").groupby("provider")["median_ms"].last()


def liger_slower_with_one_sequence(measured: Rows) -> bool:
    ms = last_times(of(measured, experiment="step", batch_size=1, context_length=1024))
    return bool(ms["liger"] > 1.3 * ms["huggingface"])


def first_by_an_eighth_at_most(measured: Rows, strategy: str, provider: str) -> bool:
    """Its slowest step before the fastest of all others; medians are less than an eighth apart."""
    by = of(measured, experiment="distributed", strategy=strategy).set_index("provider")
    others = by.drop(provider)
    lead = others["median_ms"].min() / by["median_ms"][provider]
    apart = by["median_high_ms"][provider] < others["median_low_ms"].min()
    return bool(len(others) == 3 and apart and 1.07 < lead < 1.125)


# 07, compilers


def patched_faster_uncompiled(measured: Rows) -> bool:
    """One H200's training, and each way to divide it among one and two."""
    one = of(measured, experiment="training", optimizer="sgd")
    ms = one.groupby("provider")["median_ms"].median()
    several = of(measured, experiment="distributed").pivot_table(
        "median_ms", ["strategy", "processes"], "provider"
    )
    compiled = ms[[name for name in ms.index if name.startswith("fused-inductor")]]
    return bool(
        len(compiled) == 3 and len(several) == 5 and ms["fused"] < compiled.min()
        and (several["fused"] < several["fused-inductor-layers"]).all()
    )  # fmt: skip


def patched_compiles_sooner_and_is_slower_up_to_1024(measured: Rows) -> bool:
    changing = of(measured, experiment="dynamic").set_index("provider")
    plain, patched = "inductor-layers", "fused-inductor-layers"
    late = by_iteration(measured).query("iteration > 18").assign(long=lambda r: r["length"] > 1024)
    ms = late.pivot_table("step_ms", "long", "provider", "mean")
    every = late.groupby("provider")["step_ms"].mean()
    cut = [len(changing["samples_ms"][name]) for name in ("inductor", "inductor-causal")]
    ahead_s = changing["total_s"][plain] - changing["total_s"][patched]
    return bool(
        ahead_s > 0 and 1e3 * ahead_s / (every[patched] - every[plain]) > 1000
        and ms[plain][False] < 0.8 * ms[patched][False] and max(cut) < 45
        and 0.98 < ms[plain][True] / ms[patched][True] < 1.02
    )  # fmt: skip


def graphs_at_first_lengths_and_multiples_of_eight(measured: Rows) -> bool:
    steps = by_iteration(measured).query("iteration > 3")
    steps = steps[steps["provider"].str.contains("-layers|fused-inductor")]
    eight = [*steps.query("length % 8 == 0 and provider == 'fused-inductor'")["iteration"]]
    added = steps[steps["step_ms"] > 1000].groupby("provider")["iteration"].agg(list)
    return {*map(len, added)} == {1, 2} and all(at == eight[: len(at)] for at in added)


def slower_with_a_mask_and_faster_without(measured: Rows) -> bool:
    ms = of(measured, work="training sgd").groupby("provider")["median_ms"].median()
    over = ms / ms["huggingface"]
    return bool(over["inductor"] > 1.5 and over[["inductor-causal", "inductor-layers"]].max() < 0.8)


def tokens_differ_between_sessions(measured: Rows) -> bool:
    token = of(measured, work="generation multinomial", provider="huggingface")
    return bool(1.34 < token["median_ms"].max() / token["median_ms"].min() < 1.5)


def _paid(measured: Rows) -> Rows:
    """Forward passes, tokens and training: by calls and by seconds of the eager model beside it."""
    works = ["forward", "generation multinomial", "training sgd"]
    known = ratio(measured[measured["work"].isin(works)].assign(apart=False), over="huggingface")
    return known.assign(seconds=known["pays_after"] * known["call_ms"] * known["ratio"] / 1e3)


def layers_pay_first_in_calls_and_the_token_in_seconds(measured: Rows) -> bool:
    known, ms = _paid(measured), measured.groupby(["work", "provider"])["median_ms"].median()
    by_layer = known["compiler"] == "inductor-layers"
    known = known[known["compiler"] != "none"]
    whole = known[~by_layer.loc[known.index]]
    calls = (
        known.assign(layer=by_layer).groupby(["work", "layer"])["pays_after"].agg(["min", "max"])
    )
    token = whole.query("work == 'generation multinomial'")
    worst = token.groupby("provider")["seconds"].max()
    others = whole[whole["work"] != "generation multinomial"].groupby("provider")["seconds"].min()
    training = ms["training sgd"]
    return bool(
        all(calls.loc[(work, True), "max"] < calls.loc[(work, False), "min"]
            for work in ("forward", "training sgd"))
        and token["pays_after"].dropna().between(100, 10_000).all()
        and (worst < others.reindex(worst.index).fillna(np.inf))[others.dropna().index
            .intersection(worst.dropna().index)].all()
        and training["inductor"] > training["huggingface"]
    )  # fmt: skip


def patched_alone_pays_sooner_than_whole_models(measured: Rows) -> bool:
    known = _paid(measured)
    ms = measured[measured["work"] == "forward"].groupby("provider")["median_ms"].median()
    ours = ms[[name for name in ms.index if name.startswith("fused")]]
    sooner = []
    for work in ("forward", "training sgd"):
        there = known[known["work"] == work]
        whole = there[~there["compiler"].isin(["none", "inductor-layers"])]
        alone = there.loc[there["provider"] == "fused", "pays_after"]
        sooner.append(alone.max() < whole["pays_after"].min())
    one = of(measured, experiment="training", optimizer="sgd")
    training = one.groupby("provider")["median_ms"].median()
    trained = training[[name for name in training.index if name.startswith("fused-inductor")]]
    return bool(all(sooner) and ours.max() < 1.02 * ours.min()
                and training["fused"] < trained.min())  # fmt: skip


OF = {
    "03_clock": "profile", "05_precision": "precision",
    "07_compilers": "compilers", "09_learn": "mnist",
}  # fmt: skip
"""Whose rows a notebook speaks of that is not called like its topic."""


def trained(measured: Rows) -> Rows:
    return of(measured, experiment="run", epochs=4, train_images=60_000, precision="fp32")


def gates_that_train_move_by_a_third(measured: Rows) -> bool:
    """In their first epoch, of both networks; frozen ones not at all."""
    runs = trained(measured)
    frozen = runs["provider"] == "frozen"
    first = runs["epoch_gate_change"].map(lambda ends: ends[0] if isinstance(ends, list) else 0.0)
    return bool(frozen.any() and (first[~frozen] > 1 / 3).all() and (first[frozen] == 0).all())


def loss_falls_with_or_without_learning(measured: Rows) -> bool:
    """From the first epoch to the last, of trained and of frozen layers."""
    runs = trained(measured)
    fall = runs["epoch_test_loss"].map(
        lambda loss: loss[-1] / loss[0] if isinstance(loss, list) else np.nan
    )
    return {"eager", "frozen"} <= {*runs["provider"]} and bool((fall < 1).all())


def missed(measured: Rows) -> Rows:
    """Shares of test images, medians over seeds."""
    return trained(measured).pivot_table("test_error", "network", "provider", "median")


def frozen_misses_a_few_in_a_thousand_more(measured: Rows) -> bool:
    error = missed(measured)
    more = (error["frozen"] - error["eager"])["convolutions"]
    return 0.002 < more < 0.005 and error["frozen"]["swiglu only"] > 0.05


def published_kernel_misses_several_times_as_many(measured: Rows) -> bool:
    every = load("mnist")  # its rows are wrong, and not among those measured
    every = every[every["machine"] == measured["machine"].iloc[0]]
    times = missed(every)["published-kernel"] / missed(measured)["eager"]
    return len(times) == 2 and bool((times > 3).all())


def same_bits_on_both_cards(measured: Rows) -> bool:
    """Losses of plain and frozen PyTorch, of both networks and all five seeds."""
    plain, by = "provider in ['eager', 'frozen']", ["network", "provider", "seed"]
    here, other = (trained(rows).query(plain) for rows in (measured, load("mnist")))
    losses = other[other["machine"] == "H200"].set_index(by)["losses"]
    here = here.set_index(by)["losses"]
    return here.index.nunique() == 20 and [*here] == [*losses.reindex(here.index)]


def apart_at_a_seed(measured: Rows, precision: str, low: float, high: float) -> bool:
    """How far apart implementations lie at most at a seed, of what all last losses span."""
    runs = of(measured, experiment="run", epochs=4, network="convolutions", precision=precision)
    runs = runs[
        (runs["provider"] != "frozen") & ((runs["provider"] != "fused") | (precision == "bf16"))
    ]
    loss = runs.pivot_table("late_loss", "seed", "provider", "last")
    apart = (loss.max(axis=1) - loss.min(axis=1)).max() / (loss.max().max() - loss.min().min())
    return loss.shape == (5, 3 + (precision == "bf16")) and bool(low < apart < high)


def training_amplifies_a_rounding(measured: Rows) -> bool:
    """Losses beside PyTorch's in fp32 at one seed: first, and over the last epoch."""
    runs = of(trained(measured), network="convolutions", seed=0)
    losses = runs.drop_duplicates("provider", keep="last").set_index("provider")["losses"]
    if not all(isinstance(losses[name], list) for name in ("liger", "inductor", "eager")):
        return False
    for name in ("liger", "inductor"):
        off = abs(np.array(losses[name]) / np.array(losses["eager"]) - 1)
        if off[0] > 1e-4 or np.median(off[-67:]) < 0.1:
            return False
    return True


def of_profiles(measured: Rows) -> Rows:
    return of(measured, experiment="profile", provider="eager", attention="plain", batch_size=4)


def adamw_twice_the_products(measured: Rows) -> bool:
    ran = of(of_profiles(measured), context_length=256, model="2.7b", precision="bf16 autocast")
    return len(ran) > 0 and bool((ran["optimizer_ms"] > 2 * ran["products_ms"]).all())


def nine_tenths_with_four_times_the_tokens(measured: Rows) -> bool:
    ran = of(of_profiles(measured), model="small", precision="bf16 autocast")
    busy = ran.groupby("context_length")["busy"].median()
    return bool(busy[1024] > 0.9 and busy[256] < 0.5)


def small_waits_for_most_of_its_step(measured: Rows) -> bool:
    ran = of(measured, experiment="profile", provider="eager", attention="plain", model="small")
    ran = ran[(ran["context_length"] == 256) & ran["busy"].notna()]
    fp32, cast = (of(ran, precision=name) for name in ("fp32", "bf16 autocast"))
    more = cast["profiled_kernels"].min() > fp32["profiled_kernels"].max()
    return (
        more and cast["kernels_ms"].max() < fp32["kernels_ms"].min() and (cast["busy"] < 0.5).all()
    )


def times_as_fast(measured: Rows, base: str) -> Rows:
    """As a notebook's picture has it: of each race the newest session, by medians."""
    lines = measured.astype(object).where(measured.notna(), None).to_dict("records")
    return ratio(pd.DataFrame(newest(lines)).drop(columns="samples_ms"), over=base)


def gains_of_models(measured: Rows) -> Rows:
    """Forward and backward over PyTorch, by provider."""
    gains = times_as_fast(interleaved(measured), "eager")
    return gains.pivot_table("ratio", ["model", "hidden_size"], "provider")


def two_thirds_of_the_products(measured: Rows) -> bool:
    gains = gains_of_models(measured).droplevel("hidden_size") - 1
    share = gains["fused"] / gains["products"]
    return len(share) == 8 and share.min() > 2 / 3 and share["Qwen2.5-7B"] > 1


def fusing_pays_where_hidden_is_small(measured: Rows) -> bool:
    gains = gains_of_models(measured)["fused"].groupby("hidden_size").mean()
    falling = gains.rank().corr(pd.Series(range(len(gains)), gains.index))
    ends = gains.idxmax() == min(gains.index) and gains.idxmin() == max(gains.index)
    return len(gains) == 7 and ends and bool(falling < -0.9)


def less_than_a_fifth_more_speed(measured: Rows) -> bool:
    gains = gains_of_models(measured)["fused"]
    return len(gains) == 8 and bool(gains.between(1.02, 1.2).all() and gains.max() > 1.1)


def matrices_saved(measured: Rows) -> bool:
    saved = of(measured, experiment="saved", dtype="bfloat16")
    saved = saved.assign(matrices=saved["saved_mib"] * 2**20 / 2
                         / saved["tokens"] / saved["intermediate_size"])  # fmt: skip
    said = {"fused": 2, "liger": 3, "inductor": 3, "eager": 4}
    spans = saved.groupby("provider")["matrices"].agg(["min", "max"]).reindex([*said])
    return all(round(n, 2) == said[name] for name, span in spans.iterrows() for n in span)


def forward_over_liger(measured: Rows, launch: str, provider: str, setting: str) -> Rows:
    """By tokens and width."""
    ran = of(measured, experiment="time", direction="forward", launch=launch, precision=setting)
    fp32 = of(times_as_fast(of(ran, dtype="float32"), "liger"), provider=provider)
    return fp32.groupby(["tokens", "hidden_size"])["ratio"].median()


def repaired_in_tf32_ahead_at_both_ends(measured: Rows) -> bool:
    gains = forward_over_liger(measured, "graph", "all-gradients", "high")
    ieee = forward_over_liger(measured, "graph", "ieee-products", "highest")
    ahead = {*gains.index[gains > 1]}
    return ahead == {(64, 512), (64, 16384)} and len(ieee) == 7 and ieee.max() < 1


def two_and_a_half_falls_below_one(measured: Rows) -> bool:
    """At width 4,096: as published, with the whole sum, with TF32 on both sides."""
    published, whole, alike = (
        forward_over_liger(measured, "graph", name, setting).get((64, 4096), 0)
        for name, setting in (("published-kernel", "highest"), ("all-gradients", "highest"),
                              ("all-gradients", "high"))
    )  # fmt: skip
    return 2.5 < published < 2.75 and 1.25 < whole < 1.5 and 0.75 < alike < 1


def as_published_near_three(measured: Rows) -> bool:
    gains = forward_over_liger(measured, "graph", "published-kernel", "highest")
    return 2.9 < gains.max() < 3.05 and bool(gains[64].is_monotonic_increasing)


def half_again_as_fast_from_python(measured: Rows) -> bool:
    gains = forward_over_liger(measured, "python", "all-gradients", "high")[64]
    return bool(gains.loc[512:4096].gt(1.5).all() and (gains.loc[8192:] < 1.3).all())


def none_reaches_the_log(measured: Rows) -> bool:
    """By the published kernel, in either launch."""
    log = from_tables(*(published(name) for name in OF_TOPIC["anatomy"]))
    log = of(log, series="sweep", experiment="time", direction="forward")["ratio"]
    ours = [forward_over_liger(measured, launch, "published-kernel", "highest").max()
            for launch in ("python", "graph")]  # fmt: skip
    return bool(2.7 < max(ours) < log.max())


def in_bf16(measured: Rows, provider: str) -> Rows:
    """Forward over Liger with 64 tokens up to width 4,096, by launch."""
    ran = of(measured, experiment="time", direction="forward", dtype="bfloat16", tokens=64)
    gains = of(times_as_fast(ran[ran["hidden_size"] <= 4096], "liger"), provider=provider)
    return gains.groupby("launch", observed=True)["ratio"].agg(["count", "min", "max"])


def twice_from_python_and_half_in_a_graph(measured: Rows) -> bool:
    gains = in_bf16(measured, "fused")
    return bool((gains["count"] == 4).all() and gains["min"]["python"] > 2
                and gains["min"]["graph"] > 1.05 and gains["max"]["graph"] < 1.5)  # fmt: skip


def pytorch_ahead_from_python_alone(measured: Rows) -> bool:
    gains = in_bf16(measured, "eager")
    return bool((gains["count"] == 4).all() and gains["min"]["python"] > 1 > gains["max"]["graph"])


BOTH = ["nvidia-h200", "nvidia-h100"]
SAID = [
    ("05_precision", "A card rounds factors to TF32 at high and medium; the recorded CPU takes no "
     "notice of high, and rounds to bf16 at medium", BOTH, high_is_tf32_on_a_card_alone),
    ("05_precision", "the longest positive sum errs about a hundred times as much as in fp32 "
     "units, or more", BOTH, cut_errs_a_hundred_times_as_much),
    ("05_precision", "cuBLAS errs as the tensor core up to K = 2,048 (fp16 and bf16), and takes "
     "partial sums out beyond", BOTH, cublas_errs_as_the_tensor_core_up_to_2048),
    ("05_precision", "From K = 4,096 on high errs on positive data as much as section 4's TF32 *in "
     "the tensor core*", ["nvidia-h200"], high_errs_as_tf32_in_the_tensor_core),
    ("05_precision", "Rounding a result to bf16 loses more than all this", BOTH,
     bf16_results_lose_more),
    ("05_precision", "fusedlib errs less than torch at highest at every K of the picture",
     ["nvidia-h200"], fusedlib_errs_less_than_highest),
    ("05_precision", "The number of rows changes bits, their place and values never",
     ["nvidia-h200"], only_the_number_of_rows_changes_bits),
    ("05_precision", "In fp32 most elements of a product change; in bf16, where rounding hides it, "
     "fewer than one in three hundred of `torch.mm`'s, yet most of an MLP's", ["nvidia-h200"],
     most_elements_in_fp32_and_few_in_bf16),
    ("05_precision", "torch's norm always has the same bits, and so has fusedlib's, but for fp32 "
     "of width 1,024 from 4,096 rows on", ["nvidia-h200"], norms_by_rows),
    ("05_precision", "Inside, fusedlib's never change on the card", ["nvidia-h200"],
     inside_fusedlib_changes_nowhere),
    ("05_precision", "Hugging Face's own model keeps its bits inside wherever the patched one does",
     ["nvidia-h200"], huggingface_keeps_bits_where_the_patched_does),
    ("04_memory/memory", "With as many it is about a sixteenth above them; with half or a quarter "
     "it is level with them or a little lower", BOTH, a_sixteenth_above_with_as_many),
    ("04_memory/memory", "with four times as many tokens as the hidden size fusedlib's peak is the "
     "lowest", BOTH, lowest_with_four_times_as_many),
    ("04_memory/memory", "At all these shapes that lowers its peak by nothing", BOTH,
     x_alone_lowers_no_peak),
    ("04_memory/model_memory", "up to a sixth above the count", BOTH, reserve_up_to_a_sixth),
    ("04_memory/model_memory", "the first 16 give back about half of the memory, for about half of "
     "what all of them cost in time", BOTH, half_the_plan_for_half_the_price),
    ("04_memory/model_memory", "In bf16 checkpoint each block by itself; under autocast segments "
     "of two hold least but for nested ones", BOTH, longest_plans),
    ("06_attention/attention", "It rises up to sixteen thousand tokens: twice the context costs "
     "plain attention about four times the time, and cuDNN and FlashAttention-4 less than three "
     "times", BOTH, gains_of_attention),
    ("06_attention/attention", "From Python, with eight heads, FlashAttention-4 passes cuDNN "
     "between 8,192 and 16,384 tokens", BOTH, four_passes_cudnn),
    ("06_attention/attention", "At 128 wide FlashAttention-4 is a tenth faster than cuDNN",
     ["nvidia-h100"], four_a_tenth_faster_with_wide_heads),
    ("06_attention/attention", "The line of plain attention ends at the last context that fits the "
     "card; torch.compile and math were run up to 16,384 tokens", BOTH, plain_ends_with_the_card),
    ("06_attention/attention", "at 16,384 tokens cuDNN takes more than three times as long with "
     "one as with the flag, and holds about five times as much", ["nvidia-h200"],
     a_mask_tensor_costs),
    ("06_attention/attention", "Heads of 100 that `rope` pads go to cuDNN, which in a graph takes "
     "about half the time of flash; from Python they gain at 16,384 tokens, and nothing at 4,096. "
     "Math, where a mask tensor leaves nothing else, takes more than ten times as long as flash at "
     "16,384", ["nvidia-h200"], heads_of_100),
    ("06_attention/attention", "at 4,096 cuDNN takes more than twice as long from Python as in a "
     "graph", ["nvidia-h200"], cudnn_waits_at_4096),
    ("06_attention/attention", "From Python less than a fifth longer", ["nvidia-h200"],
     short_attention),
    ("06_attention/attention", "In a graph plain attention and efficient take more than three "
     "times as long, flash and the default, which is cuDNN, about twice", ["nvidia-h200"],
     short_attention),
    ("06_attention/attention", "At 1,024 tokens efficient is hardly faster than plain attention in "
     "the graph", ["nvidia-h200"], short_attention),
    ("01_kernel/kernels", "The library has two thirds or more of what the products alone would "
     "give, and more than all of it for Qwen2.5-7B", BOTH, two_thirds_of_the_products),
    ("01_kernel/kernels", "fusing is worth most where hidden is small",
     BOTH, fusing_pays_where_hidden_is_small),
    ("01_kernel/kernels", "the products stay, and take most of the time",
     BOTH, most_in_the_products),
    ("01_kernel/kernels", "In 16 bits and with many tokens expect less than a fifth more speed",
     BOTH, less_than_a_fifth_more_speed),
    ("01_kernel/memory", "in 16 bits fusedlib keeps two matrices for backward, PyTorch four", BOTH,
     matrices_saved),
    ("02_faster/anatomy", "In TF32 at the narrowest and the widest alone, in IEEE nowhere",
     BOTH, repaired_in_tf32_ahead_at_both_ends),
    ("02_faster/anatomy", "at width 4,096 a factor above two and a half (as published, circles) "
     "falls below one and a half with the whole sum (orange squares), and below one with TF32 on "
     "both sides (diamonds)", BOTH, two_and_a_half_falls_below_one),
    ("02_faster/anatomy", "towards wide layers the factor nears three",
     BOTH, as_published_near_three),
    ("02_faster/anatomy", "From Python *repaired* is more than one and a half times as fast in "
     "TF32 up to width 4,096", BOTH, half_again_as_fast_from_python),
    ("02_faster/anatomy", "none of ours reaches the log's highest factor", BOTH,
     none_reaches_the_log),
    ("02_faster/anatomy", "In bf16, with 64 tokens and up to width 4,096, fusedlib is more than "
     "twice as fast as Liger from Python, and in a graph less than half as fast again",
     BOTH, twice_from_python_and_half_in_a_graph),
    ("02_faster/anatomy", "is ahead of Liger from Python too, and behind it in a graph", BOTH,
     pytorch_ahead_from_python_alone),
    ("09_learn", "the frozen layer misses a few images in a thousand more than the trained one",
     BOTH, frozen_misses_a_few_in_a_thousand_more),
    ("09_learn", "On the H200 the published kernel misses several times as many as the trained "
     "layer in both networks", ["nvidia-h200"], published_kernel_misses_several_times_as_many),
    ("09_learn", "Trained gates move by more than a third of their length in the first epoch",
     BOTH, gates_that_train_move_by_a_third),
    ("09_learn", "The test loss falls whether the layer learns or not", BOTH,
     loss_falls_with_or_without_learning),
    ("09_learn", "The runs of PyTorch are the same on both cards to the last bit", ["nvidia-h100"],
     same_bits_on_both_cards),
    ("09_learn", "marks of one seed lie within a tenth of what all marks span", ["nvidia-h200"],
     lambda measured: apart_at_a_seed(measured, "fp32", 0, 0.1)),
    ("09_learn", "in TF32 within a quarter", ["nvidia-h200"],
     lambda measured: apart_at_a_seed(measured, "tf32", 0.1, 0.25)),
    ("09_learn", "In bf16 they lie up to about half of it apart", ["nvidia-h200"],
     lambda measured: apart_at_a_seed(measured, "bf16", 0.45, 0.6)),
    ("09_learn", "The curve of one seed begins below a ten-thousandth, and training amplifies it "
     "until the losses of two right runs differ by a tenth or more", ["nvidia-h200"],
     training_amplifies_a_rounding),
    ("08_model/llama", "there Liger's default is slower than Hugging Face", BOTH,
     liger_slower_with_one_sequence),
    ("07_compilers", "in each training of open_llama_3b with equal lengths, on one H200 and "
     "on two, the patched model was faster uncompiled", ["nvidia-h200"], patched_faster_uncompiled),
    ("07_compilers/llama", "[Llama-3.2-1B](08_model.ipynb) was as fast compiled or a little faster",
     BOTH, lambda measured: compiled_patch_a_gib_more(measured)),
    ("07_compilers", "Compiled whole, with its mask, a step takes more than half as long again as "
     "uncompiled; with no mask, or layer by layer, more than a fifth less", ["nvidia-h200"],
     slower_with_a_mask_and_faster_without),
    ("07_compilers", "Layer by layer the patched model was compiled sooner. Later, up to 1,024 "
     "tokens, the plain one takes more than a fifth less time a step, and above both take as long: "
     "after more than a thousand such steps it comes out ahead. Compiled whole, the plain model "
     "was cut off by the limit, with its mask and without", ["nvidia-h200"],
     patched_compiles_sooner_and_is_slower_up_to_1024),
    ("07_compilers", "Graphs were added at the first lengths, and later at the first one or two "
     "multiples of eight alone", ["nvidia-h200"], graphs_at_first_lengths_and_multiples_of_eight),
    ("07_compilers", "That model's tokens took more than a third longer in some sessions than in "
     "others", ["nvidia-h200"], tokens_differ_between_sessions),
    ("07_compilers", "its call is so short that hundreds to thousands are needed. Counted in "
     "seconds a whole model under the same compiler pays first for the token. This training, whose "
     "heads no fused attention takes with a mask, never pays with its mask", ["nvidia-h200"],
     layers_pay_first_in_calls_and_the_token_in_seconds),
    ("07_compilers", "The patched model alone trains faster than with any compiler on top, and in "
     "forward passes and training pays sooner than all that compile a whole model",
     ["nvidia-h200"], patched_alone_pays_sooner_than_whole_models),
    ("03_clock", "There AdamW takes more than twice as long as all products of `2.7b`", BOTH,
     adamw_twice_the_products),
    ("03_clock", "The kernels of `small` are more and shorter under autocast, so the GPU is idle "
     "for most of the step", BOTH, small_waits_for_most_of_its_step),
    ("03_clock", "With four times as many tokens the GPU is busy for nine tenths of it on the H200",
     ["nvidia-h200"], nine_tenths_with_four_times_the_tokens),
]  # fmt: skip


# --- 03_clock and 08_model ------------------------------------------------------------------------


def later_sizes_in_one_process(measured: Rows, most: float) -> bool:
    """What they take of what the first size took, when one process trains all."""
    extra = of(measured, experiment="steps", isolation="shared", direction="forward+backward")
    extra = last(extra, "model", "extra_ms")
    return bool(len(extra) == 5 and (extra.drop("small") < most * extra["small"]).all())


def unsettled(measured: Rows) -> list[str]:
    """Sizes of which a step after one, two or five still differs by a fiftieth from a late one."""
    fresh = of(measured, experiment="steps", isolation="fresh", direction="forward+backward")
    fresh = fresh[fresh.groupby("set")["model"].transform("nunique") == 5]
    late = after_warmup(fresh, 1, 2, 5).groupby(["model", "warmup_steps"])["over_late"].median()
    return sorted({model for model, _ in late[abs(late - 1) > 0.02].index})


def last(measured: Rows, by: str | list[str], value: str) -> pd.Series:
    return measured.sort_values("measured_at").groupby(by)[value].last()


def one_mlp(measured: Rows, launch: str) -> Rows:
    """Times of a sweep's MLP on 64 tokens, by hidden size and provider."""
    sweep = of(steps_of(measured, "sweep"), launch=launch)
    return last(sweep, ["hidden_size", "provider"], "median_ms").unstack()[["eager", "fused"]]


def one_mlp_in_less_than_three_quarters(measured: Rows) -> bool:
    ms = one_mlp(measured, "python").loc[512:4096]
    return len(ms) == 4 and bool((ms["fused"] < 0.75 * ms["eager"]).all())


def one_mlp_as_long_at_4096_as_at_512(measured: Rows) -> bool:
    python, graph = (one_mlp(measured, launch) for launch in ("python", "graph"))
    python, graph = (ms.loc[4096] / ms.loc[512] for ms in (python, graph))
    return bool(python.between(0.8, 1.2).all() and graph.min() > 3)


def whole_steps(measured: Rows, provider: str = "eager") -> Rows:
    """By session, size and precision."""
    steps = of(measured, context_length=256, attention="plain", provider=provider)
    steps = steps[~steps["host"].eq(True)]
    by = ["recording", "experiment", "model"]
    return steps.pivot_table("step_median_ms", by, "precision", dropna=True)


def xl_half_as_long_again(measured: Rows) -> bool:
    ms = whole_steps(measured)["bf16 autocast"].xs("xl", level="model").dropna()
    return bool(len(ms) > 1 and 1.5 < ms.max() / ms.min() < 1.8)


def compiling_halves_steps_under_autocast(measured: Rows) -> bool:
    """Beside the eager steps of the same session."""
    eager, compiled = (
        whole_steps(of(measured, experiment="model"), w) for w in ("eager", "inductor")
    )
    over = (eager / compiled).groupby("model").min()
    cast, large = over["bf16 autocast"], over["fp32"][["large", "xl", "2.7b"]]
    return bool(
        cast[["small", "medium", "large"]].min() > 1.9 and large.between(1, 1.11).all()
        and 1.2 < cast["2.7b"] < 1.4
    )  # fmt: skip


def medium_gains_in_both(measured: Rows) -> bool:
    race = of(measured, experiment="model")
    over = whole_steps(race) / whole_steps(race, "inductor")
    return over.index.get_level_values("model").tolist() == ["medium"] and bool(
        (over[["fp32", "bf16 autocast"]] > 1.4).all(axis=None)
    )


def arms_of_1b(measured: Rows, value: str) -> pd.Series:
    arms = of(measured, experiment="step", group="arms", dtype="bfloat16", model="Llama-3.2-1B")
    return last(arms[arms["recording"] == NEWEST], "provider", value)


PARTS = {"norms": "rms-norm", "loss": "loss", "MLP": "mlp", "RoPE": "rope"}


def parts_of_1b(measured: Rows) -> Rows:
    """Milliseconds that each part of fusedlib's saves alone, and those that it leads Liger by."""
    ms = arms_of_1b(measured, "median_ms")
    fused = ms[[f"fused-{name}" for name in PARTS.values()]].set_axis([*PARTS])
    liger = ms[["liger-rms-norm", "liger-flce", "liger-swiglu", "liger-rope"]].set_axis([*PARTS])
    parts = pd.DataFrame({"saved": ms["huggingface"] - fused, "lead": liger - fused})
    parts.loc["all"] = ms["huggingface"] - ms["fused"], ms["liger"] - ms["fused"]
    return parts


def parts_add_up(measured: Rows) -> bool:
    saved = parts_of_1b(measured)["saved"]
    return bool(0.9 < saved.drop("all").sum() / saved["all"] < 1.1)


def norms_save_time_and_the_loss_memory(measured: Rows) -> bool:
    gib = arms_of_1b(measured, "activations_gib")
    gib = gib[[f"fused-{name}" for name in PARTS.values()]].set_axis([*PARTS])
    saved = parts_of_1b(measured)["saved"].drop("all")
    return bool(saved["norms"] == saved.max() and gib["loss"] == gib.min())


def half_of_the_lead_by_the_loss(measured: Rows) -> bool:
    lead = parts_of_1b(measured)["lead"]
    return bool(lead["loss"] > lead["all"] / 2 and 0.2 < lead["MLP"] / lead["all"] < 0.3)


def compiled_patch_a_gib_more(measured: Rows) -> bool:
    gib, ms = (arms_of_1b(measured, name) for name in ("activations_gib", "median_ms"))
    return bool(0.97 < ms["fused-inductor"] / ms["fused"] <= 1.0
                and 0.8 < gib["fused-inductor"] - gib["fused"] < 1.2)  # fmt: skip


def no_lead_of_the_loss(measured: Rows) -> bool:
    losses = of(measured, experiment="loss", vocabulary=128256, direction="forward+backward")
    over = quotients(of(losses, ignored_share=0), "hidden_size", "fused")["liger-chunks-32"]
    return bool(len(over.dropna()) == 2 and over.min() >= 1)


def a_third_more_unlogged(measured: Rows) -> bool:
    arms = newest_session(of(measured, experiment="step", group="arms", dtype="bfloat16"))
    gib = arms.groupby("provider")["activations_gib"].median()
    return bool(1.3 < gib["inductor-causal-loss"] / gib["fused"] < 1.4)


def compiled_is_near_without_logits(measured: Rows) -> bool:
    over = arms_over(measured, "fused")["speed"]
    near = over[["liger-inductor-layers", "inductor-causal-loss"]]
    return bool(near.between(0.95, 1).all() and over["liger"] < 0.95)


def phi_nearly_as_fast_unmasked(measured: Rows) -> bool:
    phi = quotients(of(measured, experiment="families", model="Phi-3-mini, 8 layers"), "model",
                    "fused")  # fmt: skip
    return bool(phi.get("inductor-causal", pd.Series(np.nan)).between(0.95, 1).all())


def compiled_alone_holds_nearly_twice(measured: Rows) -> bool:
    gib, ms = (arms_of_1b(measured, name) for name in ("activations_gib", "median_ms"))
    return bool(1 < ms["inductor-causal"] / ms["fused"] < 1.05
                and 1.75 < gib["inductor-causal"] / gib["fused"] < 2)  # fmt: skip


def in_families(measured: Rows, value: str) -> Rows:
    """By model and provider, the newest."""
    return last(of(measured, experiment="families"), ["model", "provider"], value).unstack()


def qwen3_gains_most_and_is_launched(measured: Rows) -> bool:
    ms, issue = in_families(measured, "median_ms"), in_families(measured, "issue_ms")["huggingface"]
    gains = ms["huggingface"] / ms["fused"]
    return bool(gains.idxmax() == "Qwen3-0.6B" and issue["Qwen3-0.6B"]
                > 0.8 * ms["huggingface"]["Qwen3-0.6B"])  # fmt: skip


def liger_launches_for_most_of_its_step(measured: Rows) -> bool:
    ms, issue = in_families(measured, "median_ms"), in_families(measured, "issue_ms")
    slow = [name for name in ("Qwen3-0.6B", "Gemma-2-2B, 8 layers") if name in ms.index]
    share = issue["liger"][slow] / ms["liger"][slow]
    return bool(share.between(0.8, 1.1).all())  # no step is over before it is launched


GEMMA = "Gemma-2-2B, 8 layers"


def liger_slower_for_gemma_alone(measured: Rows) -> bool:
    ms = in_families(measured, "median_ms")
    slower = ms["liger"] > ms["huggingface"]
    return len(ms) == 5 and [*ms.index[slower]] == [GEMMA]


def liger_holds_less_of_gemma_alone(measured: Rows) -> bool:
    gib = in_families(measured, "activations_gib")
    less = gib["liger"] < gib["fused"]
    return len(gib) == 5 and [*gib.index[less]] == [GEMMA]


def one_sequence(measured: Rows, holds: Callable[[float], bool]) -> bool:
    ms = last_times(of(measured, experiment="step", batch_size=1, context_length=1024))
    return holds(float(ms["huggingface"] / ms["fused"]))


def more_sequences_add_little(measured: Rows) -> bool:
    speed = of(measured, experiment="step", group="sizes", dtype="bfloat16", context_length=1024)
    speed = last(speed[speed["batch_size"] >= 8], ["provider", "batch_size"], "tokens_per_s")
    speed = speed.unstack().loc["fused"].dropna()
    return len(speed) > 1 and bool(1 < speed.max() / speed[8] < 1.1)


def patched_takes_least_divided(measured: Rows) -> bool:
    """Medians' intervals apart, but where FSDP keeps the weights."""
    two = of(measured, experiment="distributed", processes=2).set_index(["strategy", "provider"])
    ms = two["median_ms"].unstack()
    low, high = two["median_low_ms"].unstack(), two["median_high_ms"].unstack()
    first = high["fused"] < low.drop(columns="fused").min(axis=1)
    return bool(not first["fsdp2-2"] and first.drop("fsdp2-2").all() and len(first) == 4
                and (ms.idxmin(axis=1) == "fused").all()
                and high["fused"]["fsdp2-2"] > low["inductor-layers"]["fsdp2-2"])  # fmt: skip


def layers_slower_than_none_with_zero_3(measured: Rows) -> bool:
    ms = last_times(of(measured, experiment="distributed", strategy="zero-3"))
    return bool(ms["inductor-layers"] > 1.2 * ms["huggingface"])


def compiling_patched_layers_besides_gains_nothing(measured: Rows) -> bool:
    two = of(measured, experiment="distributed", processes=2)
    ms = two.pivot_table("median_ms", "strategy", "provider")
    return len(ms) == 4 and bool((ms["fused-inductor-layers"] > ms["fused"]).all())


H100, H200 = ["nvidia-h100"], ["nvidia-h200"]
SAID += [
    ("03_clock/warmup", "later sizes pay next to nothing on the H200", H200,
     lambda measured: later_sizes_in_one_process(measured, 0.05)),
    ("03_clock/warmup", "and up to about a fifth of it on the H100", H100,
     lambda measured: later_sizes_in_one_process(measured, 0.22)),
    ("03_clock/warmup", "After one step all sizes have settled on the H200", H200,
     lambda measured: unsettled(measured) == []),
    ("03_clock/warmup", "on the H100 `small` and `medium` go on changing", H100,
     lambda measured: unsettled(measured) == ["medium", "small"]),
    ("03_clock/kernels", "There fusedlib's, with fewer launches, takes less than three quarters of "
     "PyTorch's time", BOTH, one_mlp_in_less_than_three_quarters),
    ("03_clock/kernels", "a step of either MLP takes as long at hidden 4,096 as at 512, within a "
     "fifth", BOTH, one_mlp_as_long_at_4096_as_at_512),
    ("03_clock/end_to_end", "on the H200 eager `xl` under autocast took more than half as long "
     "again in one session as in another", H200, xl_half_as_long_again),
    ("03_clock/end_to_end", "compiling about halves the steps of `small`, `medium` and `large` or "
     "does better; in fp32 from `large` on it gains at most about a tenth", H200,
     compiling_halves_steps_under_autocast),
    ("03_clock/end_to_end", "On the H100 `medium` alone was compiled, and gains in both precisions",
     H100, medium_gains_in_both),
    ("08_model/llama", "The compiled patch is as fast as the patch or a little faster, and holds "
     "about a GiB more", BOTH, compiled_patch_a_gib_more),
    ("08_model/llama", "comes within a twentieth of the patch in time. Beside weights and "
     "gradients it holds nearly twice as much", BOTH, compiled_alone_holds_nearly_twice),
    ("08_model/llama", "and over a third more where it returns no logits", H200,
     a_third_more_unlogged),
    ("08_model/llama", "over its few chunks the loss has no lead", H200, no_lead_of_the_loss),
    ("08_model/llama", "With Liger's loss beside compiled layers, or without logits, it comes "
     "near, too", H200, compiled_is_near_without_logits),
    ("08_model/llama", "without one Phi-3 is nearly as fast as patched", H200,
     phi_nearly_as_fast_unmasked),
    ("08_model/llama", "the CPU needs most of Hugging Face's step to launch its many short kernels",
     H100, qwen3_gains_most_and_is_launched),
    ("08_model/llama", "the CPU launches for most of the step", BOTH,
     liger_launches_for_most_of_its_step),
    ("08_model/llama", "The norms save most time, the loss most memory", BOTH,
     norms_save_time_and_the_loss_memory),
    ("08_model/llama", "Alone, the parts save together nearly what all save at once", BOTH,
     parts_add_up),
    ("08_model/llama", "Over Liger's default the loss is more than half of the lead, and the MLP "
     "about a quarter", BOTH, half_of_the_lead_by_the_loss),
    ("08_model/llama", "Liger is slower than Hugging Face for Gemma 2 alone", H100,
     liger_slower_for_gemma_alone),
    ("08_model/llama", "For Gemma 2 alone it holds less memory than fusedlib", H100,
     liger_holds_less_of_gemma_alone),
    ("08_model/llama", "As published, without prefetching, Liger without its fused loss is "
     "fastest", H200, lambda measured: first_by_an_eighth_at_most(
         measured, "offload-throttled", "liger-without-flce")),
    ("08_model/llama", "with DeepSpeed's defaults the patched model: each leads by less than an "
     "eighth, with ranges of its three steps apart from the others'", H200,
     lambda measured: first_by_an_eighth_at_most(measured, "offload", "fused")),
    ("08_model/llama", "torch.compile without a mask is faster still (section 4)", H200,
     lambda measured: faster_with_few_tokens(measured)),
    ("08_model/llama", "and the patched model still much faster", H100,
     lambda measured: one_sequence(measured, lambda times: times > 1.3)),
    ("08_model/llama", "From eight sequences on, more of them add less than a tenth to its speed",
     H100, more_sequences_add_little),
    ("08_model/llama", "The compiled formula takes less time, for it keeps the logits; fusedlib "
     "holds about a quarter of its memory. Only Liger's kernels for Hopper hold less", H200,
     a_quarter_of_the_compiled_formulas_memory),
    ("08_model/llama", "With half of the tokens ignored fusedlib takes half of its time, and the "
     "compiled formula nearly as long as before", H200, half_of_the_time_with_half_ignored),
    ("08_model/compilers", "The patched model takes least time in each; with FSDP and weights "
     "kept, compiled layers take as long within the spread of the medians", H200,
     patched_takes_least_divided),
    ("08_model/compilers", "With ZeRO-3 compiled layers take longer than uncompiled ones of "
     "Hugging Face", H200, layers_slower_than_none_with_zero_3),
    ("08_model/compilers", "To compile the patched layers besides makes no way faster", H200,
     compiling_patched_layers_besides_gains_nothing),
]  # fmt: skip


def newest_session(measured: Rows) -> Rows:
    """Of each race the rows of its last session."""
    lines = measured.astype(object).where(measured.notna(), None).to_dict("records")
    rows = pd.DataFrame(newest(lines))
    return rows[~rows["apart"]].infer_objects()


def quotients(measured: Rows, index: str | list[str], base: str) -> Rows:
    """How many times as fast each provider is as one of them, by medians of each race's last
    session."""
    keys = [*([index] if isinstance(index, str) else index), "provider"]
    ms = newest_session(measured).groupby(keys)["median_ms"].median().unstack()
    return ms.rdiv(ms[base], axis=0)


def one_block_right_and_two_wrong(measured: Rows) -> bool:
    alone = of(measured, experiment="errors", provider="published-kernel-emulated", tokens=64)
    error = alone.groupby("hidden_size")["y_error"].median()
    return bool(error[64] < 1e-5 and len(error) > 3 and error.drop(64).between(0.9, 1.1).all())


def second_version_wrong(measured: Rows) -> bool:
    second = of(measured, experiment="errors", provider="second-version-emulated")
    return len(second) > 5 and bool(
        (second[["d_w_gate_error", "d_w_up_error"]] > 0.9).all(axis=None)
    )


def published_kernel_is_all_wrong(measured: Rows) -> bool:
    timed = of(measured, experiment="time", provider="published-kernel")
    return len(timed) > 10 and bool(timed["y_error"].between(0.9, 1.1).all())


def slower_in_ieee(measured: Rows) -> bool:
    at = of(measured, shape="1024·4096", direction="forward+backward", precision="highest")
    over = quotients(of(at, dtype="float32"), "launch", "liger")
    return len(over) == 2 and bool(over["ieee-products"].max() < 0.5
                                   and over["published-kernel"].min() > 2)  # fmt: skip


def the_format_is_the_larger_part(measured: Rows) -> bool:
    """Larger than the work that is left out, of what divides the published kernel from Liger's."""
    at = of(measured, shape="1024·4096", direction="forward+backward", precision="highest")
    at = of(of(at, dtype="float32"), launch="python", experiment="time")
    over = quotients(at, "launch", "liger").iloc[0]
    left_out = over["published-kernel"] / over["all-gradients"]
    form = over["all-gradients"] / over["ieee-products"]
    return bool(over["published-kernel"] > 2 and form > 1.2 * left_out > 1.2)


def large_fp32(measured: Rows) -> Rows:
    """Forward and backward of large MLPs in fp32, from Python, of each race's last session."""
    large = of(measured, group="large fp32", direction="forward+backward", launch="python")
    return newest_session(large[~large["provider"].isin(["products", "quack"])])


def three_times_and_more_exact(measured: Rows) -> bool:
    highest = of(large_fp32(measured), precision="highest")
    over = 1 / quotients(highest, "shape", "fused")["liger"]
    error = highest.pivot_table("y_error", "shape", "provider", "median")
    return len(over) == 4 and bool(3 <= over.median() < 4.2 and over.min() > 2.5
                                   and (error["fused"] < 0.5 * error["liger"]).all())  # fmt: skip


def only_split_products_gain(measured: Rows) -> bool:
    over = quotients(of(large_fp32(measured), precision="highest"), "shape", "liger")
    searched = over.columns == "triton-tf32x3-searched"  # on the H200 alone
    ours = over.columns.str.startswith("fused")
    others = over.loc[:, ~ours & ~searched].stack()
    gains = over.loc[:, searched].stack().between(1.02, 1.33).all()
    return bool(
        over.loc[:, ours].min(axis=None) > 2.5 and others.between(0.7, 1.02).all() and gains
    )


def tf32_gains_more_and_loses_digits(measured: Rows) -> bool:
    large = large_fp32(measured)
    ms, error = (large.pivot_table(value, ["shape", "precision"], "provider", "median")
                 for value in ("median_ms", "y_error"))  # fmt: skip
    ieee, tf32 = (ms["eager"].xs(one, level="precision") for one in ("highest", "high"))
    split = ms["fused"].xs("highest", level="precision")
    lost = error["eager"].xs("high", level="precision") / error["liger"].xs(
        "highest", level="precision"
    )
    return len(split) == 4 and bool((tf32 < split).all() and (split < ieee).all()
                                    and lost.between(100, 1000).all())  # fmt: skip


def mostly_products(measured: Rows) -> bool:
    share = quotients(interleaved(measured), "shape", "products")["fused"]
    return bool(len(share) == 8 and share.min() > 0.92)


def arms_over(measured: Rows, base: str) -> Rows:
    """Implementations of the small Llama, by speed and memory over one of them."""
    arms = newest_session(of(measured, experiment="step", group="arms", dtype="bfloat16"))
    speed = quotients(arms, "group", base).iloc[0]
    gib = arms.groupby("provider")["whole_gib"].median()
    return pd.DataFrame({"speed": speed, "memory": gib / gib[base]})


def faster_in_less_than_half(measured: Rows) -> bool:
    fused = arms_over(measured, "huggingface").loc["fused"]
    return bool(fused["speed"] > 1.3 and fused["memory"] < 0.5)


def compiled_without_a_mask_is_the_faster(measured: Rows) -> bool:
    """So that `llama/whole-step` speaks of it."""
    over = arms_over(measured, "inductor-causal-loss")["speed"]
    return bool(1 < over["fused"] < 1.05 and over[["inductor", "inductor-causal"]].max() < 1)


def faster_with_few_tokens(measured: Rows) -> bool:
    few = measured.query("experiment == 'step' and group == 'sizes' and tokens <= 2048")
    over = quotients(few, "sequences", "fused")
    others = over.reindex(columns=["inductor-causal", "liger-without-flce-graph"])
    return bool(len(over) == 2 and others.min().min() > 1
                and (over["fused-graph"] > others.max(axis=1)).all())  # fmt: skip


def masked_training_is_slower(measured: Rows) -> bool:
    over = quotients(of(measured, work="training sgd"), "work", "huggingface").iloc[0]
    masked, causal = over[["inductor", "inductor-causal"]]
    return bool(0.55 < masked < 0.65 and 1.2 < causal < 1.35)


def a_lead_at_the_widest(measured: Rows) -> bool:
    wide = of(measured, experiment="time", precision="high", dtype="float32", tokens=64,
              direction="forward")  # fmt: skip
    wide = wide[wide["hidden_size"].isin([512, 16384])]
    over = quotients(wide, ["hidden_size", "launch"], "liger")["all-gradients"].dropna()
    return len(over) == 4 and bool(over.xs("graph", level="launch").between(1, 1.3).all())


def longest_by_adder(measured: Rows) -> Rows:
    core = of(measured, experiment="tensor_core", dtype="fp16")
    core = core[core["k"] == core["k"].max()]
    return core.pivot_table("relative_error", "adds", "distribution", "median")


def core_errs_most_as_the_rule_says(measured: Rows) -> bool:
    error = longest_by_adder(measured)["uniform"]
    others = error.drop(["in the tensor core", "model: align and chop"])
    core = error["in the tensor core"]
    return bool(core > 5 * others.max() and abs(error["model: align and chop"] / core - 1) < 0.03)


def signed_errors_cancel(measured: Rows) -> bool:
    core = of(measured, experiment="tensor_core", adds="in the tensor core")
    error = core.pivot_table("relative_error", ["dtype", "k"], "distribution", "median")
    long = error[error.index.get_level_values("k") >= 4096]
    return len(long) > 9 and bool((long["normal"] < long["uniform"] / 2).all())


def xl_twice_as_long(measured: Rows) -> bool:
    steps = measured.query("provider == 'eager' and attention == 'plain' and model == 'xl' and "
                           "precision == 'bf16 autocast' and context_length == 256")  # fmt: skip
    return bool(1.9 < steps["both_median_ms"].max() / steps["both_median_ms"].min() < 2.1)


SAID += [
    ("1_results/anatomy", "Its result is wrong: the error is as large as the right result", BOTH,
     published_kernel_is_all_wrong),
    ("1_results/anatomy", "In fp32 on both sides Liger's is", BOTH,
     the_format_is_the_larger_part),
    ("1_results/kernels", "fp32 products run on tensor cores, about three and a half times as "
     "fast and more exact", BOTH, three_times_and_more_exact),
    ("1_results/kernels", "If TF32 is enough, one flag makes PyTorch's MLP", BOTH,
     tf32_gains_more_and_loses_digits),
    ("1_results/llama", "One line patches a small Llama: faster, in less than half of its memory",
     BOTH, faster_in_less_than_half),
    ("1_results/llama", "torch.compile with no mask and no logits is nearly as fast", H200,
     compiled_without_a_mask_is_the_faster),
    ("2_skipped_work/anatomy", "Right for one block, wrong from two on", BOTH,
     one_block_right_and_two_wrong),
    ("2_skipped_work/anatomy", "The speed-up is gone once all work is done, in one precision on "
     "both sides", BOTH, slower_in_ieee),
    ("3_fp32/kernels", "at all four, fusedlib's are at least 2.5 times as fast as the ordinary "
     "cores", BOTH, only_split_products_gain),
    ("3_fp32/kernels", "Split products are as exact as fp32 and better; TF32 is faster and loses "
     "two to three digits", BOTH, tf32_gains_more_and_loses_digits),
    ("4_models/llama", "The patched model is faster than the plain one and holds less than half of "
     "its memory", BOTH, faster_in_less_than_half),
    ("4_models/llama", "torch.compile without a mask is faster than fusedlib, and so is a CUDA "
     "graph of Liger without its fused loss. A graph of fusedlib is faster than either", H200,
     faster_with_few_tokens),
    ("8_published/compilers", "With its mask torch.compile's training is slower than eager's", H200,
     masked_training_is_slower),
    ("2_skipped_work/anatomy", "though some lead is left at the narrowest and the widest layer",
     BOTH, a_lead_at_the_widest),
    ("4_models/kernels", "In bf16 an MLP's nine matrix products are nearly all of its time", BOTH,
     mostly_products),
    ("6_adder/precision", "A sum kept in the tensor core errs most, and the rule predicts its "
     "error", BOTH, core_errs_most_as_the_rule_says),
    ("6_adder/precision", "With signed data, as in training, errors cancel in part", BOTH,
     signed_errors_cancel),
    ("7_method/end_to_end", "the same eager step took twice as long in another session", H200,
     xl_twice_as_long),
    ("8_published/anatomy", "wrong by as much as the right ones are large", BOTH,
     second_version_wrong),
]  # fmt: skip


@pytest.mark.parametrize(("study", "words", "machines", "holds"), SAID)
def test_a_comparison_in_words_is_what_the_rows_say(rows, study, words, machines, holds):
    study, _, topic = study.partition("/")
    cells = json.loads(NOTEBOOKS[study].read_text(encoding="utf-8"))["cells"]
    text = " ".join("".join(one["source"]) for one in cells).replace('"', "")
    assert " ".join(words.split()) in " ".join(text.split()), "the sentence is another now"
    for machine in machines:
        of = topic or OF.get(study, study)
        measured = rows(of, machine)
        assert holds(measured), machine
        others = (measured.assign(**worse(measured, order)) for order in orders(measured))
        assert not all(holds(other) for other in others), "the check cannot fail"


def orders(measured: Rows) -> Iterator[np.ndarray]:
    """Rows by their places from the last to the first, in all and in each experiment; and mixed."""
    places = pd.Series(range(len(measured)))
    yield places.to_numpy()[::-1]
    if "experiment" in measured:
        each = places.groupby(measured["experiment"].to_numpy())
        yield each.transform(lambda of_one: of_one.to_numpy()[::-1]).to_numpy()
    yield np.random.default_rng(0).permutation(len(measured))


def worse(measured: Rows, order: np.ndarray) -> dict[str, Any]:
    """Figures in another order: what is said of them is no longer so."""
    figures = ("peak_mib", "reserved_peak_mib", "saved_mib", "median_ms", "power_w",
               "power_after_w", "sm_mhz", "relative_error", "late_loss", "epoch_gate_change",
               "kernels_ms", "busy", "products_ms", "optimizer_ms", "late_ms",
               "changed_fraction", "changed_by_size", "changed_by_place",
               "changed_by_values", "kind", "test_error", "epoch_test_loss",
               "losses",
               "step_median_ms", "step_ms", "extra_ms", "activations_gib",
               "tokens_per_s", "median_low_ms", "median_high_ms", "y_error", "d_w_gate_error",
               "d_w_up_error", "whole_gib", "both_median_ms")  # fmt: skip
    figures = [name for name in figures if name in measured]
    turned = {name: measured[name].to_numpy()[order] for name in figures}
    if "samples_ms" in measured:
        lists = measured["samples_ms"].map(lambda s: s[::-1] if isinstance(s, list) else s)
        turned["samples_ms"] = lists.to_numpy()
    return turned


def test_what_the_limits_say_of_two_sessions_is_in_the_rows():
    text = " ".join(NOTEBOOKS["7_method"].read_text(encoding="utf-8").split())
    assert "AdamW's step over torch.compile without a mask was one to three per cent" in text
    rows = of(load("llama", sessions=True), experiment="step", group="whole", machine="H200")
    over = ratio(rows[rows["provider"].isin(["fused", "inductor-causal"])], of="fused")
    assert sorted(over["ratio"].round(2)) == [1.01, 1.02, 1.03]


def test_what_section_3_says_of_the_mlp_s_leads_is_in_the_rows():
    text = " ".join(NOTEBOOKS["4_models"].read_text(encoding="utf-8").split())
    assert "which moved the loss's lead by a tenth, and at one shape sessions gave 1.03 to" in text
    assert "1.14 times Liger's speed: these leads are no ranking" in text
    assert "QuACK without its search was in all of them, and ahead at two or three; with" in text
    models = load("kernels", sessions=True)
    models = of(models, machine="H200", group="models", direction="forward+backward")
    over = ratio(of(models, launch="python", dtype="bfloat16"), of="fused")
    over["day"] = over["session"].str[:10]
    at = over.pivot_table("ratio", "shape", ["provider", "day"])
    assert sorted(at["liger"].loc["8192·3584·18944"].dropna().round(2)) == [1.03, 1.06, 1.14]
    quack = at["quack"][["2026-11-23", "2026-11-28"]]
    assert quack.notna().all().all() and [*(quack < 1).sum()] == [3, 2]
    assert at["quack-searched"].notna().sum().sum() == 1
    losses = of(load("llama", sessions=True), experiment="loss", vocabulary=128256)
    losses = of(losses, direction="forward+backward", ignored_share=0, machine="H200")
    lead = of(ratio(losses, of="fused"), provider="liger").groupby("set")["ratio"].mean()
    assert 0.85 < lead["2026-11-30-release-d"] / lead["2026-11-30-release-c"] < 0.92


def test_what_the_method_says_of_one_program_in_two_places_is_in_the_rows():
    text = " ".join(NOTEBOOKS["7_method"].read_text(encoding="utf-8").split())
    assert "one program in two places differed by up to twelve per cent" in text
    assert "Since then it differed by less than one, and a lead by two between two races" in text
    every = load("llama", sessions=True)
    again = {}
    for name in ("2026-11-30-release-c", "2026-11-30-release-d"):
        rows = of(every, set=name, status="ok", machine="H200")
        losses = of(rows, experiment="loss", hidden_size=4096)  # all tokens are one chunk in both
        pairs = (of(rows, group="arms"), "fused-again"), (losses, "fused-least")
        again[name] = [
            abs(ratio(twice, of="fused")["ratio"].item() - 1)
            for race, other in pairs
            if len(twice := race[race["provider"].isin(["fused", other])]) == 2
        ]
    rotated, balanced = again.values()
    assert 0.11 < max(rotated) < 0.125 and len(balanced) == 2 and max(balanced) < 0.01
    races = every.query(
        "set == '2026-11-30-release-d' and model == 'Llama-3.2-1B' and "
        "(group == 'arms' or experiment == 'families') and provider in ['fused', 'liger-chunks-32']"
    )
    leads = ratio(races, of="fused")["ratio"]
    assert len(leads) == 2 and 0.015 < leads.max() - leads.min() < 0.025


def test_what_the_limits_say_of_quack_is_in_the_rows():
    text = " ".join(NOTEBOOKS["7_method"].read_text(encoding="utf-8").split())
    beside_ours = "beside this fusedlib, and Liger's MLP in CuTe, at seven of eight shapes"
    assert f"QuACK with its search {beside_ours}" in text
    models = load("kernels", sessions=True)
    models = of(models, group="models", direction="forward+backward", status="ok")
    turns = models.groupby(["shape", "session"])["provider"].agg(set)
    together = turns[turns.map({"fused", "quack-searched", "liger-cute"}.issubset)]
    assert models["shape"].nunique() - together.index.get_level_values("shape").nunique() == 7
    assert "by its defaults was refused at hidden 2,048, nine per cent above our bound" in text
    assert "At 4,096 it raised an error. Four of five settings of cut cross entropy were" in text
    loss = of(load("llama", sessions=True), experiment="loss", vocabulary=128256, machine="H200")
    loss = of(loss, direction="forward+backward", set="2026-11-30-release-c", ignored_share=0)
    default = of(loss, provider="quack-searched").set_index("hidden_size")
    assert default["status"].to_dict() == {2048: "wrong", 4096: "unavailable"}
    wrong = re.search(r"error (\S+), allowed (\S+)", default["reason"][2048])
    assert wrong and round(float(wrong[1]) / float(wrong[2]) - 1, 2) == 0.09
    cut = of(loss, hidden_size=2048)
    cut = cut[cut["provider"].str.startswith("cut")].groupby("status")["provider"].nunique()
    assert cut.to_dict() == {"ok": 1, "wrong": 4}

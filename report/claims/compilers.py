"""What the study claims of compilers."""

import pandas as pd

from press.say import claim
from press.show import published
from study.compilers import from_tables
from study.rows import ratio

TOKEN = "model == 'Llama-2-7B' and experiment == 'generation' and sampler == 'multinomial'"
GRAPHS = f"{TOKEN} and against in ['inductor-graphs', 'inductor-graphs-searched', "
GRAPHS += "'fused-inductor-graphs']"
TWO = "experiment == 'distributed' and processes == 2 and provider in ['inductor-layers', 'fused']"


def call_ms(rows: pd.DataFrame) -> pd.Series:
    """Median time of a call by who runs it."""
    return rows.groupby("provider")["call_ms"].median()


def over_eager(rows: pd.DataFrame) -> pd.Series:
    """How many times as fast each is as the eager model beside it."""
    return ratio(rows, over="huggingface").groupby("provider")["ratio"].median()


@claim(
    "compilers/speed",
    "A compiler pays where the GPU waits for the CPU",
    of=lambda rows: rows.query(f"{TOKEN} and against in ['inductor', 'inductor-graphs']"),
)
def speed(rows: pd.DataFrame) -> tuple[dict, bool]:
    """A token of Llama-2-7B, with a cache of fixed size, takes {eager:3 ms} in eager PyTorch,
    and {inductor:3 ms} under torch.compile beside it. In a CUDA graph it takes {graph:3 ms}."""
    ms = call_ms(rows)
    beside = rows.query("provider == 'huggingface' and against == 'inductor'")
    say = {"inductor": ms["inductor"], "eager": beside["call_ms"].median()}
    say["graph"] = ms["inductor-graphs"]
    return say, say["eager"] > 2 * say["inductor"] > 3 * say["graph"]


@claim("compilers/seed", of=lambda rows: from_tables(published("compilers")))
def seed(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Published, a forward pass is {forward:3×} as fast under Inductor as in eager PyTorch, and 45
    training steps {gain:3×}. With another length in every step they take {inductor:3 s} under
    Inductor, {eager:3 s} in eager PyTorch and {thunder:,d} s under Thunder."""
    s = rows.set_index(["table", "shapes", "method"])["time_s"].sort_index()
    forward, steps = s["1 forward", "not stated"], s["Single-device training"]
    say = steps["dynamic"].to_dict() | {"forward": forward["eager"] / forward["inductor"]}
    say["gain"] = steps["static", "eager"] / steps["static", "inductor"]
    return say, say["inductor"] < say["eager"] < say["thunder"] / 10 and say["gain"] > 1


@claim(
    "compilers/forward",
    of=lambda rows: rows.query(
        "model == 'Llama-2-7B' and experiment == 'forward' "
        "and provider in ['huggingface', 'inductor', 'inductor-causal']"
    ),
)
def forward(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Here a forward pass of Llama-2-7B is {masked:3×} as fast under torch.compile as in eager
    PyTorch, and {causal:3×} where torch.compile is told that attention is causal."""
    over = over_eager(rows)
    say = {"masked": over["inductor"], "causal": over["inductor-causal"]}
    return say, 1.02 < say["masked"] < say["causal"] / 1.02


@claim("compilers/graphs", of=lambda rows: rows.query(GRAPHS))
def graphs(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In a CUDA graph torch.compile takes {graphs:3 ms} a token of Llama-2-7B, and
    {searched:3 ms} after a search for kernels, each in a session of its own."""
    ms = call_ms(rows)
    say = {"graphs": ms["inductor-graphs"], "searched": ms["inductor-graphs-searched"]}
    return say, say["graphs"] > say["searched"] == ms.min()


@claim("compilers/graphs-ours", of=lambda rows: rows.query(GRAPHS))
def graphs_ours(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With fusedlib's operations, in a CUDA graph and without a search, it takes {ours:3 ms}."""
    ms = call_ms(rows)
    ours = ms["fused-inductor-graphs"]
    return {"ours": ours}, ms["inductor-graphs"] > ours > ms["inductor-graphs-searched"]


@claim(
    "compilers/lengths",
    of=lambda rows: rows.query("model == 'open_llama_3b' and experiment == 'dynamic'"),
)
def lengths(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Here eager PyTorch takes {eager:3 s} for {steps:,d} such steps. Plain torch.compile had
    finished {done:,d} when {limit:,d} s were over. Layer by layer torch.compile takes
    {layered:3 s}, with fusedlib's operations {ours:3 s}."""
    by = rows.set_index("provider")
    total, done, limit = by["total_s"], by["done"], by["limit_s"].max()
    say = {"eager": total["huggingface"], "steps": done.max(), "done": done["inductor"]}
    say |= {"layered": total["inductor-layers"], "ours": total["fused-inductor-layers"]}
    stopped = say["done"] < say["steps"]
    holds = say["eager"] < say["ours"] < say["layered"] < limit and stopped
    return say | {"limit": limit}, holds


@claim(
    "compilers/mask",
    of=lambda rows: rows.query(
        "model == 'open_llama_3b' and experiment == 'training' and optimizer == 'sgd' "
        "and against != 'fused-inductor-layers'"
    ),
)
def mask(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Compiled as it comes, Hugging Face's open_llama_3b trains slower: a step takes {slower:3×} as
    long as the eager step beside it, under Thunder {thunder:3×}. Without the mask torch.compile is
    {gain:3×} as fast as eager PyTorch; fusedlib's operations are {fused:3×} as fast uncompiled.
    The peak is {plain:3 GiB} in eager PyTorch, {with_mask:3 GiB} with the mask in a CUDA graph and
    {layered:3 GiB} layer by layer."""
    over, gib = over_eager(rows), rows.groupby("provider")["peak_gib"].median()
    say = {"slower": 1 / over["inductor"], "thunder": 1 / over["thunder"]}
    say |= {"gain": over["inductor-causal"], "fused": over["fused"]}
    say |= {"plain": gib["huggingface"], "with_mask": gib["inductor-graphs"]}
    ours = over[["fused", "fused-inductor", "fused-inductor-graphs"]].min() > say["gain"]
    slower = min(say["slower"], say["thunder"]) > 1.5 and say["gain"] > 1.2
    more = say["with_mask"] > 2 * say["plain"]
    return say | {"layered": gib["inductor-layers"]}, slower and ours and more


@claim("compilers/two-gpus", of=lambda rows: rows.query(f"{TWO} and strategy == 'fsdp2-2'"))
def two_gpus(rows: pd.DataFrame) -> tuple[dict, bool]:
    """On two GPUs, by FSDP2 with weights kept, a step of open_llama_3b takes {fused:3 ms} with
    fusedlib's operations and {layers:3 ms} with Hugging Face's compiled by layer: one run cannot
    tell them apart."""
    ms = rows.set_index("provider")["median_ms"]
    say = {"fused": ms["fused"], "layers": ms["inductor-layers"]}
    return say, abs(say["fused"] / say["layers"] - 1) < 0.02


@claim(
    "compilers/two-gpus-anew",
    of=lambda rows: rows.query(f"{TWO} and strategy == 'fsdp2-3'"),
    first="fusedlib is faster",
)
def two_gpus_anew(rows: pd.DataFrame) -> tuple[dict, bool]:
    """With weights gathered anew they take {fused_anew:3 ms} and {layers_anew:3 ms}. The ranges of
    their steps overlap, so one run cannot tell them apart; fusedlib holds less memory."""
    by = rows.set_index("provider")
    ms, gib = by["median_ms"], by["peak_gib"]
    say = {"fused_anew": ms["fused"], "layers_anew": ms["inductor-layers"]}
    less = 1.2 * gib["fused"] < gib["inductor-layers"]
    overlap = by["p10_ms"].max() < by["p90_ms"].min()  # the middle four fifths of steps
    return say, less and overlap

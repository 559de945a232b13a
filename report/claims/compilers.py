"""What the study claims of compilers."""

import pandas as pd

from press.say import claim

TOKEN = "model == 'Llama-2-7B' and experiment == 'generation' and sampler == 'multinomial'"


def call_ms(rows: pd.DataFrame) -> pd.Series:
    """Median time of a call by who runs it."""
    return rows.groupby("provider")["call_ms"].median()


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

"""What to type: settings by task, and how many times as fast or as small each is in the rows."""

import json
from functools import cache
from typing import Any, Literal, NamedTuple
from urllib.parse import quote

import pandas as pd

from press.columns import ordered_values, read, recorded_machines
from press.formats import MISSING, formatted
from press.origin import older, stated
from study import paths
from study.rows import load, ratio

Task = Literal["training", "inference", "long context", "memory"]
UNRIVALLED = ("products", "copy", "float64")
"""Providers that compute a part of the work: no advice, however fast."""
WHO = ("this setting", "best other", "compiled too")


class Setting(NamedTuple):
    """What to type, and the rows that say what it gives.

    Attributes:
        task, dtype: what a reader chooses by.
        have, write: the situation, and the Markdown of what to type there.
        over_whom: what is one, in words.
        topic, where: the rows of all who are compared, as `query` takes it.
        of, over: values of the column `by`, of the setting and of what is one.
        shown: a notebook, and words of the heading where it is shown.
        sizes: columns that say at which sizes.
        value: what is compared, smaller being better, but for "largest", how many fit.
        by: "provider", whose rows were timed in turns, or a column whose rows were not.
    """

    task: Task
    dtype: str
    have: str
    write: str
    over_whom: str
    topic: str
    where: str
    of: str
    over: str
    shown: tuple[str, str]
    sizes: tuple[str, ...]
    value: str = "median_ms"
    by: str = "provider"


PACKED = "`swiglu_mlp(x, w_gate_up, w_down)`"  # as recorded: gate and up in one matrix
BOTH_PASSES = "direction == 'forward+backward'"
MLP = "experiment == 'race' and dtype == 'bfloat16' and group"
LARGE_FP32 = f"group == 'large fp32' and launch == 'python' and {BOTH_PASSES}"
LLAMA = "experiment == 'step' and dtype == 'bfloat16' and group"
CAUSAL = f"experiment == 'race' and head_dim == 64 and context_length >= 4096 and {BOTH_PASSES}"
HALF = f"{CAUSAL} and dtype == 'bfloat16'"
CHECKPOINT = "experiment == 'checkpoint' and context_length == 2944 and precision == 'bf16'"
LOG_PROBS = (
    "experiment == 'log-probs' and vocabulary == 151936 and hidden_size == 4096 "
    f"and ignored_share == 0 and {BOTH_PASSES}"
)
SHAPE, STEP = ("tokens", "hidden_size"), ("model", "tokens")
CONTEXT = ("context_length", "head_dim")
SIZES = {
    "tokens": "{} tokens", "hidden_size": "hidden {}", "context_length": "{} tokens each",
    "batch_size": "{} sequences", "head_dim": "heads {} wide",
}  # fmt: skip
SETTINGS = (
    Setting(
        "training", "bf16", "a Llama", "`apply_to(model)`", "Hugging Face's",
        "llama", "(experiment == 'step' and group == 'arms' or experiment == 'families') "
        "and dtype == 'bfloat16' and model == 'Llama-3.2-1B'", "fused", "huggingface",
        ("08_model", "What each part gives"), STEP,
    ),
    Setting(
        "training", "bf16", "a Llama, and AdamW", "`apply_to(model)`",
        "Hugging Face's step",
        "llama", f"{LLAMA} == 'whole'", "fused", "huggingface",
        ("08_model", "or nothing"), STEP,
    ),
    Setting(
        "training", "bf16", "a Llama, few tokens", "`apply_to(model)`, and time it",
        "Hugging Face's; torch.compile without a mask gives more",
        "llama", f"{LLAMA} == 'sizes' and tokens <= 2048 and repetitions >= 30", "fused",
        "huggingface",
        ("08_model", "or nothing"), STEP,
    ),
    Setting(
        "training", "bf16", "other families of models", "`apply_to(model)`",
        "Hugging Face's; for Gemma 2 Liger with few chunks, for Phi-3 torch.compile without a mask "
        "takes hardly longer", "llama",
        "experiment == 'families' and model != 'Llama-3.2-1B'", "fused", "huggingface",
        ("08_model", "Other families"), STEP,
    ),
    Setting(
        "training", "bf16", "two GPUs, FSDP2", "`apply_to(model)` before `fully_shard`",
        "Hugging Face's, hours earlier; gradients, or weights too, sharded",
        "compilers",
        "work in ['distributed fsdp2-2', 'distributed fsdp2-3'] and processes == 2",
        "fused", "huggingface", ("08_model", "or nothing"), ("model",),
    ),
    Setting(
        "training", "bf16", "log-probabilities, as for GRPO", "`linear_log_probs(x, w, targets)`",
        "TRL's, vocabulary 151,936; the compiled formula takes less time and more memory", "llama",
        LOG_PROBS, "fused", "trl", ("08_model", "Log-probabilities"), SHAPE,
    ),
    Setting(
        "training", "bf16", "a Llama whose bits depend on the batch", "`with batch_invariant():`",
        "the patched model outside of it: what it costs", "llama", "group == 'invariant'",
        "fused-invariant", "fused", ("08_model", "Log-probabilities"), STEP,
    ),
    Setting(
        "training", "bf16", "a SwiGLU MLP, many tokens", PACKED,
        "PyTorch's MLP", "kernels",
        f"{MLP} == 'models' and launch == 'python' and {BOTH_PASSES}",
        "fused", "eager", ("01_kernel", "Beside the library"), SHAPE,
    ),
    Setting(
        "training", "bf16", "a SwiGLU MLP, few tokens", PACKED, "PyTorch's MLP", "kernels",
        f"{MLP} == 'sweep' and hidden_size <= 4096 and launch == 'python' and {BOTH_PASSES}",
        "fused", "eager", ("03_clock", "Who sets the pace?"), SHAPE,
    ),
    Setting(
        "training", "bf16", "autocast, and the GPU waits", "`compile(model)`",
        "the eager step; of 2.7b the GPU does not wait", "end_to_end",
        "experiment == 'model' and precision == 'bf16 autocast' and model != '2.7b' and "
        "context_length == 256 and attention == 'plain'",
        "inductor", "eager", ("03_clock", "Whole models"), ("model", "context_length"),
        "step_median_ms",
    ),
    Setting(
        "training", "fp32", "AdamW's update", "`AdamW(parameters, fused=True)`",
        "the default, `foreach`",
        "end_to_end", "experiment == 'optimizer' and model == '2.7b'", "fused", "foreach",
        ("04_memory", "A whole step"), ("model",), "optimizer_median_ms", "optimizer",
    ),
    Setting(
        "training", "fp32", "a large model, and bf16 will do",
        '`with autocast("cuda", bfloat16):`', "the step in fp32, without TF32", "end_to_end",
        "experiment == 'step' and attention == 'plain' and model in ['large', 'xl', '2.7b'] "
        "and context_length == 256",
        "bf16 autocast", "fp32", ("03_clock", "Whole models"), ("model", "context_length"),
        "step_median_ms", "precision",
    ),
    Setting(
        "training", "fp32", "large MLPs, and TF32 will do",
        '`set_float32_matmul_precision("high")`', 'PyTorch\'s at "highest"', "kernels",
        f"{LARGE_FP32} and provider == 'eager'", "high", "highest",
        ("05_precision", "What may torch round"), SHAPE, "median_ms", "precision",
    ),
    Setting(
        "training", "fp32", "large MLPs, and fp32 must stay", PACKED,
        "PyTorch's MLP", "kernels", f"{LARGE_FP32} and precision == 'highest'", "fused", "eager",
        ("05_precision", "fp32 products"), SHAPE,
    ),
    Setting(
        "inference", "bf16", "a Llama, one token at a time",
        '`compile(model, mode="max-autotune")`, and a static cache',
        "Hugging Face's, the median of its sessions", "compilers",
        "work == 'inference'", "inductor-graphs-searched", "huggingface",
        ("07_compilers", "After how many calls"), ("model",),
    ),
    Setting(
        "inference", "bf16", "a Llama, whole sequences", "`apply_to(model)`",
        "Hugging Face's, the median of its sessions",
        "compilers", "work == 'forward'", "fused", "huggingface",
        ("07_compilers", "After how many calls"), ("model", "context_length"),
    ),
    Setting(
        "inference", "bf16", "a SwiGLU MLP, forward alone", PACKED,
        "PyTorch's MLP", "kernels",
        f"{MLP} == 'models' and launch == 'python' and direction == 'forward'",
        "fused", "eager", ("01_kernel", "Beside the library"), SHAPE,
    ),
    Setting(
        "long context", "bf16", "attention of your own lines",
        "`SDPA(q, k, v, is_causal=True)`",
        "plain attention (SDPA by cuDNN), from Python", "attention",
        f"{HALF} and grid == 'course'",
        "cudnn", "plain", ("06_attention", "Time"), CONTEXT,
    ),
    Setting(
        "long context", "bf16", "SDPA's flash, to 8,192 tokens",
        "`with sdpa_kernel(CUDNN_ATTENTION):`", "SDPA's flash, from Python",
        "attention", f"{HALF} and context_length <= 8192", "cudnn", "flash",
        ("06_attention", "Time"), CONTEXT,
    ),
    Setting(
        "long context", "bf16", "SDPA's flash, from 16,384 tokens",
        "`flash_attn.cute`'s FlashAttention-4", "SDPA's flash, from Python",
        "attention", f"{HALF} and context_length >= 16384", "flash-4", "flash",
        ("06_attention", "Time"), CONTEXT,
    ),
    Setting(
        "long context", "bf16", "SDPA with a causal mask as a tensor",
        "`is_causal=True`, no mask", "the mask tensor, from Python", "attention",
        "experiment == 'call' and launch == 'python'", "causal-flag", "mask-tensor",
        ("06_attention", "Which kernel runs?"), CONTEXT,
    ),
    Setting(
        "long context", "fp32", "attention in fp32",
        "`SDPA(q, k, v, is_causal=True)`",
        "plain attention (SDPA by *efficient*), from Python", "attention",
        f"{CAUSAL} and dtype == 'float32' and grid == 'course'",
        "efficient", "plain", ("06_attention", "Time"), CONTEXT,
    ),
    Setting(
        "memory", "bf16", "no memory for another sequence", "`apply_to(model)`",
        "Hugging Face's, in sequences that fit", "llama",
        "experiment == 'limit' and grows == 'batch'", "fused", "huggingface",
        ("08_model", "What a layer keeps"), ("model", "context_length"), "largest",
    ),
    Setting(
        "memory", "bf16", "log-probabilities, as for GRPO", "`linear_log_probs(x, w, targets)`",
        "TRL's peak, vocabulary 151,936", "llama", LOG_PROBS, "fused", "trl",
        ("08_model", "Log-probabilities"), SHAPE, "peak_mib",
    ),
    Setting(
        "memory", "bf16", "a deep stack of MLPs", '`SwiGLUMLP(hidden, inner, save="input")`',
        "PyTorch's memory a layer; two of its products run again, untimed", "memory",
        "experiment == 'stack' and held and layers == 16 and dtype == 'bfloat16'",
        "fused-input", "eager", ("04_memory", "Stacks"), SHAPE, "layer_mib",
    ),
    Setting(
        "memory", "bf16", "activations that do not fit",
        "`checkpoint(block, x, use_reentrant=False)`, every block",
        "what is held without, weights and gradients aside; a third more time",
        "model_memory", CHECKPOINT,
        "segments 1", "none 0", ("04_memory", "Checkpoints"), ("model", "context_length"),
        "peak_gib",
    ),
)  # fmt: skip


def setting(have: str, task: str) -> Setting:
    """The setting of a line of the table, by its first two columns."""
    [one] = [one for one in SETTINGS if (one.have, one.task) == (have, task)]
    return one


def compared(one: Setting) -> pd.DataFrame:
    """A row a case and who is compared: `ratio`, times as fast or as small as `one.over`.

    Compilers had a session each, with a baseline that drifts: there all are beside the median of
    baselines. Of a column that is not the provider the newest set of recordings that has both
    values counts, and its times are divided.
    """
    if one.by == "provider":
        known = load(one.topic).query(one.where)
        rows = ratio(known, over=one.over, value=one.value)
        if one.topic == "compilers":
            keys = ["machine", "work"]
            base = known[known["provider"] == one.over].groupby(keys)["call_ms"].median()
            rows = rows.join(base.rename("base_ms"), on=keys)
            return rows.assign(ratio=rows["base_ms"] / rows["call_ms"])
        return rows.assign(ratio=1 / rows["ratio"]) if one.value == "largest" else rows
    rows = load(one.topic, sessions=True).query(f"({one.where}) and status == 'ok'")
    keys = ["machine", *one.sizes, "shape"] if "shape" in rows else ["machine", *one.sizes]
    ends = rows.assign(last=rows["measured_at"]).pivot_table("last", "set", one.by, "max")
    wide = rows.pivot_table(one.value, [*keys, "set"], one.by, "median")[[one.of, one.over]]
    wide = wide.set_axis(["of", "over"], axis=1).dropna().reset_index()
    wide = wide.assign(last=wide["set"].map(ends[one.of])).sort_values("last")
    wide = wide.drop_duplicates(keys, keep="last")
    wide = wide.join(rows.groupby("set")[["began", "commit"]].min(), on="set")
    return wide.assign(ratio=wide["over"] / wide["of"], provider=one.of)


def _best(rows: pd.DataFrame, one: Setting, who: str) -> pd.DataFrame:
    """A machine's rows of the best that has every case of the setting: of the others, or of
    fusedlib's operations under a compiler ("compiled too"). Its own variants are none of them.
    """
    if rows.empty:
        return rows
    fields = [name for name in (*one.sizes, "shape", "head_dim", "work", "strategy")
              if name in rows and rows[name].notna().any()]  # fmt: skip
    case = rows[list(dict.fromkeys(fields))].astype(str).agg(" ".join, axis=1)
    name, ours = rows["provider"].astype(str), rows["provider"] == one.of
    compiled, variant = name.str.startswith("fused-inductor"), name.str.startswith("fused-")
    own = variant | (name.eq("fused") & one.of.startswith("fused"))
    others = ~(own | name.isin(UNRIVALLED))
    theirs = rows[(compiled if who == "compiled too" else others) & ~ours & case.isin(case[ours])]
    each = theirs["ratio"].groupby(theirs["provider"].astype(str)).agg(["size", "median"])
    complete = each.loc[each["size"] == ours.sum(), "median"]
    return theirs[theirs["provider"] == complete.idxmax()] if len(complete) else rows[:0]


@cache
def factors() -> pd.DataFrame:
    """Every setting on every recorded machine: what it gives, and the best of the others.

    Columns: those of `Setting`, `machine`, `who` (one of `WHO`), `provider`, `factor`, the median
    over `cases`, its ends `low` and `high`, `absolute`, ms or how many fit where there is one case,
    `old`, whether its rows are of another fusedlib than this, `rows`, which they are, and `at`, the
    sizes in words. A setting that a machine has not measured has a line without a factor.
    """
    lines = []
    for one in SETTINGS:
        rows = compared(one)
        ours = rows[rows["provider"] == one.of]
        for machine in ordered_values("machine", recorded_machines()):
            there = rows[rows["machine"] == machine]
            found = {WHO[0]: ours[ours["machine"] == machine]}
            if one.by == "provider":
                found |= {who: _best(there, one, who) for who in WHO[1:]}
            for who, given in found.items():
                speed = given["ratio"]
                if len(given) or who == WHO[0]:
                    name = given["provider"].iloc[0] if len(given) else one.of
                    ends = {"low": speed.min(), "factor": speed.median(), "high": speed.max()}
                    lines.append(
                        one._asdict() | {"machine": machine, "who": who, "provider": name}
                        | ends | {"cases": len(given), "at": _at(ours, one.sizes)}
                        | {"absolute": _absolute(given, one), "old": older(given)}
                        | {"rows": given[["machine", "began", "commit"]]}
                    )  # fmt: skip
    return pd.DataFrame(lines)


def _absolute(rows: pd.DataFrame, one: Setting) -> str:
    """What a single row measured, in words."""
    if len(rows) != 1 or one.by != "provider":
        return ""
    row = rows.iloc[0]
    if one.value == "largest":
        return f"{row['largest']:,.0f} fit"
    ms = row["call_ms"] if "call_ms" in rows else row[one.value]
    return formatted(ms, "3 ms") if one.value.endswith("median_ms") else ""


def _at(rows: pd.DataFrame, sizes: tuple[str, ...]) -> str:
    """The sizes of some rows in words."""
    said = []
    for name in sizes:
        values = sorted(rows[name].dropna().unique(), key=str)
        if values and isinstance(values[0], str):
            said.append(values[0] if len(values) == 1 else f"{len(values)} {name}s")
        elif values:
            said.append(SIZES[name].format(formatted((min(values), max(values)), ",d")))
    return ", ".join(said)


def chosen(card: str = "both", dtype: str = "any", task: str = "all") -> pd.DataFrame:
    """The lines of `factors` for a card, a dtype and a task."""
    rows = factors()
    for name, value, every in (("machine", card, "both"), ("dtype", dtype, "any"),
                               ("task", task, "all")):  # fmt: skip
        rows = rows[rows[name] == value] if value != every else rows
    return rows


def lines(rows: pd.DataFrame) -> pd.DataFrame:
    """The lines of `factors` in words: situation, baseline, what to type, and each card.

    A star at a factor: rows of another fusedlib, whose days stand in `attrs`.
    """
    said = []
    for _, line in rows.groupby(["task", "have"], sort=False):
        one = line[line["who"] == WHO[0]]
        first = one.iloc[0]
        ends = {
            card: _short(own.iloc[0], one["cases"].max()) for card, own in one.groupby("machine")
        }
        have, over = first["have"], f"{first['over_whom']}; {first['dtype']}, {first['at']}"
        typed, over = (text.replace("`", "").replace("*", "") for text in (first["write"], over))
        cards = {card: ends[card] for card in ordered_values("machine", ends)}
        said.append({"you have": have, "baseline": over, "type": typed, **cards})
    table, old = pd.DataFrame(said), rows[rows["old"] & (rows["who"] == WHO[0])]
    table.attrs = {"of": stated(pd.concat([rows["rows"].iloc[0][:0], *old["rows"]]))}
    return table


def table(rows: pd.DataFrame) -> Any:
    """The lines of `factors` as a table for a notebook, with links into the others."""
    from IPython.display import Markdown

    if rows.empty:
        return Markdown("*No line has this card, dtype and task.*")
    cards = list(rows["machine"].unique())
    heads = ["you have", "type", *cards, "times as fast, or as small, as", "shown in"]
    said = []
    for task, lines in rows.groupby("task", sort=False):
        body = [heads, [":--"] * len(heads)]
        for have, line in lines.groupby("have", sort=False):
            one = line.iloc[0]
            most = factors().query("have == @have and task == @task")["cases"].max()
            given = [_cell(line[line["machine"] == card], most) for card in cards]
            over = f"{one['over_whom']}; {one['dtype']}, {one['at']}"
            body.append([have, one["write"], *given, over, _link(*one["shown"])])
        drawn = "\n".join(f"| {' | '.join(cells)} |" for cells in body)
        said.append(f"**{str(task).capitalize()}**\n\n{drawn}")
    return Markdown("\n\n".join(said))


def _short(line: pd.Series, most: int) -> str:
    """What a setting gives on a card; a star says that the rows are of another fusedlib."""
    if pd.isna(line["factor"]):
        return MISSING
    few = f", {line['cases']} of {most}" if line["cases"] < most else ""
    return formatted((line["low"], line["high"]), "3×") + "*" * bool(line["old"]) + few


def _cell(line: pd.DataFrame, most: int) -> str:
    """What a setting gives on a card, then the others."""
    said = []
    for one in line.dropna(subset=["factor"]).to_dict("records"):
        text = formatted((one["low"], one["high"]), "3×")
        own = one["who"] == WHO[0]
        few = f"{one['cases']} of {most} sizes" if own and one["cases"] < most else ""
        old = "older rows" if one["old"] else ""
        text = ", ".join(filter(None, [text, one["absolute"], few, old]))
        said.append(text if own else f"{read('provider', one['provider'])} {text}")
    return " · ".join(said) or MISSING


def _link(name: str, words: str) -> str:
    """A link to the heading with these words in a notebook."""
    cells = json.loads((paths.NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    lines = (line for cell in cells if cell["cell_type"] == "markdown" for line in cell["source"])
    heads = [line.strip("# \n") for line in lines if line.startswith("## ")]
    head = next((head for head in heads if words in head), "")
    at = f"#{quote(head.replace(' ', '-'))}" if head else ""
    number = f", {head.partition('.')[0]}" if head[:1].isdigit() else ""
    return f"[{name[:2]}{number}]({name}.ipynb{at})"

"""What the study claims of whole training steps."""

import pandas as pd

from press.say import claim
from press.show import published
from study.end_to_end import BOTH, SHEETS, by_section, from_tables
from study.rows import ratio

MLPS = "experiment == 'mlp' and attention == 'plain'"


def gains(rows: pd.DataFrame, *sections: str) -> pd.DataFrame:
    """How many times as fast as eager PyTorch each is in these sections of the step."""
    return ratio(by_section(rows).query("section in @sections"), over="eager")


@claim(
    "end_to_end/mlp",
    "In fp32 a faster MLP speeds up the whole step of a large model",
    of=lambda rows: rows.query(f"{MLPS} and precision == 'fp32' and model in ['medium', '2.7b']"),
)
def mlp(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In IEEE fp32 (context 256) forward and backward of `2.7b` run {fp32:3×} as fast with
    fusedlib's MLP as with PyTorch's, more than with any other's, and a whole step {step:3×}. A
    step of `medium` takes {medium:2%} longer."""
    by = gains(rows, BOTH, "step").pivot_table("ratio", ["section", "model"], "provider")
    large, medium = by.loc[BOTH, "2.7b"], by.loc["step", "medium"]["fused"]
    step, others = by.loc["step", "2.7b"]["fused"], large.drop("fused").max()
    say = {"fp32": large["fused"], "step": step, "medium": 1 / medium - 1}
    return say, large["fused"] > max(1.6, 1.02 * others) and step > 1.3 and medium < 0.98


@claim("end_to_end/published-peak", of=lambda rows: from_tables(published("end_to_end")))
def published_peak(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Published, the compiled forward pass of `2.7b` without autocast takes {forward:3 ms}. At the
    FLOPs of its products this is {over:3×} the peak of fp32 products on the data sheet of its GPU.
    The compiled backward pass of `medium` takes {artefact:3 ms}, {backward:3×} as fast as the
    eager one."""
    fp32 = rows.query("precision == 'fp32' and not host")
    ms = fp32.set_index(["model", "execution", "section"])["median_ms"]
    flops = fp32.set_index("model")["flops"]["2.7b"].iloc[0] / 3  # a forward pass is a third
    forward = ms["2.7b", "inductor", "forward"]
    artefact, eager = (ms["medium", how, "backward"] for how in ("inductor", "eager"))
    over = flops / (forward / 1e3) / SHEETS["RTX PRO 6000"]["fp32"]
    say = {"forward": forward, "over": over, "artefact": artefact, "backward": eager / artefact}
    return say, over > 1 and eager > 50 * artefact


@claim(
    "end_to_end/repaid",
    of=lambda rows: rows.query("experiment == 'model' and provider != 'linear'"),
)
def repaid(rows: pd.DataFrame) -> tuple[dict, bool]:
    """Compiled as a whole, a step of `small` to `2.7b` at context 256 is {fp32:3×} as fast as the
    eager step beside it in fp32, and {cast:3×} under autocast. Compiling is repaid after {late:,d}
    steps in fp32, and after {steps:,d} under autocast."""
    steps = gains(rows, "step").set_index(["precision", "model"])
    by = steps.groupby("precision")[["ratio", "repaid"]].agg(["min", "max"])
    say = {
        name: tuple(by.loc[precision, figure])
        for name, figure, precision in (
            ("fp32", "ratio", "fp32"), ("cast", "ratio", "bf16 autocast"),
            ("late", "repaid", "fp32"), ("steps", "repaid", "bf16 autocast"),
        )
    }  # fmt: skip
    more = (steps["ratio"]["bf16 autocast"] > steps["ratio"]["fp32"]).all()
    return say, more and say["fp32"][0] > 1 and say["steps"][1] < say["late"][1]


@claim(
    "end_to_end/mlp-half",
    of=lambda rows: rows.query(f"{MLPS} and precision != 'fp32' and model == '2.7b'"),
)
def mlp_half(rows: pd.DataFrame) -> tuple[dict, bool]:
    """At context 1,024 forward and backward of `2.7b` run {bf16:3×} as fast with fusedlib's MLP as
    with PyTorch's in bf16, at least 1 % faster than with any other, and {cast:3×} under autocast,
    where torch.compile's MLP is as fast."""
    by = gains(rows, BOTH).pivot_table("ratio", "precision", "provider")
    half, cast = (by.reindex([precision]).iloc[0] for precision in ("bf16", "bf16 autocast"))
    ahead = half["fused"] >= 1.01 * half.drop("fused").max() and half["fused"] > 1.02
    alike = cast["fused"] > 1.02 and abs(cast["inductor"] - cast["fused"]) < 0.01
    return {"bf16": half["fused"], "cast": cast["fused"]}, ahead and alike


@claim(
    "end_to_end/mlp-memory",
    of=lambda rows: rows.query(f"{MLPS} and precision in ['fp32', 'bf16'] and model == '2.7b'"),
    repeats="counted",
)
def mlp_memory(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In bf16 forward and backward of `2.7b` hold {less:2 GiB} less with fusedlib's MLP than with
    PyTorch's, and {liger:2 GiB} less than with Liger's. In fp32 fusedlib's MLP holds no less:
    {fp32:3 GiB} where PyTorch's holds {fp32_eager:3 GiB}."""
    by = rows.pivot_table("held_gib", "precision", "provider")
    half, fp32 = by.loc["bf16"], by.loc["fp32"]
    say = {"less": half["eager"] - half["fused"], "liger": half["liger"] - half["fused"]}
    say |= {"fp32": fp32["fused"], "fp32_eager": fp32["eager"]}
    least = half["fused"] < 0.95 * half.drop("fused").min()
    return say, least and 0.99 < say["fp32"] / say["fp32_eager"] < 1.05


@claim(
    "end_to_end/energy",
    of=lambda rows: rows.query("experiment == 'sustained' and precision == 'fp32'"),
)
def energy(rows: pd.DataFrame) -> tuple[dict, bool]:
    """In sustained training steps of `2.7b` in fp32 (context 256) a token costs {ours:3 mJ} with
    fusedlib's MLP and {eager:3 mJ} with PyTorch's, while the GPU draws {our_power:3 W} instead of
    {power:3 W}."""
    by = rows.groupby("provider")[["token_mj", "median_ms", "power_w"]].median()
    eager, ours = by.loc["eager"], by.loc["fused"]
    less, time = ours["token_mj"] / eager["token_mj"], ours["median_ms"] / eager["median_ms"]
    say = {"ours": ours["token_mj"], "eager": eager["token_mj"]}
    say |= {"our_power": ours["power_w"], "power": eager["power_w"]}
    return say, less < 0.7 and time < 0.65 and say["our_power"] > say["power"]


@claim(
    "end_to_end/optimizer",
    of=lambda rows: rows.query("model == '2.7b' and optimizer in ['foreach', 'fused']"),
)
def optimizer(rows: pd.DataFrame) -> tuple[dict, bool]:
    """AdamW on the fp32 weights of `2.7b` takes {fused:3 ms} and no temporary memory with `fused`,
    where it takes {foreach:3 ms} and {moment:3 GiB} with `foreach`. At the rate of a copy of 64
    MiB, which is below the memory's full rate and no bound, its bytes take {copy:3 ms}."""
    ms, gib = (rows.set_index("optimizer")[n] for n in ("optimizer_median_ms", "transient_gib"))
    say = {"foreach": ms["foreach"], "moment": gib["foreach"], "fused": ms["fused"]}
    say["copy"] = rows["copy_ms"].median()
    return say, ms["fused"] < 0.5 * ms["foreach"] and gib["fused"] < 0.01 * gib["foreach"]

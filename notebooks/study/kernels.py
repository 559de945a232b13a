"""The SwiGLU MLP alone: in turns, under load, and at lengths that change.

`group` says what a shape is: of models, of those that our tiles were tuned on, large ones in fp32,
or of the published grid and sweep. `launch` is "python" or "graph" where entrants take turns, and
"sustained" where each works alone for a second at the card's power limit.
"""

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

import pandas as pd

from fusedlib.bench.attempt import Unavailable
from fusedlib.bench.turns import LAUNCHES
from study import lengths, mlp, rivals, roofline
from study.cases import Case, Row, device_of, grid
from study.mlp import SwiGLUProblem
from study.race import each, loaded, timed
from study.run import sized
from study.settings import DIRECTIONS

QUICK: dict[str, Any] = {
    "device": "auto",  # cuda, cpu, or auto for the best there is
    "rivals": ["all"],  # who is measured: names of study.mlp, or all
    "models": ["64·128·384"],  # tokens·hidden·intermediate of real models, bf16
    "tuned": [],  # the same that our tiles were tuned on
    "also": [],  # who else runs at both
    "searched": [],  # those of them where torch.compile searches too, for a minute each
    "under_load": ["all"],  # who also runs sustained, at both lists of shapes
    "load_seconds": 1.0,  # of a sustained measurement, after heating
    "large_fp32": [],  # shapes in fp32, at both settings of torch's products
    "also_fp32": [],  # who else runs at them
    "sweep_tokens": 16,  # of the sweep over widths
    "sweep_widths": [64, 256],  # hidden = intermediate, fp32 and each of half_dtypes
    "half_dtypes": [],  # half-precision dtypes of the sweep
    "changing": ["eager", "fused"],  # who meets new lengths; light: all that need no compiler
    "lengths_bf16": 5,  # how many random lengths
    "longest": 40,  # tokens of the longest one possible
    "lengths_hidden": 128,
    "lengths_intermediate": 384,
    "repetitions": 5,  # rounds of each race, at least two
}
# No tile was tuned on the shapes of `models`; `MODELS` says whose they are.
FULL: dict[str, Any] = QUICK | {
    "rivals": ["all", "liger-cute", "fused-pair"],
    "models": ["8192·3584·18944", "4096·5120·13824", "8192·3072·8192", "8192·2048·5632",
               "4096·4096·12288", "2048·7168·20480", "4096·5120·17920", "16384·1536·8960"],
    "tuned": ["8192·4096·14336", "4096·4096·11008", "16384·2048·8192", "4096·8192·28672"],
    "also": ["liger-mlp", "quack-recompute", "liger-packed", "eager-packed", "inductor-packed"],
    "searched": ["8192·3584·18944", "4096·5120·13824", "8192·3072·8192"],
    "also_fp32": ["triton-tf32x3", "triton-tf32x3-searched"],
    "large_fp32": ["1024·4096·4096", "4096·4096·4096", "1024·3072·8192", "2048·2560·10240"],
    "sweep_tokens": 64, "sweep_widths": [512, 1024, 2048, 4096, 8192, 16384, 32768],
    "half_dtypes": ["bfloat16"],
    "under_load": ["fused", "fused-pair", "liger", "liger-cute", "liger-packed", "quack",
                   "quack-searched", "products"],
    "load_seconds": 0.7,
    "changing": ["light"], "lengths_bf16": 70, "longest": 6000, "lengths_hidden": 2048,
    "lengths_intermediate": 5632, "repetitions": 15,
}  # fmt: skip
PROFILES = {"quick": QUICK, "full": FULL}
BOTH_WAYS = ("forward", "forward+backward")
GRAPH_WIDTH = 16_384  # of the widest layer of the sweep that is also captured in a graph


def cases(profile: str = "quick", **sizes: Any) -> list[dict[str, Any]]:
    """What is measured: races in turns and under load, and changing lengths."""
    s = sized(PROFILES, profile, sizes)
    device = device_of(s.device)
    rest = {"device": device, "repetitions": s.repetitions}
    listed: list[dict[str, Any]] = []
    groups = [("models", s.models), ("tuned", s.tuned)]
    for group, shapes in groups:
        half: dict[str, Any] = {"group": group, "dtype": "bfloat16", "directions": BOTH_WAYS}
        for shape in shapes:
            names = [*s.rivals, *s.also, *["inductor-searched"] * (shape in s.searched)]
            listed += races([shape], names, **half, **rest)
    for precision in ("highest", "high"):
        listed += races(
            s.large_fp32, [*s.rivals, *s.also_fp32], group="large fp32", dtype="float32",
            precision=precision, directions=BOTH_WAYS, **rest,
        )  # fmt: skip
    for dtype in ["float32", *s.half_dtypes]:
        for width in s.sweep_widths:
            listed += races(
                [(s.sweep_tokens, width, width)], s.rivals, group="sweep", dtype=dtype,
                directions=BOTH_WAYS, launches=LAUNCHES if width <= GRAPH_WIDTH else LAUNCHES[:1],
                **rest,
            )  # fmt: skip
    for group, shapes in groups:
        load = races(
            shapes, s.under_load, group=group, dtype="bfloat16", directions=BOTH_WAYS,
            device=device, repetitions=1,
        )  # fmt: skip
        for number in (1, 2):  # the second round in the opposite order: drift hits all alike
            listed += [
                case | {"experiment": "sustained", "launch": "sustained", "round": number,
                        "seconds": s.load_seconds}
                for case in (load if number == 1 else load[::-1])
            ]  # fmt: skip
    return listed + lengths.listed(
        s.changing, lengths=s.lengths_bf16, most=s.longest, dtype="bfloat16", device=device,
        hidden_size=s.lengths_hidden, intermediate_size=s.lengths_intermediate,
    )  # fmt: skip


def races(
    shapes: Iterable[str | tuple[int, int, int]], names: Sequence[str], *, group: str, dtype: str,
    device: str, repetitions: int, precision: str = "highest",
    launches: Sequence[str] = LAUNCHES[:1], directions: Sequence[str] = DIRECTIONS,
) -> list[dict[str, Any]]:  # fmt: skip
    """A case a shape, direction, launch and rival; a backward alone is in no graph."""
    every = grid(
        {"experiment": "race", "group": group, "device": device, "repetitions": repetitions},
        problem=[
            SwiGLUProblem(*mlp.sizes(shape), dtype, direction, precision).fields()
            for shape in shapes for direction in directions
        ],
        launch=launches, provider=rivals.chosen(mlp.TASK, names),
    )  # fmt: skip
    return [c for c in every if c["launch"] == "python" or c["direction"] != "backward"]


def measure(race: list[Case]) -> list[Row]:
    """A row a case: times in turns or under load, or the calls of each length."""
    experiment = race[0]["experiment"]
    if experiment == "lengths":
        return each(race, lengths.calls)
    how: dict[str, Any] = {
        "same": ("tokens", "hidden_size", "intermediate_size", "dtype", "precision", "device"),
        "available": available, "work": mlp.work,
        "settings": lambda case: roofline.precision_of(case["precision"]),
    }  # fmt: skip
    if experiment == "sustained":
        return loaded(race, mlp.Setup, **how)
    return timed(race, mlp.Setup, rounds=int(race[0]["repetitions"]), **how)


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, before anything is drawn."""
    if case.get("launch") == "sustained" and not case["device"].startswith("cuda"):
        raise Unavailable("sustained runs need a CUDA GPU")
    mlp.available(case)


SHAPE = ["tokens", "hidden_size", "intermediate_size"]
MODELS = {
    "8192·3584·18944": "Qwen2.5-7B", "4096·5120·13824": "Llama-2-13B",
    "8192·3072·8192": "Llama-3.2-3B", "8192·2048·5632": "TinyLlama",
    "4096·4096·12288": "Qwen3-8B", "2048·7168·20480": "Yi-34B", "4096·5120·17920": "Phi-4",
    "16384·1536·8960": "Qwen2.5-1.5B", "8192·4096·14336": "Mistral-7B",
    "4096·4096·11008": "Llama-2-7B", "16384·2048·8192": "Llama-3.2-1B",
    "4096·8192·28672": "Llama-3-70B",
}  # fmt: skip
"""Whose MLP a shape is: tokens, hidden size and intermediate size, joined by dots."""


def derive(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows with `shape` and `model`, `layout` of gate and up, `tflops` of the products, and
    `new_length_ms`, the first call of a length less the second, the median over calls that compiled
    nothing.
    """
    packed = rows["provider"].isin(rivals.names(mlp.TASK, "packed"))
    used = [*SHAPE, "flops", "median_ms", "first_ms", "second_ms", "made"]
    rows = rows.reindex(columns=list(dict.fromkeys([*rows.columns, *used])))
    parts = [pd.to_numeric(rows[name], errors="coerce") for name in SHAPE]
    shapes = ["·".join(f"{n:.0f}" for n in sizes) for sizes in zip(*parts, strict=True)]
    lengths = rows[["first_ms", "second_ms", "made"]].itertuples(index=False, name=None)
    return rows.assign(
        layout=packed.map({True: "one weight", False: "two weights"}), shape=shapes,
        model=[MODELS.get(shape, shape) for shape in shapes],
        tflops=rows["flops"].astype(float) / rows["median_ms"].astype(float) / 1e9,
        new_length_ms=[_above_second(*each) for each in lengths],
    )  # fmt: skip


def _above_second(first: Any, second: Any, compiled: Any) -> float | None:
    if not isinstance(first, list):
        return None
    calls = zip(first, second, compiled, strict=True)
    return median([a - b for a, b, kernels in calls if not kernels] or [float("nan")])

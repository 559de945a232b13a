"""Rows of a study as those of a topic: python tools/convert_rows.py kernels. Once a topic; it goes
with issue 66.

    report/results/<machine>/<recording>/03_kernels.jsonl  →  report/results/<machine>/kernels.jsonl
    report/results/<machine>/<recording>/machine.json      →  report/results/recordings.jsonl

A row keeps all it has and its old id; no row is dropped. Its recording is the last run that began
before it was measured.
"""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "notebooks")]
from study import rows as study_rows  # noqa: E402

RESULTS = ROOT / "report" / "results"
HEAD = ("race", "provider", "recording", "session", "measured_at", "took_s", "status", "reason")
MLP = ("tokens", "hidden_size", "intermediate_size", "dtype")
PROBLEM = ("experiment", "group", *MLP, "precision", "direction", "weight_gradients", "launch")
IMAGES = ("train_images", "test_images", "width", "device", "batch_size")
TRAINING = (
    "experiment", "attention", "inference", "device", "batch_size", "context_length", "model",
    "precision",
)  # fmt: skip
FIELDS = {
    "kernels": {
        "swiglu": (*PROBLEM, "device"),
        "sustained": (*PROBLEM, "round", "device"),
        "ceiling": ("experiment", "ceiling", "size", "dtype", "precision", "device"),
        "lengths": ("experiment", "direction", "lengths", "most", "hidden_size",
                    "intermediate_size", "dtype", "warmed", "device"),
    },
    "warmup": dict.fromkeys(
        ("steps", "stages", "calls", "compilation"),
        ("experiment", "isolation", "steps", "together", "context_length", "batch_size", "dtype",
         "attention", "device", "direction", "process", "model"),
    ),
    "profile": dict.fromkeys(
        ("step", "profile"),
        ("experiment", "batch_size", "attention", "device", "context_length", "precision",
         "model"),
    ),
    "anatomy": dict.fromkeys(
        ("errors", "peak", "time"),
        ("experiment", *MLP, "precision", "direction", "weight_gradients", "launch", "device"),
    ),
    "precision": dict.fromkeys(
        ("autocast", "autocast_model", "dots", "four_sums", "growth", "stagnation", "tensor_core",
         "torch_matmul", "torch_sum"),
        ("experiment", "direction", "distribution", "dtype", "n_terms", "method", "term_text", "k",
         "accumulator", "m", "n", "precision", "reduced_reduction", "seed", "seeds", "device"),
    ),
    "mnist": {
        "pace": ("experiment", "network", "data_source", "launch", "rounds", "steps", "window",
                 *IMAGES, "precision"),
        "repeat": ("experiment", "network", "steps", *IMAGES, "precision"),
        "data": ("experiment", "batches", *IMAGES, "data_source"),
        **dict.fromkeys(
            ("run", "epoch"),
            ("experiment", "network", "epochs", "seed", "data_source", "launch", "window",
             *IMAGES, "precision"),
        ),
    },
    "end_to_end": {
        **dict.fromkeys(("step", "mlp", "model", "profile"), TRAINING),
        "sustained": (*TRAINING, "round"),
        "optimizer": ("experiment", "device", "batch_size", "model", "optimizer"),
        **dict.fromkeys(
            ("ceiling", "product"),
            ("experiment", "ceiling", "size", "dtype", "precision", "device"),
        ),
    },
}  # fmt: skip
OLD = {
    "kernels": "03_kernels", "anatomy": "02_anatomy", "precision": "12_precision",
    "mnist": "13_mnist", "compilers": "11_compilers", "llama": "10_llama",
    "end_to_end": "06_end_to_end", "warmup": "05_warmup", "profile": "08_profile",
}  # fmt: skip
ARM = ("experiment", "model", "dtype", "batch_size", "context_length", "device")
OPERATION = ("experiment", "batch_size", "context_length", "hidden_size", "dtype", "launch",
             "direction", "device")  # fmt: skip
TRAINED = (*ARM, "seed", "steps", "learning_rate")
FIELDS["llama"] = {
    "step": (*ARM, "group", "optimizer"), "families": (*ARM, "group", "optimizer"),
    "fp32": (*ARM, "group", "optimizer", "precision"),
    "sustained": (*ARM, "group", "optimizer", "round"),
    "loss": (*OPERATION, "vocabulary"), "norm": OPERATION,
    "rope": (*OPERATION, "heads", "key_heads"), "memory": ARM, "limit": (*ARM, "grows"),
    "distributed": (*ARM, "optimizer", "learning_rate", "checkpointing", "warmup_steps", "steps",
                    "strategy", "processes"),
    "product": ("experiment", "ceiling", "size", "dtype", "precision", "device"),
    "first-steps": TRAINED, "train": TRAINED, "fp32-train": (*TRAINED, "precision"),
    "gradients": (*ARM, "seed", "step", "learning_rate"),
}  # fmt: skip
_CALL = ("experiment", "subject", "sampler", "optimizer", "model", "batch_size", "context_length",
         "dtype", "device")  # fmt: skip
FIELDS["compilers"] = {
    "ceiling": FIELDS["kernels"]["ceiling"],
    **dict.fromkeys(("forward", "inference", "generation", "training"), (*_CALL, "against")),
    "dynamic": (*_CALL, "steps"),
    "distributed": ("experiment", "model", "context_length", "dtype", "optimizer",
                    "learning_rate", "checkpointing", "steps", "device", "strategy", "processes",
                    "batch_size"),
}  # fmt: skip


def kernels(row: dict[str, Any]) -> dict[str, Any]:
    """A row of study 03 by the names of the topic."""
    if row["experiment"] == "sustained":
        assert row.pop("race") == "swiglu" and row["launch"] == "python"
        row["launch"] = "sustained"
    if row["experiment"] == "lengths":
        row["lengths_tokens"] = row.pop("tokens")
    if row["experiment"] == "swiglu":
        row["experiment"] = "race"
    return row


def mnist(row: dict[str, Any]) -> dict[str, Any]:
    """A row of study 13 by the names of the topic: `source` is elsewhere who published a number."""
    if "source" in row:
        row["data_source"] = row.pop("source")
    return row


def compilers(row: dict[str, Any]) -> dict[str, Any]:
    """A row of study 11: how many steps a training of changing lengths has says what it is."""
    if row["experiment"] == "dynamic":
        row["steps"] = row.pop("repetitions")
    return row


def llama(row: dict[str, Any]) -> dict[str, Any]:
    """A row of study 10 by the names of the topic."""
    if row["experiment"] == "sustained":
        assert row.pop("race") == "step"
    if row["experiment"] == "distributed":
        row["warmup_steps"] = row.pop("warmup")
    return row


def end_to_end(row: dict[str, Any]) -> dict[str, Any]:
    """A row of study 06 by the names of the topic: a step alone is PyTorch's."""
    if row["experiment"] == "sustained":
        assert row.pop("race") == "mlp"
    if row["experiment"] in ("step", "profile"):
        row["provider"] = "eager"
    return row


FIELDS["kernels"]["race"] = FIELDS["kernels"].pop("swiglu")


def runs(folder: Path) -> list[dict[str, Any]]:
    """The recordings of a folder, one a run, the oldest first."""
    shared = json.loads((folder / "machine.json").read_text())
    each = sorted(shared["runs"], key=lambda run: run["began"])
    newest = shared["runs"][-1]
    return [
        {
            "id": folder.name if len(each) == 1 else f"{folder.name}.{number}",
            "set": folder.name, "machine": folder.parent.name, "profile": shared["profile"],
            **run, "files": shared["files"] if run is newest else None,
        }
        for number, run in enumerate(each, 1)
    ]  # fmt: skip


def converted(topic: str, row: dict[str, Any], recorded: list[dict[str, Any]]) -> dict[str, Any]:
    """A row of the topic."""
    row = dict(row)
    old_id, when = row.pop("case"), row["measured_at"]
    renames = {
        "kernels": kernels, "mnist": mnist, "compilers": compilers, "llama": llama,
        "end_to_end": end_to_end,
    }  # fmt: skip
    row = renames.get(topic, lambda row: row)(row)
    if "run" in row:
        row["old_run"] = row.pop("run")
    case = {name: row.get(name) for name in FIELDS[topic][row["experiment"]]}
    began = [run["id"] for run in recorded if run["began"] <= when]
    row |= {"race": study_rows.key(topic, case), "recording": began[-1]}
    head = {name: row.pop(name, None) for name in HEAD}
    return {**head, **row, "old_id": old_id}


def main(topic: str) -> None:
    """Convert, and remove what was converted."""
    every = [run for path in sorted(RESULTS.glob("*/*/machine.json")) for run in runs(path.parent)]
    known = RESULTS / study_rows.RECORDINGS
    if not known.exists():
        lines = (json.dumps(run, ensure_ascii=False) + "\n" for run in every)
        known.write_text("".join(lines))
    counted: Counter[tuple[str, str]] = Counter()
    for machine in sorted(path for path in RESULTS.iterdir() if path.is_dir()):
        lines = []
        for path in sorted(machine.glob(f"*/{OLD[topic]}.jsonl")):
            recorded = runs(path.parent)
            for line in path.read_text().splitlines():
                row = json.loads(line)
                counted[machine.name, row["status"]] += 1
                lines.append(json.dumps(converted(topic, row, recorded), ensure_ascii=False))
            if "keep" not in sys.argv:
                subprocess.run(["git", "rm", "-q", str(path)], cwd=ROOT, check=True)
        (machine / f"{topic}.jsonl").write_text("".join(line + "\n" for line in lines))
    print(sum(counted.values()), dict(counted))


if __name__ == "__main__":
    main(sys.argv[1])

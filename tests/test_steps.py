"""Steps timed from the very first one."""

import pytest
import torch

from study import first_step, trainers

PROBLEM = {
    "device": "cpu", "precision": "fp32", "batch_size": 2, "context_length": 16,
    "attention": "plain",
}  # fmt: skip


@pytest.mark.parametrize("direction", list(trainers.DIRECTIONS))
def test_each_step_has_the_sections_of_its_direction(direction):
    trainer = trainers.TransformerTrainer(model="nano", direction=direction, **PROBLEM)
    row = first_step.series(trainer, steps=4)
    for section in (*trainers.DIRECTIONS[direction], "total"):
        assert len(row[f"{section}_samples_ms"]) == 4
        assert min(row[f"{section}_samples_ms"]) > 0, "a time is never negative"
    assert "optimizer_samples_ms" in row or direction != "step"
    timed = {"forward": "forward", "backward": "backward"}.get(direction, "total")
    assert row["samples_ms"] == row[f"{timed}_samples_ms"]
    parts = sum(row[f"{s}_samples_ms"][1] for s in trainers.DIRECTIONS[direction])
    assert row["total_samples_ms"][1] >= 0.99 * parts


def test_the_full_step_learns():
    trainer = trainers.TransformerTrainer(model="nano", direction="step", **PROBLEM)
    before = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.step()
    after = list(trainer.model.parameters())
    assert all(not torch.equal(a, b) for a, b in zip(before, after, strict=True))

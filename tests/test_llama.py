"""The topic llama: arms stay apart and are right; where memory goes, and how far it lasts."""

import functools
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.utils.flop_counter import FlopCounterMode

from fusedlib.bench import cuda_graphs
from study import compiling, llama, operation, patched, race, rivals, run, trainers
from study.llama import operations, steps
from study.llama.training import Trajectory, loss_distances, wrong_gradients

pytest.importorskip("transformers")
TINY = {"model": "two layers", "dtype": "float32", "batch_size": 2, "context_length": 32,
        "device": "cpu"}  # fmt: skip
TURNS = {"optimizer": False, "group": "arms", "repetitions": 2}


def measured(names, experiment="step", **settings):
    cases = llama.arms(experiment, names, **TINY | TURNS | settings)
    return {row.case["provider"]: row.as_dict() for row in llama.measure(cases)}


@pytest.fixture(autouse=True)
def anew():
    """No problem of the test before is kept, nor who was right on it."""
    race.free()


@pytest.fixture
def broken(monkeypatch):
    """An arm whose loss is right and whose gradients are a hundredth too large."""

    class Louder(torch.nn.Module):
        by = 0.01

        def __init__(self, model):
            super().__init__()
            self.model = model

        def forward(self, ids, labels):
            actual = self.model(ids, labels=labels)
            actual.loss = (1 + self.by) * actual.loss - self.by * actual.loss.detach()
            return actual

    made = rivals.Rival(patched.TASK, "broken", Louder, "for a test")
    monkeypatch.setitem(rivals.RIVALS, (patched.TASK, "broken"), made)
    return Louder


@pytest.mark.slow
def test_every_part_of_ours_takes_turns_and_is_right():
    rows = measured([patched.BASELINE, "fused", *llama.ALONE, *llama.WITHOUT])
    assert {row["status"] for row in rows.values()} == {"ok"}
    assert len({row["session"] for row in rows.values()}) == 1
    for row in rows.values():
        assert row["gradients_error"] < 1e-5 and row["median_ms"] > 0
        assert row["loss"] == pytest.approx(rows[patched.BASELINE]["loss"], rel=1e-6)
        assert row["tokens"] == 64


def test_a_wrong_gradient_gets_no_time(broken):
    row = measured([patched.BASELINE, "broken"])["broken"]
    assert row["status"] == "wrong" and "median_ms" not in row
    assert row["gradients_error"] == pytest.approx(0.01, rel=0.01)


def test_a_layer_that_the_check_of_gradients_lacks_gives_zeros_and_the_arm_no_time(monkeypatch):
    deep = patched.CONFIGS["two layers"] | {"hidden_size": 512, "num_hidden_layers": 4}
    monkeypatch.setitem(patched.CONFIGS, "two layers", deep)

    def without_third(model):
        for layer in model.model.layers[2:3]:
            layer.mlp.register_forward_hook(lambda mlp, given, y: torch.zeros_like(y))
        return model

    for name, arm in (("lazy", without_third), ("honest", lambda model: model)):
        made = rivals.Rival(patched.TASK, name, arm, "for a test")
        monkeypatch.setitem(rivals.RIVALS, (patched.TASK, name), made)
    rows = measured(["honest", "lazy"], dtype="bfloat16")
    assert rows["honest"]["status"] == "ok"
    assert rows["lazy"]["status"] == "wrong" and "median_ms" not in rows["lazy"]


def test_a_whole_step_has_its_optimizer_and_trains_nobody_elses_weights():
    rows = measured([patched.BASELINE, "fused"], optimizer=True, group="whole")
    for row in rows.values():
        assert row["optimizer_median_ms"] > 0
        assert row["loss"] == pytest.approx(rows[patched.BASELINE]["loss"], rel=1e-6)


def test_adamw_is_the_fused_one_with_moments_in_the_weights_dtype_as_the_paper_says():
    model, ids = patched.build("two layers", "bfloat16", "cpu"), torch.ones(1, 16, dtype=torch.long)
    trainer = patched.LlamaTrainer(model, model, ids, optimizer=True)
    trainer.issue()
    assert trainer.optimizer.defaults["fused"] and not trainer.optimizer.defaults["foreach"]
    weights, moments = list(model.parameters()), trainers.moments_of(trainer.optimizer)
    assert len(moments) == 2 * len(weights)
    kept = [*weights, *(p.grad for p in weights), *moments]
    assert {one.dtype for one in kept} == {torch.bfloat16}


@pytest.mark.parametrize("model", ["two layers", "two small layers"])
def test_flops_are_those_of_the_products_and_of_half_the_attention(model):
    [case] = llama.arms("step", [patched.BASELINE], **TINY | TURNS | {"model": model})
    made = patched.build(model, "float32", "cpu")
    ids = patched.tokens(model, 2, 32, "cpu")
    with FlopCounterMode(display=False) as counted:
        made(ids, labels=ids).loss.backward()
    by_operator = {str(op): n for op, n in counted.get_flop_counts()["Global"].items()}
    products = by_operator["aten.mm"]  # the rotation's angles are a bmm
    attention = 3 * 2 * 2 * 64 * 32 * 128 * 2 // 2  # two layers, two products, half of it masked
    assert steps.flops(case) == products + attention


@pytest.mark.parametrize(("louder", "status"), [(1e-5, ["wrong", "ok"]), (0.01, ["wrong"] * 2)])
def test_the_floor_of_a_race_in_fp32_is_that_of_its_products(broken, louder, status):
    broken.by = louder
    rows = [
        measured(["broken"], "fp32", precision=precision)["broken"]
        for precision in ("highest", "high")
    ]
    assert [row["status"] for row in rows] == status
    assert all(row["gradients_error"] == pytest.approx(louder, rel=0.05) for row in rows)


FAMILIES = {
    "Qwen3-0.6B": {"head_dim": 32}, "Gemma-2-2B, 8 layers": {"head_dim": 32},
    "Phi-3-mini, 8 layers": {"num_key_value_heads": 4}, "Mistral-7B, 6 layers": {},
}  # fmt: skip


@pytest.fixture
def small(request, monkeypatch):
    """The name of a family's model, made as small as "two layers"."""
    name, sizes = request.param, patched.CONFIGS["two layers"]
    fields = patched.CONFIGS[name] | sizes | FAMILIES.get(name, {})
    monkeypatch.setitem(patched.CONFIGS, name, fields)
    return name


@pytest.mark.parametrize("small", ["two layers", *FAMILIES], indirect=True)
def test_liger_changes_one_model_and_no_class(small):
    pytest.importorskip("liger_kernel")
    other = patched.build(small, "float32", "cpu")
    source = sys.modules[type(other).__module__]

    def state():
        classes = [c for c in vars(source).values() if isinstance(c, type)]
        return dict(vars(source)), [dict(vars(c)) for c in classes]

    model = patched.copy_of(other)
    before = state()
    patched.with_liger(model, patched.SWITCHES)
    assert state() == before
    changed = {n for n, m in model.named_modules() if "forward" in vars(m)}
    layer = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
    assert changed >= {"", "model.norm"} | {
        f"model.layers.{at}.{name}" for at in range(2) for name in layer
    }
    norms = {n for n, m in model.named_modules() if type(m).__name__.endswith("RMSNorm")}
    assert changed >= norms
    assert not [n for n, m in other.named_modules() if "forward" in vars(m)]
    assert model.lm_head.weight is other.lm_head.weight


@pytest.mark.parametrize("small", ["two layers", *FAMILIES], indirect=True)
def test_a_setting_of_liger_s_loss_reaches_its_kernel(small, monkeypatch):
    functional = pytest.importorskip("liger_kernel.transformers.functional")
    seen = []

    @functools.wraps(functional.liger_fused_linear_cross_entropy)
    def instead(hidden, weight, target, *positional, **settings):
        seen.append(settings)
        return cross_entropy((hidden @ weight.T).float(), target)

    monkeypatch.setattr(functional, "liger_fused_linear_cross_entropy", instead)
    model, ids = patched.build(small, "float32", "cpu"), patched.tokens(small, 2, 16, "cpu")
    patched.with_liger(model, patched.SWITCHES[3:], chunk_mem_const=8)
    model(ids, labels=ids)
    assert [settings["chunk_mem_const"] for settings in seen] == [8]


def test_an_arm_that_compiles_nothing_is_not_timed_as_compiled(monkeypatch):
    made = rivals.Rival(patched.TASK, "idle", lambda model: model, "a test", traits=patched.WHOLE)
    monkeypatch.setitem(rivals.RIVALS, (patched.TASK, "idle"), made)
    row = measured(["idle"])["idle"]
    assert row["status"] == "unavailable" and "no graph" in row["reason"]


def test_no_shape_of_a_race_runs_eagerly_for_torch_has_compiled_eight(monkeypatch):
    torch.compiler.reset()
    compiled = torch.compile(lambda x: x.sin() + 1, backend="eager", dynamic=False)
    before = compiling.graphs_compiled()
    with compiling.never_eager():
        for n in range(2, 14):
            compiled(torch.ones(n))
    assert compiling.graphs_compiled() == before + 12
    monkeypatch.setattr(compiling, "MOST_GRAPHS", 12)
    with compiling.never_eager(), pytest.raises(Exception, match="recompile_limit"):
        compiled(torch.ones(14))
    torch.compiler.reset()


@pytest.mark.parametrize("small", FAMILIES, indirect=True)
def test_what_is_right_for_another_family(small):
    """The truth is near its plain model, and the patched one is no further from it."""
    true = patched.ExactModel.of(TINY | {"model": small})
    assert max(e.norm for e in true.baseline.values()) < 1e-4
    figures = true.errors(rivals.get(patched.TASK, "fused"), "float32")
    assert figures["gradients_error"] < 1e-4
    model, ids = patched.build(small, "float32", "cpu"), patched.tokens(small, 2, 16, "cpu")
    loss = model(ids, labels=ids).loss.item()
    plain = patched.plain_loss(model, ids)
    likeliest = model(ids, labels=plain.likeliest).loss.item()
    assert plain.likeliest_loss == pytest.approx(likeliest, rel=1e-5) and likeliest < loss
    assert plain.loss == pytest.approx(loss, rel=1e-5)


def test_memory_is_split_to_the_byte():
    [case] = llama.arms("memory", [patched.BASELINE], **TINY | {"context_length": 128})
    [row] = llama.measure([case])
    row = row.figures
    model = patched.build("two layers", "float32", "cpu")
    weights = sum(p.nbytes for p in model.parameters()) / 2**20
    assert row["peak_weights_mib"] == pytest.approx(weights)
    assert row["peak_optimizer_mib"] == pytest.approx(2 * weights)
    # The logarithm of the softmax, its gradient and that of the logits.
    assert row["peak_logits_mib"] == pytest.approx(12 * 256 * 4112 / 2**20)
    parts = [row[name] for name in row if name.startswith("peak_") and name.endswith("_mib")]
    assert sum(parts) == pytest.approx(2 * row["peak_mib"])  # itself among them


# --- does an arm train as Hugging Face does? ------------------------------------------------------

LEARNING = {"model": "two layers", "batch_size": 4, "context_length": 16, "device": "cpu",
            "learning_rate": 1e-3}  # fmt: skip


def frozen(model):
    """A matrix whose gradient is zero."""
    model.model.layers[1].mlp.up_proj.weight.register_hook(torch.zeros_like)
    return model


def scaled(model):
    """A layer whose gradients are a tenth too large."""
    for weight in model.model.layers[1].parameters():
        weight.register_hook(lambda gradient: 1.1 * gradient)
    return model


def unshifted(model):
    """A model that learns to repeat a token instead of to foresee the next one."""
    return lambda ids, labels: SimpleNamespace(
        loss=cross_entropy(model(ids).logits.float().flatten(0, 1), labels.flatten())
    )


@pytest.fixture
def planted(monkeypatch):
    """Arms with a fault each."""
    for fault in (frozen, scaled, unshifted):
        name = fault.__name__
        made = rivals.Rival(patched.TASK, name, fault, "for a test")
        monkeypatch.setitem(rivals.RIVALS, (patched.TASK, name), made)


def moment(arm, dtype="float32", seed=0, step=3):
    [case] = llama.arms("gradients", [arm], seed=seed, step=step, dtype=dtype, **LEARNING)
    return case


def first_steps(arm, dtype="float32", seeds=(0, 1)):
    cases = [
        case for seed in seeds
        for case in llama.arms(
            "first-steps", [arm], steps=8, seed=seed, dtype=dtype, **LEARNING
        )
    ]  # fmt: skip
    return [row.as_dict() for row in llama.measure(cases)]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def trained_rows(request):
    """A dtype, a trajectory, and the first steps with exact gradients and of Hugging Face's."""
    rows = [
        *first_steps(patched.EXACT, request.param),
        *first_steps(patched.BASELINE, request.param),
    ]
    return request.param, Trajectory(), rows


@pytest.mark.parametrize("arm", [patched.BASELINE, patched.OTHER_ATTENTION, "fused"])
def test_a_sound_arm_passes_both_rules(trained_rows, arm):
    dtype, trajectory, rows = trained_rows
    case = moment(arm, dtype)
    assert wrong_gradients(case | trajectory.measure(case)) == []
    off, allowed = loss_distances([*rows, *first_steps(arm, dtype)])
    assert 0 < off[arm] <= allowed < (1e-5 if dtype == "float32" else 2e-3)


@pytest.mark.parametrize("trained_rows", ["float32"], indirect=True)
@pytest.mark.parametrize(
    ("fault", "gradients", "seen"),
    [("frozen", 1, True), ("unshifted", 20, True), ("scaled", 9, False)],
)
def test_a_fault_fails_the_rules_but_adamw_hides_a_scale_from_the_second(
    trained_rows, planted, fault, gradients, seen
):
    dtype, trajectory, rows = trained_rows
    case = moment(fault, dtype)
    wrong = wrong_gradients(case | trajectory.measure(case))
    assert len(wrong) == gradients
    if fault != "unshifted":
        assert all(name.startswith("model.layers.1.") for name in wrong)
    off, allowed = loss_distances([*rows, *first_steps(fault, dtype)])
    assert (off[fault] > allowed) == seen


def test_arms_meet_at_the_weights_of_one_training_whatever_came_before():
    trajectory = Trajectory()
    later, back = (trajectory.measure(moment(patched.BASELINE, step=step)) for step in (3, 1))
    assert later == Trajectory().measure(moment(patched.BASELINE))
    assert back != later
    other = trajectory.measure(moment(patched.OTHER_ATTENTION, step=1))
    both = zip(back["gradient_errors"], other["gradient_errors"], strict=True)
    assert other["usual_errors"] == back["usual_errors"] == [max(pair) for pair in both]
    seeds = [trajectory.measure(moment("fused", seed=seed)) for seed in (0, 1)]
    assert seeds[0]["usual_errors"] == later["usual_errors"] != seeds[1]["usual_errors"]


def test_a_gradient_that_is_missing_or_not_finite_is_wrong():
    row = {"dtype": "float32", "parameters": ["a", "b"], "usual_errors": [1e-7, 1e-7]}
    assert wrong_gradients(row | {"gradient_errors": [4e-7, None]}) == ["b"]
    assert wrong_gradients(row | {"gradient_errors": [5e-7, 4e-7]}) == ["a"]
    for lost in (None, float("nan")):  # as a row has it, and as a frame may
        assert wrong_gradients(row | {"gradient_errors": lost}) == ["a", "b"]


def test_losses_are_compared_over_the_seeds_that_all_arms_have():
    def row(arm, seed, *losses):
        return {"provider": arm, "seed": seed, "losses": list(losses)}

    exact = [row(patched.EXACT, 0, 2.0, 1.0), row(patched.EXACT, 1, 2.0, 1.0)]
    plain = [row(patched.BASELINE, 0, 2.0, 1.1), row(patched.BASELINE, 1, 9.0, 9.0)]
    ours = row("fused", 0, 2.3, 1.0)
    off, allowed = loss_distances([*exact, *plain, ours])
    assert off == {
        patched.BASELINE: pytest.approx(0.1 / 2**0.5),
        "fused": pytest.approx(0.3 / 2**0.5),
    }
    assert allowed == pytest.approx(2 * off[patched.BASELINE] + 4 * 2.0**-24 * 1.5, rel=1e-12)
    for lacking in ([*plain, ours], [*exact, ours], [*exact, *plain, row("fused", 2, 2.0, 1.0)]):
        assert loss_distances(lacking)[0] == {}


def test_exact_gradients_are_those_of_float64_rounded_once():
    model = patched.build("two layers", "bfloat16", "cpu")
    ids = patched.tokens("two layers", 2, 16, "cpu")
    true = patched.ExactModel(model, ids).true
    rivals.get(patched.TASK, patched.EXACT).build(model)(ids, labels=ids).loss.backward()
    for name, weight in model.named_parameters():
        assert weight.dtype == torch.bfloat16
        torch.testing.assert_close(weight.grad, true[name].bfloat16(), rtol=2**-8, atol=0)


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_arm_on_a_gpu(dtype):
    arms = ["all", *llama.FULL["captured"]]
    rows = measured(arms, dtype=dtype, device="cuda", context_length=128)
    reasons = {n: (r["status"], r["reason"]) for n, r in rows.items() if r["status"] != "ok"}
    assert set(reasons) <= {n for n in rows if n.startswith("liger")}, reasons
    assert all(status == "unavailable" for status, _ in reasons.values()), reasons
    for name, row in rows.items():
        if row["status"] == "ok" and "graph" not in name:
            assert row["activations_mib"] > 0 and row["peak_mib"] > 0


@pytest.mark.gpu
def test_a_step_that_waits_for_the_card_is_not_captured_and_spoils_nothing(monkeypatch):
    def waiting(model):
        def call(ids, labels):
            ids.sum().item()
            return model(ids, labels=labels)

        return patched.capturable(call)

    traits = frozenset({patched.GRAPH})
    made = rivals.Rival(patched.TASK, "waiting", waiting, "for a test", traits=traits)
    monkeypatch.setitem(rivals.RIVALS, (patched.TASK, "waiting"), made)
    rows = measured(["waiting", "huggingface-graph"], dtype="bfloat16", device="cuda")
    assert rows["waiting"]["status"] == "unavailable" and "waits" in rows["waiting"]["reason"]
    assert rows["huggingface-graph"]["status"] == "ok"
    torch.rand(2, device="cuda")


@pytest.mark.gpu
@pytest.mark.slow
def test_experiments_alone_on_a_gpu():
    names = [patched.BASELINE, "fused"]
    training = {"learning_rate": 1e-3, "seed": 0, "dtype": "bfloat16", "device": "cuda"}
    rows = [
        *measured(names, "memory", dtype="bfloat16", device="cuda").values(),
        *measured(names, "first-steps", steps=5, **training).values(),
        *measured(names, "gradients", step=5, **training).values(),
    ]
    assert [row["status"] for row in rows] == ["ok"] * 6
    assert not any(wrong_gradients(row) for row in rows[4:])
    assert all(row["peak_logits_mib"] > 0 for row in rows if row["experiment"] == "memory")


# --- operations alone -----------------------------------------------------------------------------

SMALL = {"widths": [64], "vocabulary": 200, "batch_size": 2, "context_length": 16,
         "dtype": "float32", "device": "cpu", "repetitions": 2}  # fmt: skip
LARGE = {**SMALL, "widths": [2048], "vocabulary": 128256, "batch_size": 4,
         "context_length": 2048, "dtype": "bfloat16"}  # fmt: skip
BROKEN = {"loud": "d_x: norm error 1.00e-02", "frozen": "no gradient arrived at weight",
          "lazy": "once operands were rewritten in place, the results stay those of before",
          "greedy": "wrote over x", "hasty": "wrote over the gradient of y"}  # fmt: skip


@pytest.fixture
def soon(monkeypatch):
    """Two rounds and no more."""
    monkeypatch.setattr(operations, "SECONDS", 0.0)
    monkeypatch.setattr(operations, "MOST", 2)


def raced(cases):
    listed = run.grouped("llama", cases).values()
    return [row.as_dict() for each in listed for row in llama.measure(each)]


@pytest.fixture
def graphed(monkeypatch):
    """On the host: what is captured runs again at each replay, in cases that say "graph"."""

    def capture(call):
        call()
        return cuda_graphs.Captured(call, {})

    for module in (operation, operations):  # of bounds, and of what is judged
        monkeypatch.setattr(module, "capture_call", capture)
    return lambda *given: [c | {"launch": "graph"} for c in operations.cases(*given, **SMALL)]


def register(monkeypatch, name, *traits, task="norm", compute=None):
    monkeypatch.setattr(rivals, "RIVALS", dict(rivals.RIVALS))
    options = {"settings": "a test", "traits": frozenset(traits)}
    operations.operation(task, name, **options)(compute or fault(name))


class Spoilt(torch.autograd.Function):
    """The norm's output as it is; backward writes over the gradient that comes in."""

    @staticmethod
    def forward(ctx, y):
        return y.clone()

    @staticmethod
    def backward(ctx, dy):
        actual = dy.clone()
        dy.zero_()
        return actual


def fault(name):
    kept = {}

    def forward(x, residual, weight):
        if name == "loud":
            x = 1.01 * x - 0.01 * x.detach()
        y, s = operations.plain_norm(x, residual, weight.detach() if name == "frozen" else weight)
        if name == "lazy":
            y, s = (
                one + (kept.setdefault((x.data_ptr(), at), one.detach().clone()) - one).detach()
                for at, one in enumerate((y, s))
            )
        if name == "greedy":
            x.data.mul_(0.5)
        return Spoilt.apply(y) if name == "hasty" else y, s

    return forward


@pytest.mark.usefixtures("soon")
def test_operations_are_right_and_who_cannot_run_says_why():
    cases = [c for task in operations.TASKS for c in operations.cases(task, ["all"], **SMALL)]
    rows = raced(cases)
    assert len(rows) == len(cases) == 78
    for row in rows:
        if row["provider"].startswith(("liger", "cut", "quack")) or (
            row["provider"] == "trl" and row["status"] != "ok"
        ):
            assert row["status"] == "unavailable"
            assert "CUDA" in row["reason"] or "not installed" in row["reason"]
        elif row["provider"] == "torch-chunked" and not hasattr(
            torch.nn, "LinearCrossEntropyOptions"
        ):
            assert row["status"] == "unavailable" and "has no linear_cross_entropy" in row["reason"]
        elif row["provider"] != patched.BASELINE or row["status"] == "ok":
            assert row["status"] == "ok" and row["median_ms"] > 0 and row["tokens"] == 32
    ours = {row["experiment"]: row for row in rows if row["provider"] == "fused"}
    errors = {task: {n for n in row if n.endswith("_error")} for task, row in ours.items()}
    assert errors == {
        "loss": {"loss_error", "d_hidden_error", "d_weight_error"},
        "log-probs": {"log_probs_error", "d_hidden_error", "d_weight_error"},
        "entropies": {"log_probs_error", "entropy_error", "d_hidden_error", "d_weight_error"},
        "norm": {"y_error", "s_error", "d_x_error", "d_residual_error", "d_weight_error"},
        "rope": {"q_out_error", "k_out_error", "d_q_error", "d_k_error"},
    }
    assert all(row[n] < 1e-6 for task, row in ours.items() for n in errors[task])
    assert len({row["session"] for row in rows if row["status"] == "ok"}) == 9


@pytest.mark.usefixtures("soon")
def test_an_operation_asked_for_alone_may_have_rivals_that_the_others_lack():
    asked = llama.cases(experiments=["loss"], operation_rivals=["liger-fp32", "fused-least"])
    assert {case["experiment"] for case in asked} == {"loss"}
    assert {case["provider"] for case in asked} == {"liger-fp32", "fused-least"}


@pytest.mark.parametrize("task", operations.OF_VOCABULARY)
def test_who_gives_ignored_tokens_a_value_or_gradient_is_wrong(task, monkeypatch):
    def of_all(hidden, weight, target):
        return operations.PLAIN[task](hidden, weight, target.clamp(min=0))

    register(monkeypatch, "of all", task=task, compute=of_all)
    names = ["of all", "fused", "products"]
    cases = operations.cases(task, names, ignored_share=0.5, **SMALL)
    status = {(row["provider"], row["status"]) for row in raced(cases)}
    assert status == {("of all", "wrong"), ("fused", "ok"), ("products", "ok")}


@pytest.mark.parametrize("name", BROKEN)
def test_a_wrong_operation_gets_no_time_and_harms_nobody(name, soon, monkeypatch, graphed):
    register(monkeypatch, name)
    rows = raced(graphed("norm", [name, "fused", "copy"]))
    assert [row["status"] for row in rows if row["provider"] != name] == ["ok"] * 4
    for row in (row for row in rows if row["provider"] == name):
        assert row["status"] == "wrong" and "median_ms" not in row
        assert BROKEN[name] in row["reason"]


def test_work_by_hand():
    def work(task):
        return [operations.work(case) for case in operations.cases(task, ["fused"], **LARGE)]

    assert work("loss") == [{"tokens": 8192, "flops": 12_910_671_691_776}]
    half = operations.cases("log-probs", ["fused"], ignored_share=0.5, **LARGE)
    flops = [operations.work(case)["flops"] for case in half]
    assert flops == [2_151_778_615_296, 6_455_335_845_888]
    tensor, row = 8192 * 2048 * 2, 2048 * 2  # bytes
    norm = [actual["compulsory_bytes"] for actual in work("norm")]
    assert norm == [4 * tensor + row, 8 * tensor + 3 * row]
    once = 2 * 8192 * (32 + 8) * 64 * 2 + 2 * 2048 * 64 * 2
    assert [actual["compulsory_bytes"] for actual in work("rope")] == [once, 2 * once]

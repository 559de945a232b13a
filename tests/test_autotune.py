"""When the autotuner tunes off a GPU, and what it chooses; `test_autotune_gpu.py` has one.

The card, the kernel and the clock are played by `autotune_stand_ins.py`.
"""

from dataclasses import asdict

import pytest
import torch

pytest.importorskip("triton")
from autotune_stand_ins import (
    DEFAULT,
    FIRST,
    HIDDEN,
    INNER,
    SECOND,
    TOKENS,
    Clock,
    Kernel,
    another_process,
    choose,
    cut_of,
    matrices,
    tiles,
)

from fusedlib.kernels import autotune, plan, products, route, swiglu_configs
from fusedlib.kernels.autotune import __main__ as command
from fusedlib.kernels.autotune import candidates, trials
from fusedlib.kernels.launch import Launch

# --- the choice ----------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_nothing_of_the_caller_s_is_touched(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.8, SECOND: 0.6})
    given = matrices()
    before, state = [t.clone() for t in given], torch.get_rng_state()
    assert choose(kernel, given) == SECOND
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    asked = clock.asked
    assert asked and choose(kernel, given) == SECOND and clock.asked == asked
    (entry,) = tiles(card_folder).values()
    tried = len(candidates.FORWARD[80])
    assert entry == {"config": asdict(SECOND), "ms": 0.6, "default_ms": 1.0, "tried": tried}


@pytest.mark.parametrize("fault", ["wrong", "nan", "raises", "spills"])
def test_a_candidate_that_is_not_right_is_not_taken_however_fast(monkeypatch, card_folder, fault):
    kernel = Kernel({cut_of(SECOND): fault})
    Clock(monkeypatch, kernel, {FIRST: 0.8, SECOND: 0.1})
    assert choose(kernel) == FIRST


@pytest.mark.parametrize(("ms", "taken"), [(0.98, DEFAULT), (0.96, FIRST)])
def test_the_default_stays_where_little_is_won(monkeypatch, card_folder, ms, taken):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: ms})
    assert choose(kernel) == taken


def test_gate_up_and_h_may_be_one_tensor_and_stay_one(monkeypatch, card_folder):
    x, w, h, _ = matrices()
    drawn = trials._drawn_like([x, w, h, h])
    assert drawn[2] is drawn[3] and drawn[2].data_ptr() != h.data_ptr()
    assert all(d.stride() == t.stride() for d, t in zip(drawn, [x, w, h, h], strict=True))


# --- when nothing is tuned -----------------------------------------------------------------------


@pytest.mark.parametrize("name", swiglu_configs.MEASURED)
def test_a_measured_card_keeps_to_the_table(monkeypatch, card_folder, name):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setattr(autotune, "card", lambda device: (name, (9, 0)))
    assert choose(kernel) == DEFAULT and not clock.asked and not card_folder.exists()


def test_off_a_gpu_and_for_other_dtypes_and_tiles_nothing_is_tuned(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    unaligned = swiglu_configs.UNALIGNED
    assert choose(kernel, default=unaligned) == unaligned
    assert choose(kernel, matrices(dtype=torch.float32)) == DEFAULT
    monkeypatch.setattr(autotune, "card", lambda device: None)
    assert choose(kernel) == DEFAULT and not clock.asked


def test_a_kernel_without_candidates_is_not_asked_for_another_cut(monkeypatch, card_folder):
    kernel = Kernel()
    kernel.__name__ = "_split_kernel"
    made = Launch(kernel, DEFAULT, (1, 1, 1), ([1, 1], [1, 1]), (), {})
    assert autotune.tuned(lambda: made, matrices()) is made


def test_the_switch(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setenv("FUSEDLIB_AUTOTUNE", "0")
    assert choose(kernel) == DEFAULT and not clock.asked
    monkeypatch.setenv("FUSEDLIB_AUTOTUNE", "no")
    with pytest.raises(ValueError, match="'no'; it must be 0"):
        choose(kernel)
    monkeypatch.setenv("FUSEDLIB_AUTOTUNE", "1")
    assert choose(kernel) == FIRST
    torch.use_deterministic_algorithms(True)
    try:
        assert choose(kernel) == DEFAULT
    finally:
        torch.use_deterministic_algorithms(False)


def test_nothing_is_timed_under_capture_but_what_is_stored_is_used(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(kernel) == DEFAULT and not clock.asked and not autotune.chosen()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose(kernel) == FIRST
    another_process(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(kernel) == FIRST


def test_nothing_is_timed_while_torch_compiles(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(kernel) == DEFAULT and not clock.asked


@pytest.mark.parametrize("config", [DEFAULT, FIRST])
def test_without_memory_the_default_is_used_and_nothing_is_stored(monkeypatch, card_folder, config):
    kernel = Kernel({cut_of(config): "memory"})
    Clock(monkeypatch, kernel, {SECOND: 0.1})
    assert choose(kernel) == DEFAULT and not autotune.chosen() and not card_folder.exists()


# --- the key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    ["card", "torch", "triton", "source", "variant", "dtype", "hidden", "inner", "tokens"],
)
def test_a_choice_is_for_one_card_version_kernel_and_class(monkeypatch, card_folder, change):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    given, variant, asked = matrices(), None, clock.asked
    if change == "card":
        monkeypatch.setattr(autotune, "card", lambda device: ("NVIDIA L40S", (8, 9)))
    elif change in ("torch", "triton"):
        monkeypatch.setattr(getattr(autotune, change), "__version__", "99.0")
    elif change == "source":
        kernel.cache_key = "another"
    elif change == "variant":
        variant = {"SAVE": False}
    elif change == "dtype":
        given = matrices(dtype=torch.float16)
    else:
        given = matrices(**{change: {"hidden": 64, "inner": 64, "tokens": 129}[change]})
    choose(kernel, given, variant)
    assert clock.asked > asked and len(tiles(card_folder)) == 2


def test_tokens_up_to_a_power_of_two_are_one_class(monkeypatch, card_folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel, matrices(65))
    asked = clock.asked
    assert choose(kernel, matrices(128)) == FIRST and clock.asked == asked
    for tokens in (1, 16, 17):
        choose(kernel, matrices(tokens))
    found = sorted(key.split(" | ")[6] for key in tiles(card_folder))
    assert found == ["≤128 tokens", "≤16 tokens", "≤32 tokens"]


# --- the launchers and the command ---------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_plan_s_launches_are_cut_as_asked(monkeypatch, direction):
    made = []

    def tuned(make, matrices):
        made.append(make)
        return lambda *matrices: None

    monkeypatch.setattr(plan, "tuned", tuned)
    x, w_gate_up, _, gate_up = matrices()
    way = route.Ways("", route.TILES, route.TILES)
    kind = route.Kind(x.device, x.dtype, "ieee", TOKENS, HIDDEN, INNER)
    own = plan.Plan(kind, way, products.TORCH)
    if direction == "forward":
        own.activate(x, w_gate_up, True)
    else:
        w_down = torch.randn(HIDDEN, INNER).to(x.dtype)
        own.differentiate(x, w_down, gate_up, True, True)
    (make,) = made
    assert make().config == swiglu_configs.INTERPRETER
    other = make(FIRST)
    assert other.config == FIRST and other.constants["BLOCK_N"] == FIRST.block_n
    assert candidates.of(other.kernel.__name__, 89, TOKENS)


def test_the_command_needs_a_gpu_and_a_size(capsys):
    sizes = ["--tokens", "64", "--hidden", "64", "--inner", "64", "--device", "cpu"]
    assert command.main(sizes) == 2
    assert "needs an NVIDIA GPU, got --device cpu" in capsys.readouterr().err
    for tokens, wrong in (("64,0", "'0'"), ("64,x", "'x'"), ("64,", "''")):
        with pytest.raises(SystemExit):
            command.main([*sizes, "--tokens", tokens])
        assert f"{wrong} is not a size; it must be 1 or more" in capsys.readouterr().err

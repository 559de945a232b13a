"""The autotuner off a GPU: a card that is made up, kernels that PyTorch plays, a clock that is told
what to say. `tests/test_autotune_gpu.py` has a real one.
"""

import json
import multiprocessing
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton")
from fusedlib import paths
from fusedlib.kernels import autotune, launch, swiglu, swiglu_configs
from fusedlib.kernels.autotune import __main__ as command
from fusedlib.kernels.autotune import candidates, store, trials
from fusedlib.kernels.swiglu_configs import SHARED_MEMORY, Config

TESTS = Path(__file__).parent
CARD = ("NVIDIA L4", (8, 9))
DEFAULT = swiglu_configs.FORWARD["half", 89]
FIRST, SECOND, *OTHERS = candidates.FORWARD[80]
TOKENS, HIDDEN, INNER = 100, 32, 48


class Kernel:
    """Plays the forward kernel; `faults` says what goes wrong at which configuration."""

    __name__ = "_swiglu_fwd_kernel"
    arg_names = ()

    def __init__(self, faults=None, source="source"):
        self.faults, self.cache_key = faults or {}, source
        self.running = None

    def __getitem__(self, programs):
        return self.run

    def run(self, x, w_gate_up, h, gate_up, **constants):
        self.running = tuple(constants[k] for k in ("BLOCK_M", "BLOCK_N", "BLOCK_K", "num_warps"))
        fault = self.faults.get(self.running)
        if fault == "raises":
            raise RuntimeError("out of resource: shared memory")
        if fault == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory")
        gate_up.copy_(x @ w_gate_up.mT)
        gate, up = gate_up.chunk(2, dim=1)
        h.copy_(torch.nn.functional.silu(gate) * up)
        if fault in ("wrong", "nan"):
            h[-1, -1] = float("nan") if fault == "nan" else h.abs().max() * 2

    def warmup(self, *arguments, grid, **constants):
        return SimpleNamespace(n_spills=24 * (self.faults.get(self.running) == "spills"))


def cut_of(config: Config) -> tuple[int, ...]:
    return config.block_m, config.block_n, config.block_k, config.num_warps


class Clock:
    """ms by configuration, 1 where nothing is said; counts what it was asked."""

    def __init__(self, monkeypatch, kernel: Kernel, ms: dict[Config, float]):
        self.kernel, self.ms = kernel, {cut_of(c): t for c, t in ms.items()}
        self.asked = 0
        monkeypatch.setattr(trials, "milliseconds", self)

    def __call__(self, call) -> float:
        call()
        self.asked += 1
        return self.ms.get(self.kernel.running, 1.0)


@pytest.fixture
def folder(monkeypatch, tmp_path) -> Path:
    """A process that sees CARD and keeps its choices in an empty folder."""
    monkeypatch.setenv("FUSEDLIB_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("FUSEDLIB_AUTOTUNE", raising=False)
    monkeypatch.setattr(autotune, "card", lambda device: CARD)
    monkeypatch.setattr(autotune, "architecture", lambda device: 89)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    another_process(monkeypatch)
    return tmp_path / "cache"


def another_process(monkeypatch) -> None:
    monkeypatch.setattr(autotune, "_CHOSEN", {})
    monkeypatch.setattr(store, "_said", set())


def matrices(tokens=TOKENS, hidden=HIDDEN, inner=INNER, dtype=torch.bfloat16):
    shapes = (tokens, hidden), (2 * inner, hidden), (tokens, inner), (tokens, 2 * inner)
    return [torch.randn(shape).to(dtype) for shape in shapes]


def choose(kernel: Kernel, called_with=None, variant=None, default=DEFAULT) -> Config:
    def make(config: Config | None = None) -> launch.Launch:
        config = config or default
        constants = {"SAVE": True, "DESCRIPTORS": config.descriptors} | (variant or {})
        constants.pop("DESCRIPTORS")
        return launch.Launch(kernel, config, (1, 1, 1), ([1, 1], [1, 1]), (), constants)

    return autotune.tuned(make, called_with or matrices()).config


def tiles(folder: Path) -> dict:
    return json.loads((folder / store.NAME).read_text(encoding="utf-8"))["tiles"]


# --- the choice ----------------------------------------------------------------------------------


def test_the_fastest_is_taken_and_nothing_of_the_caller_s_is_touched(monkeypatch, folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.8, SECOND: 0.6})
    given = matrices()
    before, state = [t.clone() for t in given], torch.get_rng_state()
    assert choose(kernel, given) == SECOND
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert torch.equal(torch.get_rng_state(), state)
    asked = clock.asked
    assert asked and choose(kernel, given) == SECOND and clock.asked == asked
    (entry,) = tiles(folder).values()
    tried = len(candidates.FORWARD[80])
    assert entry == {"config": asdict(SECOND), "ms": 0.6, "default_ms": 1.0, "tried": tried}


@pytest.mark.parametrize("fault", ["wrong", "nan", "raises", "spills"])
def test_a_candidate_that_is_not_right_is_not_taken_however_fast(monkeypatch, folder, fault):
    kernel = Kernel({cut_of(SECOND): fault})
    Clock(monkeypatch, kernel, {FIRST: 0.8, SECOND: 0.1})
    assert choose(kernel) == FIRST


@pytest.mark.parametrize(("ms", "taken"), [(0.98, DEFAULT), (0.96, FIRST)])
def test_the_default_stays_where_little_is_won(monkeypatch, folder, ms, taken):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: ms})
    assert choose(kernel) == taken


def test_gate_up_and_h_may_be_one_tensor_and_stay_one(monkeypatch, folder):
    x, w, h, _ = matrices()
    drawn = trials._drawn_like([x, w, h, h])
    assert drawn[2] is drawn[3] and drawn[2].data_ptr() != h.data_ptr()
    assert all(d.stride() == t.stride() for d, t in zip(drawn, [x, w, h, h], strict=True))


# --- when nothing is tuned -----------------------------------------------------------------------


@pytest.mark.parametrize("name", swiglu_configs.MEASURED)
def test_a_measured_card_keeps_to_the_table(monkeypatch, folder, name):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setattr(autotune, "card", lambda device: (name, (9, 0)))
    assert choose(kernel) == DEFAULT and not clock.asked and not folder.exists()


def test_off_a_gpu_and_for_other_dtypes_and_tiles_nothing_is_tuned(monkeypatch, folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    unaligned = swiglu_configs.UNALIGNED["half"]
    assert choose(kernel, default=unaligned) == unaligned
    assert choose(kernel, matrices(dtype=torch.float32)) == DEFAULT
    monkeypatch.setattr(autotune, "card", lambda device: None)
    assert choose(kernel) == DEFAULT and not clock.asked


def test_a_kernel_without_candidates_is_not_asked_for_another_cut(monkeypatch, folder):
    kernel = Kernel()
    kernel.__name__ = "_split_kernel"
    made = launch.Launch(kernel, DEFAULT, (1, 1, 1), ([1, 1], [1, 1]), (), {})
    assert autotune.tuned(lambda: made, matrices()) is made


def test_the_switch(monkeypatch, folder):
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


def test_nothing_is_timed_under_capture_but_what_is_stored_is_used(monkeypatch, folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(kernel) == DEFAULT and not clock.asked and not autotune.chosen()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    assert choose(kernel) == FIRST
    another_process(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert choose(kernel) == FIRST


def test_nothing_is_timed_while_torch_compiles(monkeypatch, folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert choose(kernel) == DEFAULT and not clock.asked


@pytest.mark.parametrize("config", [DEFAULT, FIRST])
def test_without_memory_the_default_is_used_and_nothing_is_stored(monkeypatch, folder, config):
    kernel = Kernel({cut_of(config): "memory"})
    Clock(monkeypatch, kernel, {SECOND: 0.1})
    assert choose(kernel) == DEFAULT and not autotune.chosen() and not folder.exists()


# --- the key -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    ["card", "torch", "triton", "source", "variant", "dtype", "hidden", "inner", "tokens"],
)
def test_a_choice_is_for_one_card_version_kernel_and_class(monkeypatch, folder, change):
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
    assert clock.asked > asked and len(tiles(folder)) == 2


def test_tokens_up_to_a_power_of_two_are_one_class(monkeypatch, folder):
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel, matrices(65))
    asked = clock.asked
    assert choose(kernel, matrices(128)) == FIRST and clock.asked == asked
    few = [next(iter(tiles(folder)))]
    for tokens in (1, 16, 17):
        choose(kernel, matrices(tokens))
        few.append(tokens)
    assert [("≤16" in k, "≤32" in k) for k in tiles(folder)].count((True, False)) == 1
    assert len(tiles(folder)) == 3


# --- the file ------------------------------------------------------------------------------------


def test_another_process_reads_and_does_not_tune(monkeypatch, folder):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    another_process(monkeypatch)
    clock = Clock(monkeypatch, kernel := Kernel(), {SECOND: 0.1})
    assert choose(kernel) == FIRST and not clock.asked


@pytest.mark.parametrize("content", [b"", b'{"tiles": {', b"\xff\xfe", b"[]", b'{"tiles": 3}'])
def test_a_broken_file_is_said_once_and_made_anew(monkeypatch, folder, content):
    folder.mkdir()
    (folder / store.NAME).write_bytes(content)
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    with pytest.warns(store.TilesWarning, match=f"{store.NAME} cannot be used") as said:
        assert choose(kernel) == FIRST
    assert len(said) == 1 and len(tiles(folder)) == 1


@pytest.mark.parametrize(
    "entry",
    [
        {"config": asdict(Config(7, 7, 7, 3, 1))},
        {"config": {"block_m": 64}},
        {"config": 3},
        {},
        "a word",
    ],
)
def test_an_entry_that_is_no_candidate_is_replaced(monkeypatch, folder, entry):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    (key,) = tiles(folder)
    content = {"tiles": {key: entry, "another": {"config": {}, "note": 1}}, "newer": True}
    (folder / store.NAME).write_text(json.dumps(content), encoding="utf-8")
    another_process(monkeypatch)
    assert choose(kernel) == FIRST
    written = json.loads((folder / store.NAME).read_text(encoding="utf-8"))
    assert written["tiles"][key]["config"] == asdict(FIRST)
    assert written["newer"] and written["tiles"]["another"] == content["tiles"]["another"]


def test_fields_of_a_later_version_are_ignored_and_kept(monkeypatch, folder):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    (key,) = tiles(folder)
    entry = {"config": asdict(SECOND) | {"cluster": 2}, "watts": 300}
    (folder / store.NAME).write_text(json.dumps({"tiles": {key: entry}}), encoding="utf-8")
    another_process(monkeypatch)
    clock = Clock(monkeypatch, kernel, {})
    assert choose(kernel) == SECOND and not clock.asked and tiles(folder) == {key: entry}


def test_a_folder_that_cannot_be_written_costs_a_warning(monkeypatch, folder):
    folder.write_text("in the way", encoding="utf-8")
    clock = Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    with pytest.warns(store.TilesWarning, match="FUSEDLIB_CACHE") as said:
        assert choose(kernel) == FIRST
        assert choose(kernel, matrices(hidden=64)) == FIRST
    assert {"read" in str(w.message) for w in said} == {True, False} and len(said) == 2
    assert all(str(folder) in str(w.message) for w in said)
    asked = clock.asked
    assert choose(kernel) == FIRST and clock.asked == asked


def test_a_write_that_fails_leaves_the_old_file_and_no_other(monkeypatch, folder):
    Clock(monkeypatch, kernel := Kernel(), {FIRST: 0.1})
    choose(kernel)
    before = tiles(folder)

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.warns(store.TilesWarning, match="No space left"):
        assert choose(kernel, matrices(hidden=64)) == FIRST
    assert tiles(folder) == before
    assert {p.name for p in folder.iterdir()} == {store.NAME, store.NAME + ".lock"}


def _put(folder: str, who: int, several: int) -> list:
    os.environ["FUSEDLIB_CACHE"] = folder
    own = [store.put(f"{who} {i}", {"who": who}) for i in range(several)]
    shared = [store.put(f"shared {i}", {"who": who}) for i in range(several)]
    assert all(entry == {"who": who} for entry in own)
    return shared


def test_two_processes_lose_nothing_and_agree(tmp_path):
    several = 40
    with multiprocessing.get_context("spawn").Pool(2) as pool:
        found = pool.starmap(_put, [(str(tmp_path), who, several) for who in (1, 2)])
    assert found[0] == found[1]
    assert len(tiles(tmp_path)) == 3 * several
    assert {p.name for p in tmp_path.iterdir()} == {store.NAME, store.NAME + ".lock"}


def test_where_the_file_lies(monkeypatch, tmp_path):
    for name in ("FUSEDLIB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert paths.cache_dir() == tmp_path / ".cache" / "fusedlib"
    monkeypatch.setenv("XDG_CACHE_HOME", "not/absolute")
    assert paths.cache_dir() == tmp_path / ".cache" / "fusedlib"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert paths.cache_dir() == tmp_path / "xdg" / "fusedlib"
    monkeypatch.setenv("FUSEDLIB_CACHE", str(tmp_path / "own"))
    assert paths.cache_dir() == tmp_path / "own"


# --- the launchers and the command ---------------------------------------------------------------


@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_both_launchers_cut_their_kernel_as_asked(monkeypatch, direction):
    made = []
    monkeypatch.setattr(swiglu, "kept_launch", lambda make, *_: made.append(make) or id)
    monkeypatch.setattr(swiglu, "kept_launch", lambda make, *_: made.append(make) or print_nothing)
    x, w_gate_up, h, gate_up = matrices()
    if direction == "forward":
        swiglu.fill_fwd(x, w_gate_up, h, gate_up)
    else:
        w_down = torch.randn(HIDDEN, INNER).to(x.dtype)
        swiglu.fill_bwd(x, w_down, gate_up, gate_up, h)
    (make,) = made
    assert make().config == swiglu_configs.INTERPRETER
    other = make(FIRST)
    assert other.config == FIRST and other.constants["BLOCK_N"] == FIRST.block_n
    assert candidates.of(other.kernel.__name__, 89, TOKENS)


def print_nothing(*matrices):
    pass


def test_the_command_needs_a_gpu_and_a_size(capsys):
    sizes = ["--tokens", "64", "--hidden", "64", "--inner", "64", "--device", "cpu"]
    assert command.main(sizes) == 2
    assert "needs an NVIDIA GPU, got --device cpu" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        command.main([*sizes, "--hidden", "0"])
    assert "0 is not a size" in capsys.readouterr().err


# --- the candidates, compiled --------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", sorted(SHARED_MEMORY))
def test_candidates_fit_and_spill_nothing(architecture):
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment["PYTHONPATH"] = os.pathsep.join([str(TESTS.parent), *sys.path])
    done = subprocess.run(
        [sys.executable, str(TESTS / "autotune_ahead.py"), str(architecture)],
        capture_output=True, text=True, env=environment, timeout=500, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(rows) > 20
    limit = SHARED_MEMORY[architecture]
    bad = [r for r in rows if r["STACK"] or r.get("STL") or r.get("LDL") or r["shared"] > limit]
    assert bad == []

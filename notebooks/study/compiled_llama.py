"""Who computes a Llama's forward pass, token or training step, and how each is checked and timed.

Before its turns a provider is compiled from an empty cache, called until it compiles no more, and
held against the same weights in fp32 at full size.
"""

import copy
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import fusedlib
from fusedlib.bench import check, timing
from fusedlib.bench.attempt import Unavailable, Wrong, free_memory
from fusedlib.bench.statistics import summarize
from fusedlib.bench.turns import Checked, Turn
from fusedlib.patch.cache_argument import CACHE
from study import patched, rivals, trainers
from study.allocator import mib_of, peak
from study.cases import Case
from study.compiling import (
    LEAST_CALLS,
    TooLong,
    call_until_compiled,
    empty_compile_cache,
    graphs_compiled,
    limited,
)
from study.patched import BASELINE
from study.rivals import Task, rival
from study.settings import matmul_settings

Call = Callable[..., Any]
PROMPT, FORCED, TURN = 6, 8, 20  # tokens: of the prompt, that are checked, of a turn

STEPS = 2  # of a training's turn, after one that gives the host its head start
SHORTEST = 16  # tokens a sequence, where lengths change
sgd = partial(torch.optim.SGD, lr=6e-4, weight_decay=0.1, foreach=True)  # as published

# --- who -----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """Whose operations run, and what makes a compiled callable of a module or function."""

    fused: bool
    compile: Callable[[Call], Call]


TASK = Task[[], Arm]("compiler")


@rival(TASK, BASELINE, requires=("transformers",))
def plain() -> Arm:
    """transformers' Llama, an operation at a time, attention by scaled_dot_product_attention."""
    return Arm(False, lambda call: call)


@rival(TASK, "fused", requires=("transformers",))
def ours() -> Arm:
    """fusedlib.apply_to with all its parts, the rest an operation at a time."""
    return Arm(True, lambda call: call)


@rival(TASK, "thunder", requires=("transformers", "thunder"),
       traits=frozenset({"compiles"}))  # fmt: skip
def thunder() -> Arm:
    """thunder.dynamo.thunderfx with the executors that it finds."""
    try:
        from thunder.dynamo import thunderfx  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:  # of another torch it fails in many ways
        raise Unavailable(f"Thunder cannot be imported: {type(error).__name__}: {error}") from None
    return Arm(False, thunderfx)


def _by_layer(model: Any) -> Call:
    same: Any = patched.copy_of(model)
    for layer in same.model.layers:  # one graph serves all
        layer.compile()
    return same


def _causal(model: Any, **options: Any) -> Call:
    return torch.compile(patched.causal(patched.copy_of(model)), **options)


def _whole(**options: Any) -> Callable[[Call], Call]:
    return lambda call: torch.compile(call, **options)


def _inductor(names: str, what: str, compile_: Callable[[Call], Call], *traits: str) -> None:
    """Register providers of torch.compile, on fusedlib's operations where a name begins so."""
    for name in names.split():
        fused = name.startswith("fused")
        rival(
            TASK, name, requires=("transformers",),
            settings="fusedlib.apply_to, then " * fused + f"torch.compile of {what}",
            traits=frozenset({"compiles", *traits}),
        )(partial(Arm, fused, compile_))  # fmt: skip


_inductor("inductor fused-inductor", "the whole, mode default", _whole(mode="default"))
_inductor(
    "inductor-graphs fused-inductor-graphs", "the whole, mode reduce-overhead",
    _whole(mode="reduce-overhead"), "graphs",
)  # fmt: skip
_inductor(
    "inductor-graphs-searched", "the whole, mode max-autotune", _whole(mode="max-autotune"),
    "graphs", "searched", "on request",
)  # fmt: skip
_inductor(
    "inductor-causal", "the whole, mode default, attention by the flag is_causal", _causal,
    "on request",
)  # fmt: skip
_inductor(
    "inductor-causal-searched",
    "the whole, mode max-autotune-no-cudagraphs, attention by the flag is_causal",
    partial(_causal, mode="max-autotune-no-cudagraphs"), "searched", "on request",
)  # fmt: skip
_inductor(
    "inductor-layers fused-inductor-layers", "each decoder layer, mode default", _by_layer,
    "on request",
)  # fmt: skip


def available(case: Case) -> None:
    """Raise `Unavailable` for what cannot run here, or has nobody to stand beside."""
    for name in {case["provider"], case.get("against", case["provider"])}:
        one = rivals.get(TASK, name)
        one.check_available(case["device"], case["dtype"])
        if "graphs" in one.traits and case["device"] != "cuda":
            raise Unavailable("CUDA graphs need a CUDA GPU")


# --- what draws the next token -------------------------------------------------------------------

TEMPERATURE = 0.8
LIVE, DRAWS, MOST_MISFIT = 8, 500, 36.0
"""Tokens with a probability, draws, and the chi-square of 7 degrees that one in 10⁵ exceeds."""


def multinomial(logits: Tensor) -> Tensor:
    """One token a row by torch.multinomial."""
    return torch.multinomial(torch.softmax(logits.float() / TEMPERATURE, -1), 1)


def exponential_race(logits: Tensor) -> Tensor:
    """One token a row: of independent e ~ Exp(1) the token of the largest p / e wins, that is the
    one whose exponential clock of rate p rings first, which it does with probability p.
    """
    p = torch.softmax(logits.float() / TEMPERATURE, -1)
    return torch.argmax(p / torch.empty_like(p).exponential_(1.0), -1, keepdim=True)


SAMPLERS: dict[str, Call] = {"multinomial": multinomial, "race": exponential_race}


def misfit(sample: Call, vocabulary: int, dtype: torch.dtype, device: Any) -> float:
    """Chi-square of `DRAWS` draws among `LIVE` tokens against their probabilities, which differ;
    infinite where another token was drawn.
    """
    logits = torch.full((1, vocabulary), -1e4, dtype=dtype, device=device)
    live = torch.arange(LIVE, device=device) * (vocabulary // LIVE)
    logits[0, live] = TEMPERATURE * torch.arange(1, LIVE + 1, device=device).log().to(dtype)
    drawn = []
    for _ in range(DRAWS):
        torch.compiler.cudagraph_mark_step_begin()
        drawn.append(sample(logits).clone())
    counts = torch.bincount(torch.cat(drawn).flatten(), minlength=vocabulary)[live].double()
    if counts.sum() < DRAWS:
        return float("inf")
    expected = DRAWS * torch.softmax(logits.double() / TEMPERATURE, -1)[0, live]
    return float(((counts - expected) ** 2 / expected).sum())


# --- what is timed -------------------------------------------------------------------------------


class Setup:
    """A plain model and, once it is asked for, one with fusedlib's operations and equal weights."""

    true: dict[str, Tensor]
    baseline: dict[str, check.Errors]

    def __init__(self, case: Case) -> None:
        self.case = case
        self.plain = patched.build(case["model"], case["dtype"], case["device"])
        self.plain.train(case["subject"] == "training")
        self.twin: nn.Module | None = None

    def model_of(self, arm: Arm) -> nn.Module:
        """The model that an arm runs."""
        if arm.fused and self.twin is None:
            self.twin = copy.deepcopy(self.plain)
            fusedlib.apply_to(self.twin)
        return self.twin if arm.fused and self.twin is not None else self.plain

    def check(self, case: Case) -> Checked:
        """Compile an arm, see that it has settled, and hold it against the truth."""
        one = rivals.get(TASK, case["provider"])
        within: AbstractContextManager[Any] = nullcontext()
        if "compiles" in one.traits:
            torch.compiler.reset()  # also gives back the graphs of the arm before
            within = limited(case["limit_s"])
        free_memory()
        arm = one.build()
        model = self.model_of(arm)
        try:
            with empty_compile_cache(case["device"]), within:
                figures, turn = self.set_up(model, arm)
        except TooLong:
            torch.compiler.reset()
            raise Unavailable(
                f"not ready after {case['limit_s']:g} s, the most that this study lets an arm take"
            ) from None
        if "held_mib" in figures:
            figures["peak_mib"] = mib_of(model.parameters()) + figures["held_mib"]
        return Checked({**one.facts(), **figures}, turn)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Turn]]:
        """Figures of an arm that was found right, and what makes its turn of a case."""
        raise NotImplementedError

    def error_figures(self, results: Mapping[str, Tensor]) -> dict[str, Any]:
        """The largest relative error, as a figure."""
        errors = check.errors(results, self.true)
        figures = {"error": max(e.norm for e in errors.values())}
        dtype = getattr(torch, self.case["dtype"])
        return check.require(errors, self.baseline, dtype, figures=figures)


@contextmanager
def in_fp32(model: nn.Module) -> Iterator[nn.Module]:
    """The same weights, exactly, in fp32 for a while, with products in IEEE fp32."""
    kinds = {p: p.dtype for p in model.parameters()}
    for parameter in kinds:
        parameter.data = parameter.data.float()
    try:
        with matmul_settings("highest", True):
            yield model
    finally:
        for parameter, kind in kinds.items():
            parameter.grad, parameter.data = None, parameter.data.to(kind)
        free_memory()


class Forward(Setup):
    """Logits of a batch; the last sequence's are held against fp32."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        size = case["batch_size"], case["context_length"]
        self.ids = patched.tokens(case["model"], *size, case["device"])
        with torch.no_grad():
            with in_fp32(self.plain) as exact:
                self.true = {"logits": exact(self.ids[-1:]).logits[0]}
            self.baseline = check.errors({"logits": self.plain(self.ids).logits[-1]}, self.true)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Turn]]:
        """The whole batch's logits, once a turn."""
        call = arm.compile(model)

        @torch.no_grad()
        def run() -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            logits: Tensor = call(self.ids).logits
            return logits

        figures = call_until_compiled(run, self.case["device"])
        figures |= self.error_figures({"logits": run()[-1]})
        return figures, lambda timed: Turn(run)


class Session:
    """A prompt in a static cache of `length` tokens, which grows by one whenever `call` is called;
    `model` filled it, uncompiled.
    """

    def __init__(self, model: nn.Module, call: Call, prompt: Tensor, length: int) -> None:
        from transformers import StaticCache

        self.call, self.length, self.position = call, length, PROMPT
        self.cache: Any = StaticCache(config=model.config, max_cache_len=length)
        self.token = prompt[:, -1:].clone()
        with torch.no_grad():
            model(prompt, use_cache=True, **{CACHE: self.cache})

    def rewind(self) -> None:
        """Forget all but the prompt."""
        self.position = PROMPT
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(PROMPT)

    @torch.no_grad()
    def logits(self, token: Tensor) -> Tensor:
        """Logits (1, vocabulary) behind a token (1, 1), which is added."""
        torch.compiler.cudagraph_mark_step_begin()
        self.position += 1
        logits: Tensor = self.call(token, use_cache=True, **{CACHE: self.cache}).logits[:, -1]
        return logits

    def forced(self, tokens: Tensor) -> Tensor:
        """Logits behind each of these tokens (1, n), which follow the prompt."""
        self.rewind()
        return torch.cat([self.logits(t[None, None]).clone() for t in tokens[0]])

    @torch.no_grad()
    def generate(self, count: int, sample: Call) -> None:
        """So many tokens, each drawn from the logits behind the one before."""
        for _ in range(count):
            self.token.copy_(sample(self.logits(self.token)))


class Decoding(Setup):
    """Tokens one by one; logits with the cache are held against fp32 without one."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.ids = patched.tokens(case["model"], 1, PROMPT + FORCED, case["device"])
        with torch.no_grad(), in_fp32(self.plain) as exact:
            self.true = {"logits": exact(self.ids).logits[0, PROMPT:]}
        logits = self.session(self.plain, self.plain).forced(self.ids[:, PROMPT:])
        self.baseline = check.errors({"logits": logits}, self.true)

    def session(self, model: nn.Module, call: Call) -> Session:
        """A new sequence that begins with the prompt; the cache ends at a multiple of 64."""
        length = -(-(PROMPT + max(self.case["context_length"], FORCED, TURN)) // 64) * 64
        return Session(model, call, self.ids[:, :PROMPT], length)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Turn]]:
        """`TURN` tokens a turn, from the prompt again when the cache is full."""
        session = self.session(model, arm.compile(model))

        def once() -> None:
            session.rewind()
            session.logits(self.ids[:, PROMPT : PROMPT + 1])

        figures = call_until_compiled(once, self.case["device"])
        figures |= self.error_figures({"logits": session.forced(self.ids[:, PROMPT:])})
        table: Any = model.get_input_embeddings()  # type: ignore[operator]
        weights = sum(p.nbytes for p in model.parameters()) - table.weight.nbytes
        layers = session.cache.layers
        figures |= {
            "weights_bytes": weights,
            "cache_bytes": sum(layer.keys.nbytes + layer.values.nbytes for layer in layers),
        }

        def prepare(calls: int) -> None:
            if session.position + TURN > session.length:
                session.rewind()

        def turn(timed: Case) -> Turn:
            sample = self.sampler(timed, arm)
            session.rewind()
            session.generate(LEAST_CALLS, sample)
            return Turn(lambda: session.generate(TURN, sample), prepare)

        return figures, turn

    def sampler(self, timed: Case, arm: Arm) -> Call:
        """The case's sampler, compiled in a generation."""
        sample, device = SAMPLERS[timed["sampler"]], timed["device"]
        width, dtype = self.true["logits"].shape[-1], getattr(torch, timed["dtype"])
        with empty_compile_cache(device), torch.no_grad():
            if timed["experiment"] == "generation":
                sample = arm.compile(sample)
            off = misfit(sample, width, dtype, device)
        if not off < MOST_MISFIT:
            raise Wrong(f"{DRAWS} draws miss their probabilities: misfit {off:g}")
        return sample


class Training(Setup):
    """A step's loss and the gradient of every parameter, held against fp32 on the whole batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        size = case["batch_size"], case["context_length"]
        self.ids = patched.tokens(case["model"], *size, case["device"])
        self.names = [name for name, _ in self.plain.named_parameters()]
        with in_fp32(self.plain) as exact:
            self.true = self.results(exact, exact)
        self.baseline = check.errors(self.results(self.plain, self.plain), self.true)
        self.plain.zero_grad(set_to_none=True)
        self.initial = {name: value.clone() for name, value in self.plain.state_dict().items()}
        self.programs: list[Any] = []

    def results(self, model: nn.Module, call: Call) -> dict[str, Tensor]:
        """Loss and gradients of one step by the names of checkpoints."""
        model.zero_grad(set_to_none=True)
        loss = call(self.ids, labels=self.ids).loss
        loss.backward()
        return {"loss": loss.detach()} | patched.gradients(model, self.names)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Turn]]:
        """`STEPS` steps a turn with SGD, after one that is not counted."""
        for former in self.programs:
            former.optimizer = None  # with its moments
        free_memory()
        model.load_state_dict(self.initial)
        model.zero_grad(set_to_none=True)  # of the arm before, which would count as there already
        program = patched.LlamaTrainer(model, arm.compile(model), self.ids)
        self.programs.append(program)
        figures = call_until_compiled(program.issue, self.case["device"])
        figures |= self.error_figures({"loss": program.loss} | patched.gradients(model, self.names))
        model.zero_grad(set_to_none=True)

        def turn(timed: Case) -> Turn:
            program.optimizer = None  # with its moments
            program.optimizer = sgd(model.parameters())
            turn = trainers.turn(program, steps=STEPS)
            if timed["device"] == "cuda":
                keeps = "graphs" in rivals.get(TASK, timed["provider"]).traits
                turn.figures |= taken(program, figures["held_mib"], keeps)
            return turn

        return figures, turn


def taken(program: Any, held_mib: float, keeps: bool) -> dict[str, float]:
    """MiB at the peak of a training's step that has run before, and of the optimizer's temporaries.

    Weights and the optimizer's state lie there throughout; over them are first the peak of forward
    and backward, `held_mib` with gradients, then gradients and the temporaries; a CUDA graph
    `keeps` its memory during the update too.
    """
    program.issue()
    optimizer = program.optimizer
    temporaries = peak(optimizer.step, "cuda") or 0.0
    weights = list(program.model.parameters())
    kept = [v for state in optimizer.state.values() for v in state.values()]
    state = mib_of(v for v in kept if isinstance(v, Tensor))
    gradients = mib_of(p.grad for p in weights)
    over = held_mib + temporaries if keeps else max(held_mib, gradients + temporaries)
    return {"peak_mib": mib_of(weights) + state + over, "temporaries_mib": temporaries}


# --- another length in every step ----------------------------------------------------------------


def lengths(case: Case) -> list[int]:
    """Tokens a sequence of each step, the same for all providers."""
    longest, generator = case["context_length"], torch.Generator().manual_seed(0)
    drawn: list[int] = torch.randint(
        min(SHORTEST, longest), longest + 1, (case["steps"],), generator=generator
    ).tolist()
    return drawn


def changing(case: Case) -> dict[str, Any]:
    """Steps of a training from its very first one, each with a length of its own. The first one
    makes no update, so that its gradients can be compared.
    """
    available(case)
    torch.compiler.reset()
    free_memory()
    context_lengths, device, one = lengths(case), case["device"], rivals.get(TASK, case["provider"])
    setup = Training({**case, "context_length": context_lengths[0]})
    arm, limit = one.build(), case["limit_s"]
    model = setup.model_of(arm)
    program: Any = patched.LlamaTrainer(model, arm.compile(model), setup.ids)
    batches = [
        patched.tokens(case["model"], case["batch_size"], n, device) for n in context_lengths
    ]
    times: list[float] = []
    checked: dict[str, Any] = {}
    with empty_compile_cache(device):
        start = graphs_compiled()
        for program.ids in batches:
            begin = time.perf_counter()
            try:
                with limited(limit - sum(times) / 1e3):
                    program.issue()
                    timing.synchronize(device)
            except TooLong:
                break
            times.append((time.perf_counter() - begin) * 1e3)
            if len(times) == 1:
                gradients = patched.gradients(model, setup.names)
                checked = setup.error_figures({"loss": program.loss} | gradients)
                program.optimizer = sgd(model.parameters())
        graphs = graphs_compiled() - start
    if not times:
        raise Unavailable(f"not one iteration was done in {limit:g} s")
    return {
        **one.facts(), **checked, **summarize(times), "graphs": graphs,
        "lengths": context_lengths[: len(times)],
        "total_s": sum(times) / 1e3 if len(times) == len(context_lengths) else None,
    }  # fmt: skip

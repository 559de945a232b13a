"""Study 12: what a compiler gives a Llama on one device, and what it costs.

An *arm* is a rival of the task "compiler": whose operations run, transformers' or fusedlib's, and
what compiles them. Each takes turns with Hugging Face's eager model in a heat of its own, so that a
run that is stopped keeps the arms that were done. Before its turns an arm is compiled from an empty
cache, called until it compiles no more, and held against the same weights in fp32 at full size.

experiment   what is timed                                                          part
forward      one forward pass of a batch, no gradients                                 1
inference    a token at a time with a static cache; the sampler stays eager            2
generation   the same, the sampler compiled as the model is                            3
training     forward, backward and optimizer of one shape                              4
dynamic      the same from the first step on, every step another length                4
"""

import copy
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

import fusedlib
from fusedlib.bench import (
    check,
    code,
    distributed,
    llama,
    machine,
    race,
    rivals,
    sources,
    step_clock,
    timing,
)  # fmt: skip
from fusedlib.bench.attempt import Attempt, Unavailable, Wrong, free_memory
from fusedlib.bench.end_to_end.course import ALONE, _warm_compiler, _watched, graphs_compiled
from fusedlib.bench.race import Entry, Event, Lap
from fusedlib.bench.rivals import rival
from fusedlib.bench.statistics import summarize
from fusedlib.bench.step_clock import MIB
from fusedlib.bench.torch_precision import matmul_settings

STUDY, TASK, BASELINE = "12_compilers", "compiler", llama.BASELINE
LEAST_CALLS, MOST_CALLS = 4, 10  # before the clock; a CUDA graph is captured in the second
PROMPT, FORCED, TURN = 6, 8, 20  # tokens: of the prompt, that are checked, of a turn
TEMPERATURE = 0.8
STEPS = 2  # of a training's turn, after one that gives the host its head start
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": partial(torch.optim.SGD, lr=6e-4, weight_decay=0.1, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=1e-4, weight_decay=0.1, fused=True),
}
"""SGD is set as seed 003 published it."""
LIVE, DRAWS, MOST_MISFIT = 8, 500, 36.0
"""Tokens with a probability, draws, and the chi-square of 7 degrees that one in 10⁵ exceeds."""
SHORTEST = 16
Case = Mapping[str, Any]
Call = Callable[..., Any]


# --- arms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Arm:
    """Whose operations run, and what makes a compiled callable of a module or function."""

    fused: bool
    compile: Callable[[Call], Call]


def _as_it_is(call: Call) -> Call:
    return call


@rival(TASK, BASELINE, requires=("transformers",))
def plain() -> Arm:
    """transformers' Llama, an operation at a time, attention by scaled_dot_product_attention."""
    return Arm(False, _as_it_is)


@rival(TASK, "fused", requires=("transformers",), behind=lambda: sources.behind("fusedlib.apply"))
def ours() -> Arm:
    """fusedlib.apply_to with all its parts, the rest an operation at a time."""
    return Arm(True, _as_it_is)


@rival(TASK, "thunder", label="Thunder", place=5, requires=("transformers", "thunder"),
       traits=frozenset({"compiles"}))  # fmt: skip
def thunder() -> Arm:
    """thunder.dynamo.thunderfx with the executors that it finds."""
    try:
        from thunder.dynamo import thunderfx  # type: ignore[import-not-found,unused-ignore]
    except Exception as error:  # of another torch it fails in many ways
        raise Unavailable(f"Thunder cannot be imported: {type(error).__name__}: {error}") from None
    return Arm(False, thunderfx)


def _inductor_arm(name: str, label: str | None, place: int, mode: str, *traits: str) -> None:
    fused = name.startswith("fused")

    def arm() -> Arm:
        return Arm(fused, partial(torch.compile, mode=mode))

    whose = "fusedlib.apply_to, then " if fused else ""
    arm.__doc__ = f"{whose}torch.compile of the whole, mode {mode}"
    options: dict[str, Any] = {"requires": ("transformers",)}
    if fused:
        options["behind"] = lambda: sources.behind("fusedlib.apply")
    marks = frozenset({"compiles", *traits})
    rival(TASK, name, label=label, place=place, traits=marks, **options)(arm)


_inductor_arm("inductor", None, 2, "default")
_inductor_arm("inductor-graphs", "CUDA graphs", 3, "reduce-overhead", "graphs")
_inductor_arm("inductor-search", "searched", 8, "max-autotune", "graphs", "asked for")
_inductor_arm("fused-inductor", "fusedlib, Inductor", 4, "default")
_inductor_arm("fused-graphs", "fusedlib, graphs", 6, "reduce-overhead", "graphs")


@rival(TASK, "inductor-causal", label="torch.compile, no mask", place=7,
       requires=("transformers",), traits=frozenset({"compiles", "asked for"}))  # fmt: skip
def causal() -> Arm:
    """torch.compile of the whole, mode default, attention by the flag is_causal."""
    told = llama.causal_attention()

    def compiled(model: Any) -> Call:
        inner = torch.compile(model)

        def call(*given: Any, **named: Any) -> Any:
            model.set_attn_implementation(told)
            try:
                return inner(*given, **named)
            finally:
                model.set_attn_implementation("sdpa")

        return call

    return Arm(False, compiled)


def _by_layer(name: str, label: str, place: int, **behind: Any) -> None:
    fused = bool(behind)

    def arm() -> Arm:
        def compiled(model: Any) -> Call:
            one: Any = torch.compile
            if not hasattr(model, "model"):
                return torch.compile(model)  # a sampler
            layers = model.model.layers
            each = nn.ModuleList(one(layer) for layer in layers)

            def call(*given: Any, **named: Any) -> Any:
                model.model.layers = each
                try:
                    return model(*given, **named)
                finally:
                    model.model.layers = layers

            return call

        return Arm(fused, compiled)

    whose = "fusedlib.apply_to, then " if fused else ""
    arm.__doc__ = f"{whose}torch.compile of each decoder layer, mode default: one graph serves all"
    marks = frozenset({"compiles", "asked for"})
    more = {"requires": ("transformers",), "traits": marks, **behind}
    rival(TASK, name, label=label, place=place, **more)(arm)


_by_layer("inductor-layers", "torch.compile, by layer", 9)
_by_layer("fused-layers", "fusedlib, by layer", 10, behind=lambda: sources.behind("fusedlib.apply"))


# --- samplers ------------------------------------------------------------------------------------


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


# --- cases ---------------------------------------------------------------------------------------


def cases(
    variants: Sequence[Mapping[str, Any]], arms: Sequence[str], *, model: str, batch_size: int,
    context_length: int, repetitions: int, limit_s: float, device: str = "auto",
) -> list[dict[str, Any]]:  # fmt: skip
    """Each arm in turns with the baseline, variant by variant, so that an arm is compiled once.

    Args:
        variants: `experiment`, with `sampler` of a token's or `optimizer` of a training's.
        arms: names of rivals, or "all".
        model: of `llama.CONFIGS`, in bf16.
        batch_size: sequences.
        context_length: tokens a sequence; the most of a dynamic training, or those generated.
        repetitions: turns; of a dynamic training the iterations.
        limit_s: an arm that is not ready after so many seconds, or whose dynamic training is not
            done, is stopped; 0 compiles nothing.
        device: "auto" takes the best there is.

    Raises:
        ValueError: an unknown experiment, sampler, optimizer, model or arm, or a size below 1.
    """
    known: dict[str, Mapping[str, Any]] = {
        "experiment": SUBJECTS,
        "sampler": SAMPLERS,
        "optimizer": OPTIMIZERS,
    }
    asked = [("model", model), *(pair for variant in variants for pair in variant.items())]
    for field, value in asked:
        if value not in (fits := known.get(field, llama.CONFIGS)):
            raise ValueError(f"unknown {field} {value!r}; known: {', '.join(fits)}")
    if min(batch_size, context_length, repetitions) < 1 or limit_s < 0:
        raise ValueError(
            f"batch_size={batch_size}, context_length={context_length}, repetitions={repetitions} "
            f"must be at least 1, limit_s={limit_s} at least 0"
        )
    shared = {
        "model": model, "batch_size": batch_size, "context_length": context_length,
        "dtype": "bfloat16", "repetitions": repetitions, "limit_s": float(limit_s),
        "device": machine.device_type() if device == "auto" else device,
    }  # fmt: skip
    found: list[dict[str, Any]] = []
    for arm in rivals.chosen(TASK, arms):
        for variant in variants:
            case = {"subject": SUBJECTS[variant["experiment"]][0], **variant, **shared}
            if variant["experiment"] == "dynamic":
                found.append({**case, "provider": arm})
                continue
            case["against"] = arm
            able = Attempt.at(require_possible, {**case, "provider": arm}).ok
            names = [BASELINE, arm] if able else [arm]
            found += [{**case, "provider": name} for name in names if arm != BASELINE]
    return found


def label(case: Case) -> str:
    """A case in a few words."""
    how = case.get("sampler") or case.get("optimizer") or ""
    return f"{case['model']} {case['experiment']} {how} {case.get('against', case['provider'])}"


def require_possible(case: Case) -> None:
    """Whether a case can run here.

    Raises:
        Unavailable: device or package are missing, or nothing is to be compiled.
    """
    one = rivals.get(TASK, case["provider"])
    one.check_available(case["device"], case["dtype"])
    if "graphs" in one.traits and case["device"] != "cuda":
        raise Unavailable("CUDA graphs need a CUDA GPU")
    if "compiles" in one.traits and not case["limit_s"]:
        raise Unavailable("this part was set to compile nothing here (parameter `compiled`)")


# --- getting ready -------------------------------------------------------------------------------


class TooLong(BaseException):
    """The time of this study is over; no `Exception`, which compilers catch and go on."""


@contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise `TooLong` inside when the time is up; only the main thread can be interrupted so."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def late(number: int, frame: FrameType | None) -> None:
        raise TooLong

    handler = signal.signal(signal.SIGALRM, late)
    timer = signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-3))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


def cold(device: str) -> AbstractContextManager[Any]:
    """An empty compile cache on disk; on a CPU, where its headers alone take half a minute to
    compile anew, the one that is there.
    """
    from torch._inductor.utils import fresh_cache

    _warm_compiler(device)
    return fresh_cache() if device == "cuda" else nullcontext()


def settled(call: Callable[[], object], device: str) -> dict[str, Any]:
    """Call until nothing compiles any more.

    Returns:
        `first_s`, the wall time of the first call; `compile_s`, that of all calls over that of as
        many of the fastest; `graphs` and `graph_breaks` of Dynamo; on CUDA `held_mib`, the peak of
        all calls but the first over what there was before.

    Raises:
        Unavailable: it goes on compiling.
    """
    from torch._dynamo.utils import counters

    counters.clear()
    on_cuda = device == "cuda"
    held = torch.cuda.memory_allocated() if on_cuda else 0
    walls: list[float] = []
    before = -1
    while len(walls) < LEAST_CALLS or before != graphs_compiled():
        if len(walls) == MOST_CALLS:
            raise Unavailable(f"still compiles after {MOST_CALLS} calls")
        before, begin = graphs_compiled(), time.perf_counter()
        call()
        timing.synchronize(device)
        walls.append(time.perf_counter() - begin)
        if on_cuda and len(walls) == 1:
            torch.cuda.reset_peak_memory_stats()
    figures: dict[str, Any] = {
        "first_s": walls[0], "compile_s": sum(walls) - len(walls) * min(walls),
        "graphs": graphs_compiled(), "graph_breaks": sum(counters["graph_break"].values()),
        "cold_cache": on_cuda,
    }  # fmt: skip
    if on_cuda:
        figures["held_mib"] = (torch.cuda.max_memory_allocated() - held) / MIB
    return figures


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


# --- courses -------------------------------------------------------------------------------------


class Course:
    """A plain model and, once it is asked for, one with fusedlib's operations and equal weights."""

    true: dict[str, Tensor]
    usual: dict[str, check.Errors]

    def __init__(self, case: Case) -> None:
        self.case = case
        self.plain = llama.build(case["model"], case["dtype"], case["device"])
        self.plain.train(case["subject"] == "training")
        self.twin: nn.Module | None = None

    def model_of(self, arm: Arm) -> nn.Module:
        """The model that an arm runs."""
        if arm.fused and self.twin is None:
            self.twin = copy.deepcopy(self.plain)
            fusedlib.apply_to(self.twin)
        return self.twin if arm.fused and self.twin is not None else self.plain

    def enter(self, case: Case) -> Entry:
        """Compile an arm, see that it has settled, and hold it against the truth.

        Raises:
            Unavailable: it is not ready in time.
            Wrong: its results miss.
        """
        one = rivals.get(TASK, case["provider"])
        within: AbstractContextManager[Any] = nullcontext()
        if "compiles" in one.traits:
            torch.compiler.reset()  # also gives back the graphs of the arm before
            within = limited(case["limit_s"])
        free_memory()
        arm = one.build()
        model = self.model_of(arm)
        try:
            with cold(case["device"]), within:
                figures, lap = self.set_up(model, arm)
        except TooLong:
            torch.compiler.reset()
            raise Unavailable(
                f"not ready after {case['limit_s']:g} s, the most that this study lets an arm take"
            ) from None
        weights = sum(p.nbytes for p in model.parameters()) / MIB
        figures |= {"weights_mib": weights, "path": llama.path_of(case)}
        if "held_mib" in figures:
            figures["peak_mib"] = weights + figures["held_mib"]
        return Entry({**one.facts(), **figures}, lambda heat: _watched(lap(heat)))

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Lap]]:
        """Figures of an arm that was found right, and what makes its lap in a heat."""
        raise NotImplementedError

    def judged(self, found: Mapping[str, Tensor]) -> dict[str, Any]:
        """The largest relative error, as a figure.

        Raises:
            Wrong: the rule of `check` rejects one of the results.
        """
        errors = check.errors(found, self.true)
        figures = {"error": max(e.norm for e in errors.values())}
        if wrong := check.misses(errors, self.usual, getattr(torch, self.case["dtype"])):
            raise Wrong("; ".join(wrong[:5]), figures)
        return figures


class Forward(Course):
    """Logits of a batch; the last sequence's are held against fp32."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        size = case["batch_size"], case["context_length"]
        self.ids = llama.tokens(case["model"], *size, case["device"])
        with torch.no_grad():
            with in_fp32(self.plain) as exact:
                self.true = {"logits": exact(self.ids[-1:]).logits[0]}
            self.usual = check.errors({"logits": self.plain(self.ids).logits[-1]}, self.true)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Lap]]:
        """The whole batch's logits, once a turn."""
        call = arm.compile(model)

        @torch.no_grad()
        def run() -> Tensor:
            torch.compiler.cudagraph_mark_step_begin()
            logits: Tensor = call(self.ids).logits
            return logits

        figures = settled(run, self.case["device"])
        figures |= self.judged({"logits": run()[-1]})
        return figures, lambda heat: Lap(run)


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
            model(prompt, past_key_values=self.cache, use_cache=True)

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
        found: Tensor = self.call(token, past_key_values=self.cache, use_cache=True).logits[:, -1]
        return found

    def forced(self, tokens: Tensor) -> Tensor:
        """Logits behind each of these tokens (1, n), which follow the prompt."""
        self.rewind()
        return torch.cat([self.logits(t[None, None]).clone() for t in tokens[0]])

    @torch.no_grad()
    def generate(self, count: int, sample: Call) -> None:
        """So many tokens, each drawn from the logits behind the one before."""
        for _ in range(count):
            self.token.copy_(sample(self.logits(self.token)))


class Decoding(Course):
    """Tokens one by one; logits with the cache are held against fp32 without one."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.ids = llama.tokens(case["model"], 1, PROMPT + FORCED, case["device"])
        with torch.no_grad(), in_fp32(self.plain) as exact:
            self.true = {"logits": exact(self.ids).logits[0, PROMPT:]}
        logits = self.session(self.plain, self.plain).forced(self.ids[:, PROMPT:])
        self.usual = check.errors({"logits": logits}, self.true)

    def session(self, model: nn.Module, call: Call) -> Session:
        """A new sequence that begins with the prompt; the cache ends at a multiple of 64."""
        length = -(-(PROMPT + max(self.case["context_length"], FORCED, TURN)) // 64) * 64
        return Session(model, call, self.ids[:, :PROMPT], length)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Lap]]:
        """`TURN` tokens a turn, from the prompt again when the cache is full."""
        session = self.session(model, arm.compile(model))

        def once() -> None:
            session.rewind()
            session.logits(self.ids[:, PROMPT : PROMPT + 1])

        figures = settled(once, self.case["device"])
        figures |= self.judged({"logits": session.forced(self.ids[:, PROMPT:])})
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

        def lap(heat: Case) -> Lap:
            sample, told = self.sampler(heat, arm)
            session.rewind()
            session.generate(LEAST_CALLS, sample)
            return Lap(lambda: session.generate(TURN, sample), prepare, figures=told)

        return figures, lap

    def sampler(self, heat: Case, arm: Arm) -> tuple[Call, dict[str, Any]]:
        """The heat's sampler, compiled in a generation, with `sampler_s` of its first calls and
        its `misfit`.

        Raises:
            Wrong: what it draws is not distributed so.
        """
        sample, device = SAMPLERS[heat["sampler"]], heat["device"]
        width, dtype = self.true["logits"].shape[-1], getattr(torch, heat["dtype"])
        with cold(device), torch.no_grad():
            if heat["experiment"] == "generation":
                sample = arm.compile(sample)
            begin = time.perf_counter()
            for _ in range(LEAST_CALLS):
                torch.compiler.cudagraph_mark_step_begin()
                sample(torch.zeros(1, width, dtype=dtype, device=device))
            timing.synchronize(device)
            figures = {"sampler_s": time.perf_counter() - begin}
            figures["misfit"] = misfit(sample, width, dtype, device)
        if not figures["misfit"] < MOST_MISFIT:
            raise Wrong(f"{DRAWS} draws miss their probabilities: {figures}", figures)
        return sample, figures


class Training(Course):
    """A step's loss and the gradient of every parameter, held against fp32 on the whole batch."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        size = case["batch_size"], case["context_length"]
        self.ids = llama.tokens(case["model"], *size, case["device"])
        self.names = [name for name, _ in self.plain.named_parameters()]
        with in_fp32(self.plain) as exact:
            self.true = self.results(exact, exact)
        self.usual = check.errors(self.results(self.plain, self.plain), self.true)
        self.plain.zero_grad(set_to_none=True)
        self.initial = {name: value.clone() for name, value in self.plain.state_dict().items()}
        self.programs: list[Any] = []

    def results(self, model: nn.Module, call: Call) -> dict[str, Tensor]:
        """Loss and gradients of one step by the names of checkpoints."""
        model.zero_grad(set_to_none=True)
        loss = call(self.ids, labels=self.ids).loss
        loss.backward()
        return {"loss": loss.detach()} | llama.gradients(model, self.names)

    def set_up(self, model: nn.Module, arm: Arm) -> tuple[dict[str, Any], Callable[[Case], Lap]]:
        """`STEPS` steps a turn with the heat's optimizer, after one that is not counted."""
        for former in self.programs:
            former.optimizer = None  # with its moments
        free_memory()
        model.load_state_dict(self.initial)
        model.zero_grad(set_to_none=True)  # of the arm before, which would count as there already
        program: Any = llama.Program(model, arm.compile(model), self.ids)
        self.programs.append(program)
        figures = settled(program.issue, self.case["device"])
        figures |= self.judged({"loss": program.loss} | llama.gradients(model, self.names))
        model.zero_grad(set_to_none=True)

        def lap(heat: Case) -> Lap:
            program.optimizer = None
            program.optimizer = OPTIMIZERS[heat["optimizer"]](model.parameters())
            made = step_clock.lap(program, steps=STEPS)
            if heat["device"] == "cuda":
                keeps = "graphs" in rivals.get(TASK, heat["provider"]).traits
                made.figures |= taken(program, figures["held_mib"], keeps)
            return made

        return figures, lap


def taken(program: Any, held_mib: float, keeps: bool) -> dict[str, float]:
    """MiB of a training's step that has run before, by what they are for.

    `peak_mib` is that of the whole step: weights and the optimizer's state lie there throughout;
    over them are first the peak of forward and backward, gradients with it, then gradients and the
    optimizer's temporaries.

    Args:
        program: with an optimizer.
        held_mib: the peak of forward and backward over weights, without gradients before.
        keeps: whether that memory is a CUDA graph's, which has it during the update too.
    """
    program.issue()
    optimizer, before = program.optimizer, torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    temporaries = (torch.cuda.max_memory_allocated() - before) / MIB
    weights = list(program.model.parameters())
    kept = [v for state in optimizer.state.values() for v in state.values()]
    state = sum(v.nbytes for v in kept if isinstance(v, Tensor)) / MIB
    gradients = sum(p.grad.nbytes for p in weights if p.grad is not None) / MIB
    over = held_mib + temporaries if keeps else max(held_mib, gradients + temporaries)
    return {
        "peak_mib": sum(p.nbytes for p in weights) / MIB + state + over, "state_mib": state,
        "gradients_mib": gradients, "temporaries_mib": temporaries,
    }  # fmt: skip


SUBJECTS: dict[str, tuple[str, type[Course]]] = {
    "forward": ("forward", Forward), "inference": ("decoding", Decoding),
    "generation": ("decoding", Decoding), "training": ("training", Training),
    "dynamic": ("training", Training),
}  # fmt: skip
"""Course by experiment; experiments of one subject share it, with what is compiled."""


def work(case: Case) -> dict[str, Any]:
    """Tokens of a sample."""
    decoding = case["subject"] == "decoding"
    return {"tokens": TURN if decoding else case["batch_size"] * case["context_length"]}


# --- one length a step ---------------------------------------------------------------------------


def lengths(case: Case) -> list[int]:
    """Tokens a sequence of each iteration, the same for all arms."""
    generator = torch.Generator().manual_seed(0)
    size = (case["repetitions"],)
    longest = case["context_length"]
    drawn: list[int] = torch.randint(
        min(SHORTEST, longest), longest + 1, size, generator=generator
    ).tolist()
    return drawn


def dynamic(case: Case) -> dict[str, Any]:
    """Iterations of a training from its very first step, each with a length of its own.

    Returns:
        Wall times of the iterations, their sum (`total_s`, None where it was stopped) and graphs
        compiled by then; `stopped` says after which the time was up. The first one makes no update,
        so that its gradients can be compared.

    Raises:
        Unavailable: not even the first iteration was done in time.
        Wrong: its results miss.
    """
    require_possible(case)
    torch.compiler.reset()
    free_memory()
    asked, device, one = lengths(case), case["device"], rivals.get(TASK, case["provider"])
    course = Training({**case, "context_length": asked[0]})
    arm, limit = one.build(), case["limit_s"] or 1e6
    model = course.model_of(arm)
    program: Any = llama.Program(model, arm.compile(model), course.ids)
    batches = [llama.tokens(case["model"], case["batch_size"], n, device) for n in asked]
    times: list[float] = []
    graphs: list[int] = []
    checked: dict[str, Any] = {}
    with cold(device):
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
            graphs.append(graphs_compiled() - start)
            if len(times) == 1:
                gradients = llama.gradients(model, course.names)
                checked = course.judged({"loss": program.loss} | gradients)
                program.optimizer = OPTIMIZERS[case["optimizer"]](model.parameters())
    if not times:
        raise Unavailable(f"not one iteration was done in {limit:g} s")
    done = len(times) == len(asked)
    stopped = None if done else f"after {len(times)} of {len(asked)}, when {limit:g} s were over"
    return {
        **one.facts(), **checked, **summarize(times), "lengths": asked[: len(times)],
        "graphs_by_then": graphs, "graphs": graphs[-1], "stopped": stopped,
        "total_s": sum(times) / 1e3 if done else None, "path": llama.path_of(case),
        "cold_cache": device == "cuda",
    }  # fmt: skip


# --- what was measured by which code -------------------------------------------------------------


def _code(*own: Any) -> code.Code:
    common = (llama.build, llama.tokens, Course, settled, in_fp32, cold)
    return code.Code((race, timing, check), (*common, *own), rivals.fingerprints(TASK))


def study_code() -> code.Code:
    """Fingerprints of study 12's rows."""
    tokenwise, trained = (_code(Session, Decoding, misfit), (llama.Program, Training))
    codes = {
        "ceiling": ALONE["ceiling"], distributed.EXPERIMENT: distributed.CODE,
        "forward": _code(Forward), "inference": tokenwise, "generation": tokenwise,
        "training": _code(*trained, step_clock.lap, taken), "dynamic": _code(*trained, dynamic),
    }  # fmt: skip
    return code.ByExperiment((), (), codes=codes)


EVENT = Event(
    course=lambda case: SUBJECTS[case["experiment"]][1](case), available=require_possible,
    fields=("subject", "model", "batch_size", "context_length", "dtype", "device"),
    work=work, warmup=1, bursts=False, label=label,
)  # fmt: skip

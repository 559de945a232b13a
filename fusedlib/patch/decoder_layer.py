"""A decoder layer in half precision as two autograd functions, one on each side of attention.

    AttentionInput    n = norm(x)       q, k = rotated(n Wqᵀ), rotated(n Wkᵀ)     v = n Wvᵀ
    LayerOutput       s = x + a Woᵀ     n = norm(s)                              y = s + MLP(n)

With few tokens the host decides how long a step takes, and each module, view and autograd node in
Python costs it more than a launch. So `LayerModules` reads a layer's modules once, and `LayerPlan`
keeps the launches of all calls with the same shapes. The stream x passes through `AttentionInput`
unchanged: its two gradients are then added inside the norm's backward. Backward computes the norms'
outputs again; they are not kept.

A layer is computed so where its modules are what they were when `apply_to` fused them. Hooks,
adapters, a replaced `forward`, torch.compile, autocast and transforms of torch.func send it the
other way, module by module.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import reduce
from itertools import repeat
from operator import attrgetter, contains, itemgetter, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.nn.functional import linear

from fusedlib.call_context import autocast_enabled, is_plain_eager
from fusedlib.fused import LINEAR_FORWARDS, fusion_state
from fusedlib.kernels.host import route
from fusedlib.kernels.host.autograd import gradients as mlp_gradients
from fusedlib.kernels.host.autograd import save_for_backward, saved_for_backward
from fusedlib.kernels.host.first_order import first_order
from fusedlib.kernels.host.internals import (
    COMPILED_CALL,
    has_global_hooks,
    is_transform_wrapper,
    is_transformed,
    own_hooks,
)
from fusedlib.kernels.host.launch import (
    MAX_CACHED_LAUNCHES,
    Launch,
    allocator,
    contiguous_layout,
    current_index,
)
from fusedlib.kernels.host.plan import contiguous_and_aligned
from fusedlib.kernels.host.plan_cache import plan_for as mlp_plan_for
from fusedlib.kernels.host.prebuild import build_for_training
from fusedlib.kernels.rms_norm import backward_launch, forward_launch, parts_of, sum_launch
from fusedlib.kernels.rope import normed_backward_launch, rotation_launch
from fusedlib.kernels.rope import parts_of as rope_parts_of
from fusedlib.patch import qkv

METADATA = attrgetter("shape", "dtype", "device")
WEIGHT, BIAS = itemgetter("weight"), itemgetter("bias")
PARAMETERS = frozenset((Parameter, type(None)))


class LayerModules:
    """The modules that a layer consists of, each read once.

    Attributes:
        are_supported: the functions of this file compute what these modules do.
        attention: the attention, where they are supported.
    """

    def __init__(self, layer: Any) -> None:
        self._owners = [vars(layer)]
        self._owners += [vars(m) for m in layer.children() if isinstance(m, nn.Module)]
        self._children = self._read()
        self._types = [*map(type, self._children)]
        self._fusions = [*map(fusion_state, (layer, *layer.children()))]
        self.are_supported = False
        self._find(layer)

    def _read(self) -> list[Any]:
        return [child for owner in self._owners for child in owner["_modules"].values()]

    def _find(self, layer: Any) -> None:
        from fusedlib.patch import modules

        attention, mlp = layer.self_attn, layer.mlp
        norms = [layer.input_layernorm, layer.post_attention_layernorm]
        if not (
            isinstance(attention, modules.FusedAttention) and isinstance(mlp, modules.FusedMLP)
        ):
            return
        head_norms = [attention.q_norm, attention.k_norm] if attention._norms else []
        linears = [
            owner._modules.get(f"{name}_proj")
            for owner, names in ((attention, "qkvo"), (mlp, ("gate", "up", "down")))
            for name in names
        ]
        if (
            any(getattr(n, "_fused", None) is not modules.FusedRMSNorm for n in norms + head_norms)
            or any(getattr(type(m), "forward", None) not in LINEAR_FORWARDS for m in linears)
            or not modules.is_silu(mlp._modules.get(mlp._activation))
            or type(attention)._projected is not modules.FusedAttention._projected
            or not attention._turns()
            or not {"attention", "rope"} <= attention._fusion.switches
        ):
            return
        self.attention, self._norms = attention, [vars(n) for n in norms + head_norms]
        self._modules = [vars(m) for m in self._children if m is not None]
        owners: list[Any] = [norms[0], *linears[:4], norms[1], *linears[4:], *head_norms]
        self._parameters = [vars(m)["_parameters"] for m in owners]
        self._may_have_bias, self._without_bias = (
            [vars(m)["_parameters"] for m in some] for some in (linears[:3], linears[3:])
        )
        self.are_supported = True

    def are_current(self, layer: Any) -> bool:
        """Whether the layer still consists of these modules."""
        return (
            self._owners[0] is layer.__dict__
            and self._read() == self._children
            and [*map(type, self._children)] == self._types
            and [*map(fusion_state, (layer, *layer._modules.values()))] == self._fusions
        )

    def are_plain(self) -> bool:
        """Whether calls of all modules would compute what their classes do and nothing else."""
        modules = self._modules
        return not (
            any(map(any, map(own_hooks, modules)))
            or any(map(contains, modules, repeat("forward")))
            or any(map(contains, modules, repeat(COMPILED_CALL)))
            or any(map(BIAS, self._without_bias))
            or has_global_hooks()
        )

    def weights(self) -> tuple[list[Any], list[Any]]:
        """Of norm, q, k, v, o, norm, gate, up, down, and the norms of q and k, where heads have
        them; biases of q, k and v, each or None.
        """
        return [*map(WEIGHT, self._parameters)], [*map(BIAS, self._may_have_bias)]

    def eps(self) -> list[float]:
        """Of both norms, and of those of q and k."""
        return [norm["variance_epsilon"] for norm in self._norms]


def run_layer(
    layer: Any, x: Tensor, attention_mask: Tensor | None, past_key_values: Any,
    position_embeddings: tuple[Tensor, Tensor] | None, kwargs: dict[str, Any],
) -> Tensor | None:  # fmt: skip
    """The stream behind the layer, or None where it goes module by module."""
    modules = layer.__dict__.get("_layer_modules")
    if modules is None or not modules.are_current(layer):
        modules = layer.__dict__["_layer_modules"] = LayerModules(layer)
    if not modules.are_supported or position_embeddings is None or not modules.are_plain():
        return None
    weights, biases = modules.weights()
    plan = plan_for_call(x, position_embeddings, weights, biases, modules)
    if plan is None:
        return None
    cos, sin = position_embeddings
    w_norm, w_q, w_k, w_v, w_o, w_norm_2, w_gate, w_up, w_down, *head_norms = weights
    n_q, n_k = head_norms or (None, None)
    q, k, v, x = apply_attention_input(plan, x, w_norm, w_q, w_k, w_v, *biases, n_q, n_k, cos, sin)
    attended, _ = modules.attention.attend(q, k, v, attention_mask, past_key_values, kwargs)
    training = torch.is_grad_enabled()
    return apply_layer_output(plan, attended, x, w_o, w_norm_2, w_gate, w_up, w_down, training)


class Sizes(NamedTuple):
    """Of a layer's call."""

    batch: int
    tokens: int
    hidden: int
    heads: int
    key_heads: int
    head_dim: int


_PLANS: dict[Hashable, Any] = {}
_NOT_CACHED = object()


def plan_for_call(
    x: Tensor,
    tables: tuple[Tensor, Tensor],
    weights: list[Any],
    biases: list[Any],
    modules: LayerModules,
) -> LayerPlan | None:
    """The plan for a call on such operands; None where it goes module by module."""
    if not is_plain_eager(x, *tables) or not PARAMETERS.issuperset(map(type, (*weights, *biases))):
        return None
    present = [b for b in biases if b is not None]
    operands = x, *tables, *weights, *present
    eps = modules.eps()
    try:
        key = *map(METADATA, operands), len(present), *eps
    except AttributeError:  # a weight that is None
        return None
    plan = _PLANS.get(key, _NOT_CACHED)
    if plan is _NOT_CACHED:
        if len(_PLANS) >= MAX_CACHED_LAUNCHES:
            _PLANS.clear()
        plan = _PLANS[key] = _make_plan(operands, len(present), eps, modules)
    if plan is None or is_transformed() or is_transform_wrapper(x):
        return None
    if (plan.index >= 0 and plan.index != current_index()) or autocast_enabled(x.device.type):
        return None
    if torch.is_grad_enabled() and (tables[0].requires_grad or tables[1].requires_grad):
        return None
    if not all(map(Tensor.is_contiguous, operands)):
        return None
    return None if reduce(or_, map(Tensor.data_ptr, operands)) % 16 else plan


def _make_plan(
    operands: tuple[Tensor, ...], biased: int, eps: list[float], modules: LayerModules
) -> LayerPlan | None:
    """A new plan, where the operands go together and are such as the kernels take."""
    x, cos, sin, _, w_q, w_k, _, _, _, w_gate, w_up, w_down, *_ = operands
    if x.ndim != 3 or not x.numel() or biased not in (0, 3) or eps[2:3] != eps[3:]:
        return None
    if len({(t.dtype, t.device) for t in operands}) != 1 or not route.runs_fused_kernels(x):
        return None
    batch, tokens, hidden = x.shape
    head_dim = modules.attention.head_dim
    heads, key_heads = w_q.shape[0] // head_dim, w_k.shape[0] // head_dim
    sizes = Sizes(batch, tokens, hidden, heads, key_heads, head_dim)
    inner, rows, key_rows = w_gate.shape[0], heads * head_dim, key_heads * head_dim
    shapes = [
        (hidden,), (rows, hidden), (key_rows, hidden), (key_rows, hidden), (hidden, rows),
        (hidden,), (inner, hidden), (inner, hidden), (hidden, inner),
    ]  # fmt: skip
    shapes += [(head_dim,)] * len(eps[2:]) + [(rows,), (key_rows,), (key_rows,)][:biased]
    table = cos.shape == sin.shape and cos.ndim == 3 and cos.shape[0] in (1, batch)
    table = table and cos.shape[1] == tokens and cos.shape[2] == head_dim
    given = [tuple(t.shape) for t in operands[3:]]
    if not table or head_dim % 8 or given != shapes:
        return None
    return LayerPlan(x, cos, sin, sizes, eps, (w_gate, w_up, w_down))


class LayerPlan:
    """What depends on the metadata of a layer's operands and on nothing else.

    Attributes:
        sizes: of the call.
        mlp: the plan of its MLP.
        index: of the device; -1 off a GPU.
    """

    def __init__(
        self, x: Tensor, cos: Tensor, sin: Tensor, sizes: Sizes, eps: list[float],
        mlp: tuple[Tensor, Tensor, Tensor],
    ) -> None:  # fmt: skip
        batch, tokens, hidden, heads, key_heads, head_dim = self.sizes = sizes
        self.rows, self.index = batch * tokens, x.get_device()
        self.shape, self.eps = x.shape, eps
        rows, dtype, device = self.rows, x.dtype, x.device
        self.widths = heads * head_dim, key_heads * head_dim, key_heads * head_dim
        self.new = allocator(device)
        self.mlp = mlp_plan_for(x.view(rows, hidden), *mlp)
        self._matrix = contiguous_layout((rows, hidden), dtype)
        self._rstd = contiguous_layout((rows,), torch.float32)
        self._norm_weight = contiguous_layout((hidden,), dtype)
        self._joined = contiguous_layout((rows, sum(self.widths)), dtype)
        self._partial = contiguous_layout((parts_of(rows, hidden, device), hidden), torch.float32)
        self._nothing = contiguous_layout((0,), torch.float32)
        self._norms = [
            forward_launch((rows, hidden), (hidden, hidden), each, False, True) for each in eps[:2]
        ]
        self._norm_with_residual = forward_launch(
            (rows, hidden), (hidden, hidden), eps[1], True, True
        )
        self._sum_partials = sum_launch(self._partial[0][0], hidden, device)
        # q, k and v as attention takes them: sizes and strides.
        self.heads = [
            ((batch, count, tokens, head_dim), (tokens * width, head_dim, width, 1))
            for count, width in zip((heads, key_heads, key_heads), self.widths, strict=True)
        ]
        given = [x.new_empty_strided(*metadata) for metadata in self.heads[:2]]
        self.head_eps = eps[2] if eps[2:] else None  # of the norms of q and k
        self._rotation = rotation_launch(given, given, cos, sin, None, False, self.head_eps)
        parts = rope_parts_of(rows * heads, head_dim, device)
        self._head_partial = contiguous_layout((parts, 2 * head_dim), torch.float32)
        self._head_norm_weights = contiguous_layout((2 * head_dim,), dtype)
        self._sum_head_partials = sum_launch(parts, 2 * head_dim, device)
        self._launches: dict[Hashable, Launch] = {}

    def normalise(self, index: int, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """The first (0) or second (1) norm's output (rows, hidden) and rstd."""
        y, rstd = self.new(*self._matrix), self.new(*self._rstd)
        self._norms[index](x, x, weight, y, x, rstd)
        return y, rstd

    def add_and_normalise(
        self, x: Tensor, residual: Tensor, weight: Tensor
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """The second norm's of x + residual, which is then where x was."""
        y, rstd = self.new(*self._matrix), self.new(*self._rstd)
        self._norm_with_residual(x, residual, weight, y, x, rstd)
        return y, rstd

    def norm_gradients(
        self, dy: Tensor | None, ds: Tensor | None, s: Tensor, weight: Tensor, rstd: Tensor,
        wants_s: bool, wants_weight: bool,
    ) -> tuple[Tensor | None, Tensor | None]:  # fmt: skip
        """d_s (rows, hidden) and d_weight, each if wanted, of contiguous matrices."""
        if dy is None:
            return (ds if wants_s else None), None
        key = ds is not None, wants_s, wants_weight
        launch = self._launches.get(key)
        if launch is None:
            shape, parts = self._matrix[0], self._partial[0][0]
            launch = backward_launch(shape, (shape[1], shape[1]), parts, *key)
            self._launches[key] = launch
        d_s = self.new(*self._matrix) if wants_s else s
        partial = self.new(*(self._partial if wants_weight else self._nothing))
        launch(dy, dy if ds is None else ds, s, weight, rstd, d_s, partial)
        if not wants_weight:
            return (d_s if wants_s else None), None
        d_weight = self.new(*self._norm_weight)
        self._sum_partials(partial, d_weight)
        return (d_s if wants_s else None), d_weight

    def rotate(
        self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, n_q: Tensor | None, n_k: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """q and k (rows, heads · head_dim): where they lie, or beside them after their norms."""
        if n_q is None or n_k is None:
            self._rotation(q, k, q, k, cos, sin, cos, cos, cos)
            return q, k
        results = torch.empty_like(q), torch.empty_like(k)
        self._rotation(q, k, *results, cos, sin, cos, n_q, n_k)
        return results

    def rotate_back(
        self, dq: Tensor, dk: Tensor, cos: Tensor, sin: Tensor, normed: tuple[Tensor, ...]
    ) -> tuple[Tensor, Tensor | None]:
        """d_q and d_k in a matrix of all three gradients (rows, columns of q, k and v), and the
        gradients of both norms' weights (2 head_dim,).

        Args:
            dq: (batch, heads, tokens, head_dim), of the rotated q, with any strides; dk likewise.
            cos: as in `rotate`, with sin.
            normed: q and k before their norms, and the norms' weights; none without.
        """
        upstream = [_with_contiguous_heads(dq), _with_contiguous_heads(dk)]
        joined = self.new(*self._joined)
        q, k, _ = self.widths
        columns = joined[:, :q], joined[:, q : q + k]
        key = upstream[0].stride(), upstream[1].stride()
        launch = self._launches.get(key)
        if launch is None:
            batch, tokens, _, _, _, head_dim = self.sizes
            results = [d.view(batch, tokens, -1, head_dim).transpose(1, 2) for d in columns]
            if self.head_eps is None:
                launch = rotation_launch(upstream, results, cos, sin, None, True)
            else:
                given = [dq.new_empty_strided(*metadata) for metadata in self.heads[:2]]
                parts = self._head_partial[0][0]
                launch = normed_backward_launch(
                    given, upstream, results, cos, self.head_eps, parts
                )  # fmt: skip
            self._launches[key] = launch
        if not normed:
            launch(*upstream, *columns, cos, sin, cos, cos, cos)
            return joined, None
        partial, d_weights = self.new(*self._head_partial), self.new(*self._head_norm_weights)
        launch(*normed[:2], *upstream, *columns, cos, sin, *normed[2:], partial)
        self._sum_head_partials(partial, d_weights)
        return joined, d_weights


def _contiguous(*operands: Tensor | None) -> Any:
    """The operands, contiguous and at 16 bytes: the memory of a saved tensor can have been
    exchanged since the forward (`tensor.data = ...`), and gradients may have any strides.
    """
    return contiguous_and_aligned(*operands)


def _with_contiguous_heads(d: Tensor) -> Any:
    """Each head contiguous, at 16 bytes."""
    return _contiguous(d)[0] if d.stride(-1) != 1 or d.data_ptr() % 16 else d


class AttentionInput(torch.autograd.Function):
    """q, k and v (batch, heads, tokens, head_dim), and x itself, for who adds to the stream."""

    @staticmethod
    def forward(ctx: Any, plan: LayerPlan, x: Tensor, *operands: Tensor | None) -> Any:
        """Of x, the norm's weight, weights and biases of q, k and v, weights of the norms of q and
        k, cos and sin.
        """
        w_norm, w_q, w_k, w_v, b_q, b_k, b_v, n_q, n_k, cos, sin = operands
        assert w_norm is not None and w_q is not None and w_k is not None and w_v is not None
        assert cos is not None and sin is not None
        normed, rstd = plan.normalise(0, x, w_norm)
        q, k, v = qkv.Projections.forward(normed, w_q, w_k, w_v, b_q, b_k, b_v)
        normed_heads = () if n_q is None else (q, k, n_q, n_k)
        q, k = plan.rotate(q, k, cos, sin, n_q, n_k)
        ctx.plan = plan
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, w_norm, rstd, w_q, w_k, w_v, cos, sin, *normed_heads)
        of_q, of_k, of_v = plan.heads
        return q.as_strided(*of_q), k.as_strided(*of_k), v.as_strided(*of_v), x

    @staticmethod
    @first_order
    def backward(
        ctx: Any, dq: Tensor | None, dk: Tensor | None, dv: Tensor | None, ds: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Those of x and of all weights and biases that are wanted."""
        x, w_norm, rstd, w_q, w_k, w_v, cos, sin, *heads = _contiguous(*ctx.saved_tensors)
        plan: LayerPlan = ctx.plan
        wants = ctx.needs_input_grad
        if dq is None and dk is None and dv is None:
            return None, ds, *(None,) * 11
        dq, dk, dv = (
            x.new_zeros(shape) if d is None else d
            for d, (shape, _) in zip((dq, dk, dv), plan.heads, strict=True)
        )
        weights = w_q, w_k, w_v
        joined, d_heads = plan.rotate_back(dq, dk, cos, sin, heads)
        parts = [*joined.split(plan.widths, dim=1)]
        values, joins = dv.transpose(1, 2), qkv.joins(*weights)
        if joins:
            parts[2].view(values.shape).copy_(values)
        else:
            parts[2] = values.reshape(plan.rows, -1)
        wants_normed = wants[1] or wants[2]
        normed = plan.normalise(0, x, w_norm)[0] if any(wants[3:6]) else None
        d_normed, *d_weights = qkv.gradients(
            normed, weights, parts, wants_normed, wants[3:6], joined if joins else None
        )
        d_biases = [part.sum(0) if want else None for part, want in zip(parts, wants[6:9])]  # noqa: B905
        if ds is not None:
            ds = _matrix(ds, plan.rows)
        d_x, d_norm = plan.norm_gradients(d_normed, ds, x, w_norm, rstd, wants[1], wants[2])
        if d_x is not None:
            d_x = d_x.view(plan.shape)
        d_q_norm, d_k_norm = (None, None) if d_heads is None else d_heads.chunk(2)
        return None, d_x, d_norm, *d_weights, *d_biases, d_q_norm, d_k_norm, None, None


class LayerOutput(torch.autograd.Function):
    """The stream behind the layer (batch, tokens, hidden)."""

    @staticmethod
    def forward(
        ctx: Any, plan: LayerPlan, attended: Tensor, stream: Tensor, w_o: Tensor, w_norm: Tensor,
        w_gate: Tensor, w_up: Tensor, w_down: Tensor, training: bool,
    ) -> Tensor:  # fmt: skip
        """Of attention's result (batch, tokens, heads · head_dim) and the stream before it."""
        mlp = plan.mlp
        training = training and any(ctx.needs_input_grad)
        if mlp.training_not_built and training:
            build_for_training(mlp, "gate_up")
        attended = _matrix(attended, plan.rows)
        s = linear(attended, w_o)
        normed, rstd = plan.add_and_normalise(s, stream, w_norm)
        y, gate_up = mlp.forward(normed, w_gate, w_up, w_down, training)
        y.add_(s)
        ctx.plan = plan
        save_for_backward(ctx, attended, s, rstd, w_o, w_norm, w_gate, w_up, w_down, gate_up)
        # In place: autograd lets nobody write to a view that a Function returns.
        return y.resize_(plan.shape)

    @staticmethod
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        """Those of attention's result, the stream and all weights that are wanted."""
        kept, in_place = saved_for_backward(ctx)
        attended, s, rstd, w_o, w_norm, w_gate, w_up, w_down, gate_up = kept = _contiguous(*kept)
        plan: LayerPlan = ctx.plan
        _, wants_attended, wants_stream, wants_o, wants_norm, *wants_mlp, _ = ctx.needs_input_grad
        wants_s = wants_attended or wants_stream or wants_o
        dy = _matrix(upstream, plan.rows)
        normed = plan.normalise(1, s, w_norm)[0] if wants_mlp[0] or wants_mlp[1] else None
        wants = wants_s or wants_norm, *wants_mlp
        saved = [normed, w_gate, w_up, w_down, gate_up]
        del kept, gate_up, normed
        d_normed, *d_mlp = mlp_gradients(plan.mlp, wants, saved, dy, in_place)
        d_s, d_norm = plan.norm_gradients(d_normed, dy, s, w_norm, rstd, wants_s, wants_norm)
        d_attended = d_o = None
        if d_s is not None:
            if wants_attended:
                d_attended = torch.mm(d_s, w_o).view(*plan.shape[:2], w_o.shape[1])
            if wants_o:
                d_o = torch.mm(d_s.t(), attended)
            d_s = d_s.view(plan.shape) if wants_stream else None
        return None, d_attended, d_s, d_o, d_norm, *d_mlp, None


# Without `Function.apply`'s own look at torch.func, whose transforms go module by module.
apply_attention_input: Any = super(torch.autograd.Function, AttentionInput).apply
apply_layer_output: Any = super(torch.autograd.Function, LayerOutput).apply


def _matrix(x: Tensor, rows: int) -> Tensor:
    """(rows, width), contiguous, at 16 bytes."""
    [matrix] = _contiguous(x.reshape(rows, -1))
    return matrix

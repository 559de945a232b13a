"""Faults that the laws must notice: what stands in a file of `fusedlib/ops`, and what the fault has
there, maybe several times.

Noticed is what the laws of results, gradients, bounds and NaN reject, at the usual sizes and in
the first dtype. A fault that none notices is a hole in the laws: mend the laws.
"""

Faults = dict[str, tuple[str, str]]

LAST = (
    "((row + tl.arange(0, HEIGHT)) == tokens - 1)[:, None]"
    " & ((column + tl.arange(0, WIDTH)) == inner - 1)[None, :]"
)
OFF = f"tl.where({LAST}, 0.01, 0.0)"
H = "    h = activated * up"
MLP: Faults = {
    "one K block instead of the whole sum": ("range(0, hidden, BLOCK_K)", "range(0, 1, BLOCK_K)"),
    "dropped K tile": ("range(0, hidden, BLOCK_K)", "range(BLOCK_K, hidden, BLOCK_K)"),
    "dropped ragged K tile": (
        "range(0, hidden, BLOCK_K)", "range(0, hidden // BLOCK_K * BLOCK_K, BLOCK_K)",
    ),
    "gate and up swapped": (H, "    h = up * tl.sigmoid(up) * gate"),
    "wrong last ragged element": (H, f"{H} + {OFF}"),
    "wrong last ragged gradient": ("d_gate = dh", f"d_gate = {OFF} + dh"),
    "wrong derivative": ("slope(gate, activated, s, ACTIVATION)", "s"),
    "gradients swapped": ("dh * up * slope(gate, activated, s, ACTIVATION)", "dh * activated"),
    "up left out of the recomputed h": (
        "store_block(h_ptr, activated * up", "store_block(h_ptr, activated",
    ),
}  # fmt: skip
PACKED: Faults = {"where up begins left out": ("up_row.to(tl.int64) * hidden", "0")}
PAIR: Faults = {
    "gate's rows taken for up's": ("load_block(w_up, column", "load_block(w_gate, column")
}
LAST_OF_FEW = LAST.replace("inner", "width")
STORED = "store_block(c, acc, row, column, tokens, width"
FEW: Faults = {
    "dropped ragged K tiles of d_x": ("tl.cdiv(depth, DEPTH)", "depth // DEPTH"),
    "wrong last ragged element": (
        STORED, STORED.replace("acc", f"acc + tl.where({LAST_OF_FEW}, 0.1, 0.0)"),
    ),
    "gate's weight taken for up's": ("b_right + first_row * width", "b_left - depth * width"),
    "up's columns left out": ("range(0, 2 * blocks)", "range(0, blocks)"),
    "wrong factor of a weight's gradient": ("d_gate_up, x, d_w", "d_gate_up, dy, d_w"),
    "d_x left out": ("x_programs = wants[0] *", "x_programs = 0 *"),
    "a weight's gradient left out": ("down_programs = wants[2] *", "down_programs = 0 *"),
    "the other weight's gradient left out": (
        "gate_up_programs = wants[1] *", "gate_up_programs = 0 *",
    ),
}  # fmt: skip
OUTER: Faults = {
    "last tile of a span left out": ("first + SPAN * SIDE,", "first + SPAN * SIDE - SIDE,"),
    "last token left out": ("(b, 0, column, tokens,", "(b, 0, column, tokens - 1,"),
}
GELU: Faults = {
    "a coefficient of tanh": ("0.07135481627260025", "0.0713"),
    "the cubic term's slope": ("0.21406", "0.0713"),
    "the sigmoid's slope": ("activated * (1 - s) * inner", "(1 - s) * inner"),
}
EXACT_GELU: Faults = {
    "erf": ("1.0 + tl.erf", "1.001 + tl.erf"),
    "the density": ("gate * (0.398", "gate * (0.41"),
}

QKV: Faults = {
    "one K block instead of the whole sum": ("range(0, depth, DEPTH)", "range(0, 1, DEPTH)"),
    "dropped K tile": ("range(0, depth, DEPTH)", "range(DEPTH, depth, DEPTH)"),
    "dropped ragged K tile": (
        "range(0, depth, DEPTH)", "range(0, depth // DEPTH * DEPTH, DEPTH)",
    ),
    "v by k's weight": ("tl.where(is_k, w_k, w_v)", "tl.where(is_k, w_k, w_k)"),
    "k's bias for v": ("tl.where(is_k, b_k, b_v)", "tl.where(is_k, b_k, b_k)"),
    "v left out of d_x": ("range(0, q_blocks + k_blocks + v_blocks)",
                          "range(0, q_blocks + k_blocks)"),
    "v's gradient in k's place": ("tl.where(is_k, d_w_k, d_w_v)", "tl.where(is_k, d_w_k, d_w_k)"),
    "k by v's weight in d_x": ("w_k, w_v))\n        depth", "w_v, w_v))\n        depth"),
    "biases left out": ("inputs, width, BIASED,", "inputs, width, False,"),
    "last token left out of d_W": ("tile, tokens, width", "tile, tokens - 1, width"),
}  # fmt: skip

NORM: Faults = {
    "mean over the block instead of the row": (
        "axis=1) * (1.0 / WIDTH) + eps", "axis=1) * (1.0 / BLOCK) + eps"),
    "mean of squares off by a thousandth": ("(1.0 / WIDTH) + eps", "(1.0 / WIDTH) * 1.001 + eps"),
    "last row of a tile left out": ("(row < rows) & (j < WIDTH)", "(row < rows - 1) & (j < WIDTH)"),
    "last column left out": ("stream = tl.load(x + row * x_row + j, mask=inside",
                             "stream = tl.load(x + row * x_row + j, mask=inside & (j < WIDTH - 1)"),
    "residual left out of the stream": ("stream.to(tl.float32) + added.to(tl.float32)",
                                        "stream.to(tl.float32)"),
    "mean term left out of d_s": ("(d - n * mean[:, None]) * scale", "d * scale"),
    "residual's gradient left out": ("gradient += _wide(ds, row * ds_row + j, inside)", "pass"),
    "weight left out of d_s": ("gradient = (d - n", "gradient = (upstream - n"),
    "first rows alone in d_weight": ("total += upstream * n", "total = upstream * n"),
    "last partial row left out": ("(i < parts)", "(i < parts - 1)"),
}  # fmt: skip
WIDE_NORM: Faults = {
    "first rows alone in d_weight": ("(j < WIDTH) & (first > start)", "(j < 0)"),
    "mean of the first block": (
        "mean += tl.sum(d * n, axis=1)", "mean += tl.sum(d * n, axis=1) * (left == 0)"),
}  # fmt: skip

ROPE: Faults = {
    "backward turns on": ("        e, f = -f, -e\n", "        e, f = e, f\n"),
    "backward with the other half's sine": ("e, f = -f, -e", "e, f = -e, -f"),
    "other half's cosine": ("b * d + a * f", "b * c + a * f"),
    "turned the other way": ("a * c - b * e", "a * c + b * e"),
    "last token left out": ("(token < tokens)[:, None]", "(token < tokens - 1)[:, None]"),
    "first token's angles for all": ("batch * table_batch + token * table_row",
                                     "batch * table_batch + token * 0"),
    "first sequence's angles for all": ("batch * table_batch + token", "token"),
    "k's first head for all": ("batch, head - heads, token", "batch, head * 0, token"),
}  # fmt: skip
WIDER_ROPE: Faults = {
    "rest of the head left out": ("    if REST + ZEROS:", "    if False:"),
    "zeros left out": ("(j < REST + ZEROS)", "(j < REST)"),
    "the next head's instead of zeros": ("present & (j < REST), other", "present, other"),
}

LOSS: Faults = {
    "the last class left out": ("vocabulary, x, float(", "vocabulary - 1, x, float("),
    "lanes' maxima ignored": ("total * tl.exp(largest - m)", "total"),
    "the wrong class": ("columns == label,", "columns == label + 1,"),
    "a block not written": ("tl.store(logits + columns, d", "tl.store(logits + lanes, d"),
    "smoothing not in the gradient": (" at_label + share, share)", " 1.0, 0.0)"),
    "smoothing not in the loss": ("label_smoothing * (average * m", "0 * (average * m"),
    "half of z-loss's gradient": ("of_p + 2 * squared", "of_p + 1 * squared"),
    "z-loss not in the loss": ("+ squared * lse * lse", ""),
    "z-loss not by class": ("z_loss * by_label", "z_loss * 1.0"),
    "the label not by class": (
        "(1 - label_smoothing) * by_label\n    sq", "(1 - label_smoothing) * 1.0\n    sq",
    ),
    "smoothing not by class in the loss": (" x *= by", " x *= 1.0"),
    "smoothing not by class in the gradient": ("share = share * by", "share = share"),
    "all classes' weights left out": ("average = weighed /", "average = 1.0 * vocabulary /"),
    "a softcap without derivative": (
        "d *= _softcap_derivative(x, softcap)\n                tl", "d *= 1.0\n                tl",
    ),
    "a softcap without sign": ("tl.where(u < 0, -large, large)", "large"),
    "weights not in the gradient": ("factor *= weight", "factor *= 1.0"),
    "weights not in the loss": ("loss *= weight", "loss *= 1.0"),
    "ignored rows keep their logits": ("lanes, zeros, mask=", "lanes, zeros, mask=row < 0 and "),
    "scale left out": ("factor = tl.load(scale)", "factor = 1.0"),
    "upstream left out": (".to(tl.float32) * times", ".to(tl.float32)"),
}  # fmt: skip
LOSS_CHUNKS: Faults = {
    "the last chunk's d_W alone": ("addmm(total, a,", "mm(a,"),
    "d_hidden of the first chunk": ("out=d_hidden[part]", "out=d_hidden[: h.shape[0]]"),
    "the last chunk's d_b alone": ("d_bias += ", "d_bias[:] = "),
    "a chunk with another's targets": ("target[part], weights", "target[: h.shape[0]], weights"),
}  # fmt: skip
LOG_PROBS: Faults = {
    "the last class left out": ("inside = columns < classes", "inside = columns < classes - 1"),
    "a maximum's fall left out": ("(below + drop * total) + here", "below + here"),
    "groups' falls left out": ("tl.sum((below + drop * total)", "tl.sum(below"),
    "groups' maxima ignored": ("total = tl.sum(total * tl.exp(drop))", "total = tl.sum(total)"),
    "the last slice's sum alone": ("(goes_on, tl.load(statistics + tokens), 0", "(goes_on, 0.0, 0"),
    "the maximum so far forgotten": (
        "none + tl.load(statistics, mask=later, other=-3.0e38)", "none - 3.0e38",
    ),
    "tokens of the last slice alone": ("tl.where(is_here, correct, known)", "correct"),
    "the entropy without the sum": ("log_total - below / total", "log_total"),
    "the entropy's gradient without the entropy": ("-3.0e38) + entropy)", "-3.0e38))"),
    "the entropy's gradient with another sign": ("d -= tl.load(entropy", "d += tl.load(entropy"),
    "logsumexps without a gradient": ("(sum_upstream + row) * p", "(sum_upstream + row) * 0.0"),
    "no temperature in the gradient": ("0.0, d * by_temperature)", "0.0, d)"),
    "no temperature in the logits": ("CAPPED) * by_temperature, float", "CAPPED), float"),
    "a softcap without derivative": (
        "d *= _softcap_derivative(x, softcap)\n    d = tl", "d *= 1.0\n    d = tl",
    ),
    "ignored tokens have gradients": ("label == ignore_index, 0.0, d", "label == -5, 0.0, d"),
    "another slice's tokens": ("p, first + lanes, label", "p, lanes, label"),
}  # fmt: skip
SLICES: Faults = {
    "the last slice's d_hidden alone": ("_add_product(d_hidden, log", "_add_product(None, log"),
    "d_W in the first slice's place": ("out=d_weight[part]", "out=d_weight[: w.shape[0]]"),
    "a slice with the first one's bias": ("else bias[part]", "else bias[: len(weight[part])]"),
}  # fmt: skip
BY_TOKEN: Faults = {
    "the last slice's smoothing alone": (
        "(goes_on, tl.load(statistics + 4 * tokens)", "(goes_on, 0.0",
    ),
    "the last slice's class weights alone": (
        "(goes_on, tl.load(statistics + 6 * tokens)", "(goes_on, 0.0",
    ),
    "smoothing not by class": ("share *= by", "share *= 1.0"),
    "another slice's class weights": ("class_weights + first + columns", "class_weights + columns"),
    "the label not by class": ("mask=correct == correct, other=0.0", "mask=first < 0, other=1.0"),
}  # fmt: skip

LINEAR: Faults = {
    "bias left out": ("product += bias", "pass"),
    "d_b of the first tokens": ("rows.sum(0)", "rows[1:].sum(0)"),
    "d_W of other tokens": ("product(rows.t(),", "product(rows.roll(1, 0).t(),"),
    "d_x a thousandth off": ("product(rows, weight)", "product(rows * 1.001, weight)"),
    "y a thousandth off": ("multiply(rows, weight, (F", "multiply(rows * 1.001, weight, (F"),
}
LAST_RESULT = "((i == m - 1)[:, None] & (j == n - 1)[None, :])"
DOTS = "tl.dot(al, bh, tl.dot(ah, bl))"
PRODUCT: Faults = {
    "dropped K block": ("range(begin, end", "range(begin + BLOCK_K, end"),
    "dropped ragged K block": ("k_per_split, k)", "k_per_split, k // 64 * 64)"),
    "first span lost": ("total += acc *", "total = acc *"),
    "span added twice": ("            acc = tl.zeros_like(acc)\n", ""),
    "low part of A left out": (DOTS, "tl.dot(ah, bl)"),
    "low part of B left out": (DOTS, "tl.dot(al, bh)"),
    "wrong last element": ("n + j[None, :], total,",
                           f"n + j[None, :], total + tl.where({LAST_RESULT}, 1e-3, 0.0),"),
    "first row's scale": ("2 * span * a_lines + i)", "2 * span * a_lines + i * 0)"),
    "first column's scale": ("2 * span * b_lines + j)", "2 * span * b_lines + j * 0)"),
    "half of a scale": ("((a2 & -2).to(tl.float32, bitcast=True) * second)", "second"),
    "every span scaled as the first of A": ("2 * span * a_lines", "0 * a_lines"),
    "every span scaled as the first of B": ("2 * span * b_lines", "0 * b_lines"),
}  # fmt: skip
PARTS: Faults = {
    "lines scaled by the largest of all": (
        "tl.max(magnitudes, axis=axis) >>",
        "tl.max(magnitudes * 0 + tl.max(magnitudes), axis=axis) >>",
    ),
    "scales left out": ("return (half + 127) << 23", "return (half * 0 + 127) << 23"),
    "low parts cut": ("(v - high.to(tl.float32)).to", "(v * 0.0).to"),
    "the sign of faint elements lost": ("tl.where(a == 0.0, 0.0,", "tl.where(a == a, 0.0,"),
    "inf in the high part": ("tl.minimum(tl.maximum(tl.abs(v), least), 32768.0)",
                             "tl.maximum(tl.abs(v), least)"),
}  # fmt: skip

SPLIT_PAIR: Faults = {
    "gate's rows taken for up's": ("lower_half - upper_rows.to", "source - upper_rows.to"),
}
APART: Faults = {name: MLP[name] for name in (
    "wrong derivative", "gradients swapped", "up left out of the recomputed h",
    "wrong last ragged gradient",
)}  # fmt: skip

ROLES: Faults = {  # of the Gluon kernels whose warps have roles; none may leave a warp waiting
    "the activation of up": ("activated, _ = activate(gate,", "activated, _ = activate(up,"),
    "up left out of h": ("(activated * up).to(dtype), mask=inside)\n\n\n@gluon.jit\ndef _fwd_tile",
                         "activated.to(dtype), mask=inside)\n\n\n@gluon.jit\ndef _fwd_tile"),
    "up not kept": ("target + inner, up, mask", "target + inner, gate, mask"),
    "wrong derivative": ("dh * up * slope(gate, activated, s, ACTIVATION)", "dh * up * s"),
    "gradients swapped": ("gl.store(target + inner, (dh * activated).to(dtype), mask=inside)",
                          "gl.store(target + inner, (dh * up).to(dtype), mask=inside)"),
    "gate's rows taken for up's": ("[i, inner + j], gates_ready", "[i, j], gates_ready"),
    "the last row not stored": ("(i < tokens)[:, None]", "(i < tokens - 1)[:, None]"),
    "the last column not stored": ("(j < inner)[None, :]", "(j < inner - 1)[None, :]"),
}  # fmt: skip
ROLES_PRODUCT: Faults = {  # of both who fetches and who multiplies
    "dropped K block": ("range(0, hidden, BLOCK_K)", "range(0, hidden - BLOCK_K, BLOCK_K)"),
}
SPLIT_ROLES: Faults = {
    "a span lost": ("total += _scaled", "total = _scaled"),
    "the last rows not stored": ("(i < m)[:, None]", "(i < m - 1)[:, None]"),
    "the right half on the left": ("row, column + half, m", "row, column, m"),
    "the low part of B left out": ("warpgroup_mma(ah, bl, zeros", "warpgroup_mma(al, bl, zeros"),
    "the first row's scale": ("row, a_lines, rows)", "row * 0, a_lines, rows)"),
    "half of a scale": ("((a2 & -2).to(gl.float32, bitcast=True) * second)", "second"),
}

# The operations of which one must notice, where the text stands, and the faults.
FAR_APART = "linear with terms far apart", "linear with rows far apart"
FEW_TOKENS = "swiglu_mlp of few tokens", "swiglu_mlp of few tokens, a pair"
INTERPRETED = (
    (("swiglu_mlp",), "mlp/kernels.py", MLP | PACKED),
    (("swiglu_mlp of a pair",), "mlp/kernels.py", PAIR),
    (FEW_TOKENS, "mlp/few_tokens.py", FEW),
    (FEW_TOKENS, "blocks.py", OUTER),
    (("swiglu_mlp apart",), "mlp/kernels.py", APART),
    (("swiglu_mlp split",), "matmul/kernels.py", SPLIT_PAIR),
    (("geglu_mlp",), "mlp/kernels.py", GELU),
    (("exact geglu_mlp",), "mlp/kernels.py", EXACT_GELU),
    (("q, k and v",), "qkv/kernels.py", QKV),
    (("rms_norm of a sum",), "norm/kernels.py", NORM),
    (("rms_norm of wide rows",), "norm/kernels.py", WIDE_NORM),
    (("rope",), "rope/kernels.py", ROPE),
    (("rope at positions",), "rope/kernels.py", WIDER_ROPE),
    (("mean loss",), "loss/kernels.py", LOSS),
    (("mean loss",), "loss/function.py", LOSS_CHUNKS),
    (("log_probs",), "loss/kernels.py", LOG_PROBS),
    (("log_probs",), "loss/function.py", SLICES),
    (("loss by token",), "loss/kernels.py", BY_TOKEN),
    (("linear",), "matmul/function.py", LINEAR),
    (FAR_APART, "matmul/kernels.py", PRODUCT),
    (FAR_APART, "matmul/kernels.py", PARTS),
)
IN_HALF = {name: (right, wrong.replace("0.01", "1.0")) for name, (right, wrong) in MLP.items()}
ON_GPU = (  # of paths that the interpreter does not take: by wider tiles and spans
    (("swiglu_mlp by tiles",), "mlp/kernels.py", IN_HALF | PAIR),
    (FEW_TOKENS, "mlp/few_tokens.py", FEW),
    (FEW_TOKENS, "blocks.py", OUTER),
)
ON_HOPPER = (
    (("swiglu_mlp",), "mlp/hopper.py", ROLES),
    (("swiglu_mlp",), "mlp/hopper.py", ROLES_PRODUCT),
    (FAR_APART, "matmul/hopper.py", SPLIT_ROLES),
)

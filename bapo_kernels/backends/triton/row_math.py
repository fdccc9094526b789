"""The two passes over a row: statistics, then gradient; the second pass reads from the L2 cache.

May import the mathematics of tokens and sets, ``tokens`` and ``launch``. ptxas has few registers to
spare here: after any change tests/test_triton_compile.py shows whether a loop spills.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...config import IGNORE_INDEX
from . import launch, policy_math, sampling_set_math
from .tokens import TEMPERATURES, has, load_field

# Everything is in base 2: with x = scale*y, t = (y - origin)*scale/ln 2 and p = 2^t/sum.
#
# Element j belongs to lane j % W, whatever the alignment or the layout that the compiler chooses;
# every lane adds its elements in order, and lanes are added as integers, in any order. The bits of
# a row therefore depend on the row alone.
#
# Tuples of parameters: `transform` is (inner, scale2, scale, slope) of launch.transform,
# `statistics` (origin, sum_2t, log_sum, entropy), `at_label` (label, its logit, its log-prob), and
# `coefficients` has the gradients of log-prob and negative entropy.

LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-160.0)  # keeps t finite in products with 2^t = 0
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite, so that -inf - LOWEST is not NaN
INF = tl.constexpr(float("inf"))
IGNORED = tl.constexpr(IGNORE_INDEX)
INTERPRETED = tl.constexpr(launch.INTERPRETED)


@triton.jit
def rounded(x, dtype: tl.constexpr):
    """float32 ``x`` as the nearest value of ``dtype``; the interpreter truncates to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        bits = tl.where(x != x, 0x7FC00000, bits + 0x7FFF + ((bits >> 16) & 1))
        result = (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        result = x.to(dtype)
    return result


@triton.jit
def widened(z):
    """``z`` as float32; one shift or mask widens an element of bfloat16, a cast takes more."""
    if z.dtype == tl.bfloat16:
        bits = z.to(tl.uint16, bitcast=True).to(tl.uint32) << 16
        result = bits.to(tl.float32, bitcast=True)
    else:
        result = z.to(tl.float32)
    return result


@triton.jit
def tanh(u):
    """tanh within 1 ulp: odd polynomial below 1.3, else 1 - 2q/(1 + q) with q = exp(-2|u|)."""
    square = u * u
    tail = -1.54474019e-5 * square + 1.66917860e-4
    tail = tail * square - 8.66876682e-4
    tail = tail * square + 3.02529195e-3
    tail = tail * square - 8.50232877e-3
    tail = tail * square + 2.17251200e-2
    tail = tail * square - 5.39348312e-2
    tail = tail * square + 1.33329496e-1
    tail = tail * square - 3.33333194e-1
    near = u + u * (square * tail)
    size = tl.abs(u)
    q = tl.exp2(-2.88539008 * tl.minimum(size, 10.0))
    far = 1.0 - 2.0 * q / (1.0 + q)
    return tl.where(size < 1.3, near, tl.where(u != u, u, tl.where(u < 0.0, -far, far)))


@triton.jit
def transformed(z, inner, SOFTCAP: tl.constexpr):
    """y of x = scale*y: z, or tanh(inner*z). -inf stays -inf."""
    if SOFTCAP:
        y = tl.where(z == -INF, -INF, tanh(z * tl.cast(inner, tl.float32)))
    else:
        y = z
    return y


@triton.jit
def tile(first, R: tl.constexpr, W: tl.constexpr):
    """Pointers to R*W consecutive elements, one column per lane."""
    # Lanes first, so that one address serves a thread: the rest is a constant of the instruction.
    return (first + tl.arange(0, W))[None, :] + tl.arange(0, R)[:, None] * W


@triton.jit
def is_inside(rest, R: tl.constexpr, W: tl.constexpr):
    """The mask of the first ``rest`` elements of a tile."""
    return tl.arange(0, W)[None, :] < rest - tl.arange(0, R)[:, None] * W


@triton.jit
def row_pointer(rows, index, rows_per_batch, batch_stride, row_stride, ALIGN: tl.constexpr):
    """Row ``index`` of ``[batches, rows, V]``; rows are a multiple of ALIGN elements apart."""
    offset = index // rows_per_batch * batch_stride + index % rows_per_batch * row_stride
    return rows + tl.multiple_of(offset, ALIGN)


@triton.jit
def row_of(logits, dlogits, offsets, index, rows, sizes, ALIGN: tl.constexpr):
    """Row ``index`` of logits and of the gradient, its length, and whether it is there.

    With ``offsets`` a row is the values of a set; ``sizes`` are those of ``launch.row_sizes``.
    """
    K, rows_per_batch, V, batch_stride, row_stride, dbatch_stride, drow_stride = sizes
    exists = True
    if offsets is None:
        row = row_pointer(logits, index, rows_per_batch, batch_stride, row_stride, ALIGN)
        grad = row
        if dlogits is not None:
            grad = row_pointer(dlogits, index, rows_per_batch, dbatch_stride, drow_stride, ALIGN)
    else:
        begin, V, is_broken = sampling_set_math.set_of(offsets, index, True, rows, K)
        exists = (V > 0) | is_broken
        row = logits + begin
        grad = row
        if dlogits is not None:
            grad = dlogits + begin
    return row, grad, V, exists


@triton.jit
def is_wanted(flags, index, WANTED: tl.constexpr = True):
    """Whether a row has this flag; without flags every row is wanted."""
    if flags is None:
        wanted = True
    else:
        wanted = (tl.load(flags + index) != 0) == WANTED
    return wanted


@triton.jit
def transform_of(token, transform, SOFTCAP: tl.constexpr, PRESENT: tl.constexpr):
    """The transform at a row's own temperature, if it has one: NaN unless that is finite, > 0."""
    inner, scale2, scale, slope = transform
    if has(TEMPERATURES, PRESENT):
        temperature = load_field(token, TEMPERATURES)
        is_valid = (temperature > 0.0) & (temperature < INF)
        temperature = tl.where(is_valid, temperature, float("nan"))
        scale = scale / temperature
        scale2 = (scale / LN2).to(tl.float32)
        slope = slope / temperature if SOFTCAP else scale
    return inner, scale2, scale, slope


@triton.jit
def add_to_lanes(z, inner, scale2, origin, total, weighted, SOFTCAP: tl.constexpr):
    """Adds ``[R, lanes]`` logits to the sums of 2^t and of t*2^t; -inf adds nothing."""
    y = transformed(widened(z), inner, SOFTCAP)
    top = tl.maximum(origin, tl.max(y, 0))
    t = (y - top[None, :]) * scale2
    shift = (origin - top) * scale2
    factor = tl.exp2(shift)
    e = tl.exp2(t)
    tile_weighted = tl.sum(e * tl.maximum(t, FLOOR), 0)
    tile_total = tl.sum(e, 0)
    weighted = factor * (weighted + tl.maximum(shift, FLOOR) * total) + tile_weighted
    total = factor * total + tile_total
    return top, total, weighted


@triton.jit
def add_tile(z, inner, scale2, some, others, SOFTCAP: tl.constexpr, ALIGN: tl.constexpr):
    """Adds ``[R, W]`` logits to half of the lanes and then to the others: saves registers."""
    if ALIGN > 1:  # even and odd lanes, since a thread has lanes side by side
        pairs = tl.reshape(z, (z.shape[0], z.shape[1] // 2, 2))
    else:
        pairs = tl.permute(tl.reshape(z, (z.shape[0], 2, z.shape[1] // 2)), (0, 2, 1))
    z_some, z_others = tl.split(pairs)
    some = add_to_lanes(z_some, inner, scale2, *some, SOFTCAP)
    return some, add_to_lanes(z_others, inner, scale2, *others, SOFTCAP)


@triton.jit
def lane_sums(
    row,
    V,
    inner,
    scale2,
    again,
    SOFTCAP: tl.constexpr,
    ALIGN: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Maximum of y, sums of 2^t and of t*2^t per lane; rows that are read ``again`` stay cached."""
    zeros = tl.zeros((W // 2,), tl.float32)
    some, others = (zeros + LOWEST, zeros, zeros), (zeros + LOWEST, zeros, zeros)
    step: tl.constexpr = UNROLL * W
    whole = V // step * step
    if again:
        for begin in range(0, whole, step):
            z = tl.load(tile(row + begin, UNROLL, W), eviction_policy="evict_last")
            some, others = add_tile(z, inner, scale2, some, others, SOFTCAP, ALIGN)
    else:
        for begin in range(0, whole, step):
            z = tl.load(tile(row + begin, UNROLL, W), eviction_policy="evict_first")
            some, others = add_tile(z, inner, scale2, some, others, SOFTCAP, ALIGN)
    if whole < V:
        inside = is_inside(V - whole, UNROLL, W)
        z = tl.load(tile(row + whole, UNROLL, W), inside, other=-INF)
        some, others = add_tile(z, inner, scale2, some, others, SOFTCAP, ALIGN)
    total, weighted = tl.join(some[1], others[1]), tl.join(some[2], others[2])
    return tl.join(some[0], others[0]), total, weighted


@triton.jit
def fixed_point(V):
    """The int64 that stands for 1 in the sums over the lanes of a row: about 2^60/V, exact."""
    exponent = tl.cast(tl.maximum(V, 1), tl.float32).to(tl.int32, bitcast=True) >> 23
    return ((2 * 127 + 60 - exponent) << 23).to(tl.float32, bitcast=True)


@triton.jit
def row_sums(origin, total, weighted, scale2, V):
    """Maximum of y, sums of 2^t and of t*2^t (float64) of a row; sums are NaN for NaN or +inf."""
    fixed = fixed_point(V)
    bad = total != total
    top = tl.max(tl.where(bad, INF, origin))
    start = tl.where(top == INF, 0.0, top)
    shift = (origin - start) * scale2
    factor = tl.where(bad, 0.0, tl.exp2(shift))
    weighted = factor * (weighted + tl.maximum(shift, FLOOR) * total)
    sums = tl.sum((tl.where(bad, 0.0, factor * total) * fixed).to(tl.int64))
    weighted_sums = tl.sum((tl.where(bad, 0.0, weighted) * fixed).to(tl.int64))
    sum_2t = tl.where(top == INF, float("nan"), sums.to(tl.float64) / fixed)
    top = tl.where((sums == 0) & (top != INF), -INF, top)  # a row of nothing but -inf
    return top, sum_2t, weighted_sums.to(tl.float64) / fixed


@triton.jit
def label_logit(row, label, V):
    """z of the label; NaN for labels outside the vocabulary.

    Every thread loads it, and a gradient in place overwrites it: a barrier must come in between.
    """
    return tl.load(row + label, (label >= 0) & (label < V), other=float("nan")).to(tl.float32)


@triton.jit
def label_log_prob(z, origin, log_sum, transform, SOFTCAP: tl.constexpr):
    """The log-prob of the label in float64."""
    inner, _, scale, _ = transform
    y = transformed(z, inner, SOFTCAP)
    return (y.to(tl.float64) - origin) * scale - log_sum


@triton.jit
def label_gradient(
    z, log_p, entropy, dlog_prob, bonus, transform, SOFTCAP: tl.constexpr, others=None
):
    """d l/d z of the label, without the cancellation in 1 - p.

    ``others``: the sum of d l/d log_prob over the other labels of the row.
    """
    inner, _, _, slope = transform
    dz = bonus * tl.exp(log_p) * (log_p + entropy) - dlog_prob * policy_math.expm1(log_p)
    if others is not None:
        dz -= others * tl.exp(log_p)
    dz *= slope
    if SOFTCAP:
        em = policy_math.expm1(2.0 * tl.minimum(tl.abs(z.to(tl.float64) * inner), 20.0))
        y = em / (em + 2.0)
        dz *= 1.0 - y * y
    return tl.where(z == -INF, 0.0, dz)


@triton.jit
def write_gradient(
    row,
    grad,
    V,
    at_label,
    statistics,
    coefficients,
    transform,
    SOFTCAP: tl.constexpr,
    BONUS: tl.constexpr,
    W: tl.constexpr,
    UNROLL: tl.constexpr,
    drawn=None,
):
    """d l/d z_j = [g*(1[j = label] - p_j) + bonus*p_j*(log p_j + entropy)] * d x_j/d z_j.

    That is 2^t_j*(a*t_j + b) times the derivative; the label's entry is computed separately. Reads
    backwards from the end of the row, which was read last and is still in the cache.

    ``drawn``: (threshold, part, shift) of a sample, what stands for its smaller 2^t and t*2^t.
    """
    label, z_label, log_prob = at_label
    origin, sum_2t, log_sum, entropy = statistics
    dlog_prob, bonus = coefficients
    inner, scale2, _, slope = transform
    a = (bonus * LN2 / sum_2t * slope).to(tl.float32)
    b = ((bonus * (entropy - log_sum) - dlog_prob) / sum_2t * slope).to(tl.float32)
    small = None
    if drawn is not None:
        threshold, part, shift = drawn
        small = threshold.to(tl.float32), part.to(tl.float32), a * shift.to(tl.float32)
    label_grad = label_gradient(z_label, log_prob, entropy, dlog_prob, bonus, transform, SOFTCAP)

    step: tl.constexpr = UNROLL * W
    whole = V // step * step
    if whole < V:
        inside = is_inside(V - whole, UNROLL, W)
        z = tl.load(tile(row + whole, UNROLL, W), inside, other=-INF, eviction_policy="evict_first")
        dz = tile_gradient(z, a, b, origin, inner, scale2, SOFTCAP, BONUS, small)
        tl.store(tile(grad + whole, UNROLL, W), dz, inside, eviction_policy="evict_first")
    for done in range(0, V // step):
        begin = (V // step - 1 - done) * step
        z = tl.load(tile(row + begin, UNROLL, W), eviction_policy="evict_first")
        dz = tile_gradient(z, a, b, origin, inner, scale2, SOFTCAP, BONUS, small)
        tl.store(tile(grad + begin, UNROLL, W), dz, eviction_policy="evict_first")
    tl.debug_barrier()  # after the thread that wrote the label's tile
    label_grad = rounded(label_grad.to(tl.float32), grad.dtype.element_ty)
    tl.store(grad + label, label_grad, (label >= 0) & (label < V))


@triton.jit
def exp_of(z, origin, inner, scale2, SOFTCAP: tl.constexpr):
    """y, t and 2^t of logits: with the same bits where a sample is drawn and where it is used."""
    y = transformed(widened(z), inner, SOFTCAP)
    t = (y - origin) * scale2
    return y, t, tl.exp2(t)


@triton.jit
def tile_gradient(
    z, a, b, origin, inner, scale2, SOFTCAP: tl.constexpr, BONUS: tl.constexpr, small=None
):
    """The gradient of ``[R, W]`` logits, in their dtype; ``small``: (threshold, part, a*shift)."""
    y, t, e = exp_of(z, origin, inner, scale2, SOFTCAP)
    is_small = False
    if small is not None:
        is_small = e < small[0]
        e = tl.where(is_small, small[1], e)
    if BONUS:
        dx = e * (a * tl.maximum(t, FLOOR) + b)
        if small is not None:
            dx += tl.where(is_small, small[2], 0.0)
    else:
        dx = e * b
    if SOFTCAP:
        held = tl.maximum(y, -1.0)  # at -inf the derivative is 0
        dx *= 1.0 - held * held
    return rounded(dx, z.dtype)


@triton.jit
def write_zeros(grad, V, W: tl.constexpr, UNROLL: tl.constexpr):
    """Writes a row of zeros, and reads nothing."""
    zeros = tl.zeros((UNROLL, W), grad.dtype.element_ty)
    step: tl.constexpr = UNROLL * W
    whole = V // step * step
    for begin in range(0, whole, step):
        tl.store(tile(grad + begin, UNROLL, W), zeros, eviction_policy="evict_first")
    if whole < V:
        inside = is_inside(V - whole, UNROLL, W)
        tl.store(tile(grad + whole, UNROLL, W), zeros, inside, eviction_policy="evict_first")


@triton.jit
def scale_row(row, V, by, W: tl.constexpr, UNROLL: tl.constexpr):
    """Multiplies a row by ``by``, in place."""
    step: tl.constexpr = UNROLL * W
    whole = V // step * step
    for begin in range(0, whole, step):
        place = tile(row + begin, UNROLL, W)
        z = tl.load(place, eviction_policy="evict_first")
        z = rounded(widened(z) * by, row.dtype.element_ty)
        tl.store(place, z, eviction_policy="evict_first")
    if whole < V:
        place = tile(row + whole, UNROLL, W)
        inside = is_inside(V - whole, UNROLL, W)
        z = tl.load(place, inside, eviction_policy="evict_first")
        z = rounded(widened(z) * by, row.dtype.element_ty)
        tl.store(place, z, inside, eviction_policy="evict_first")

"""Arguments of an implementation, one by one, within the error budget.

The error budget: twice the largest error of the plain dense form in the same dtype,
plus 4 units in the last place of the largest expected value; 1e-12 of it in float64.
B, T, S, N and H are all 4, and what is masked or added differs along each of them.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import attention
from attention import masks
from tests.contract import subjects, values
from tests.support import compiling, oracle

B, T, N, H, K = subjects.B, subjects.T, subjects.N, subjects.H, subjects.K
S = T
worst = values.worst

_RNG = np.random.default_rng(7)
BIAS, SINKS = _RNG.normal(size=(B, N, T, S)), _RNG.normal(size=N)
ARRAY = _RNG.random((B, N, T, S)) < 0.8
KEY_LENGTHS, QUERY_LENGTHS = np.array([4, 3, 4, 1]), np.array([4, 4, 2, 4])


def score_mod(score, q_index, kv_index, *, batch, head):
    """Linear, and another one for every index."""
    shift = jnp.asarray(3 * batch + 2 * q_index - kv_index, score.dtype) / 8
    return score * (1 + jnp.asarray(head, score.dtype) / 10) - shift


def score_mod_of_numbers(score, i, j, b, n):
    """The same, and its derivative by the score."""
    return score * (1 + n / 10) - (3 * b + 2 * i - j) / 8, 1 + n / 10


def _shown():
    """What 'masks' shows; some rows see nothing."""
    shown = np.zeros((B, N, T, S), bool)
    for b, n, i, j in np.ndindex(shown.shape):
        shown[b, n, i, j] = (
            ARRAY[b, n, i, j]
            and i - 1 <= j <= i + 1
            and j < KEY_LENGTHS[b]
            and i < QUERY_LENGTHS[b]
        )
    return shown


SHOWN = _shown()
MASKS = {
    "mask": masks.dense(ARRAY) & masks.causal(offset=1),
    "local_window_size": (1, 2),
    "key_value_seq_lengths": KEY_LENGTHS,
    "query_seq_lengths": QUERY_LENGTHS,
}
LOWER = np.broadcast_to(np.tri(T, dtype=bool), (B, N, T, S))
NEAR = np.broadcast_to(np.tri(T, k=1) - np.tri(T, k=-2) == 1, (B, N, T, S))
# name -> (arguments of ours, arguments of the loop and of the plain dense form)
FEATURES = {
    "plain": ({}, {}),
    "scale": ({"scale": 0.7}, {"scale": 0.7}),
    "bias": ({"bias": BIAS}, {"bias": BIAS}),
    "masks": (MASKS, {"visible": SHOWN}),
    "softcap": ({"softcap": 1.5}, {"softcap": 1.5}),
    "score_mod": ({"score_mod": score_mod}, {"score_mod": score_mod_of_numbers}),
    "sinks": ({"sinks": SINKS}, {"sinks": SINKS}),
}
# Masks in fewer words.
ALONE = FEATURES | {
    "is_causal": ({"is_causal": True}, {"visible": LOWER}),
    "window": ({"local_window_size": 1}, {"visible": NEAR}),
}
ARRAYS = ("bias", "sinks")


def together(subject):
    """Arguments of ours and of the loop with everything that is honoured."""
    ours, theirs = {}, {}
    for name, (arguments, of_loop) in FEATURES.items():
        if name not in subject.lacks:
            ours |= arguments
            theirs |= of_loop
    return ours, theirs


@functools.cache
def arrays(dtype):
    """Query, key, value and dL/do: rows of weights neither flat nor one-hot."""
    shapes = (B, T, N, H), (B, S, K, H), (B, S, K, H), (B, T, N, H)
    sizes = (1.5, 1.5, 1.0, 1.0)
    drawn = subjects.normal(0, *shapes, dtype="float64")
    return [np.asarray(c * x, dtype) for c, x in zip(sizes, drawn, strict=True)]


def rounded(arguments, dtype):
    """Arrays of floats as they are in the dtype."""
    return {
        name: np.asarray(x, dtype) if name in ARRAYS else x
        for name, x in arguments.items()
    }


def of_loop(arguments, dtype):
    """The loop's answers on inputs rounded to the dtype."""
    *inputs, output_gradient = (np.asarray(x, np.float64) for x in arrays(dtype))
    return oracle.attention(
        *inputs, output_gradient=output_gradient, **rounded(arguments, dtype)
    )


def answers(subject, arguments, dtype, *, compile):
    """Outputs, log-sum-exp and gradients, under the oracle's names."""
    *inputs, output_gradient = arrays(dtype)
    others = {k: x for k, x in arguments.items() if k not in ARRAYS}
    given = rounded({k: x for k, x in arguments.items() if k in ARRAYS}, dtype)

    @compile
    def both(inputs, given):
        def attend(inputs, given):
            return subject.attend(*inputs, **given, **others, return_residual=True)

        out, backward, lse = jax.vjp(attend, inputs, given, has_aux=True)
        return out, lse, *backward(jnp.asarray(output_gradient))

    out, lse, (dq, dk, dv), by_given = both(inputs, given)
    found = {"out": out, "lse": lse, "dq": dq, "dk": dk, "dv": dv}
    return found | {f"d{name}": gradient for name, gradient in by_given.items()}


@functools.cache
def _plain_dense(dtype, compile):
    """jax.nn's roundings, with room for what it does not have; compiled once."""
    *inputs, output_gradient = arrays(dtype)

    def attend(query, key, value, bias, sinks, visible, scale, softcap, factor, shift):
        products = dict(preferred_element_type=jnp.float32)
        grouped = query.reshape(B, T, K, N // K, H)
        scores = jnp.einsum("btkgh,bskh->bkgts", grouped, key, **products)
        scores = scores.reshape(B, N, T, S) * scale
        cap = jnp.where(softcap > 0, softcap, 1)
        scores = jnp.where(softcap > 0, cap * jnp.tanh(scores / cap), scores)
        scores = scores * factor - shift
        scores = jnp.where(visible, scores + bias.astype(jnp.float32), -1e30)
        column = jnp.broadcast_to(
            sinks.astype(jnp.float32)[None, :, None, None], (B, N, T, 1)
        )
        scores = jnp.concatenate([scores, column], -1)
        weights = jax.nn.softmax(scores, axis=-1)[..., :S].astype(query.dtype)
        weights = jnp.where(visible, weights, 0).reshape(B, K, N // K, T, S)
        out = jnp.einsum("bkgts,bskd->btkgd", weights, value)
        return out.reshape(B, T, N, H)

    @compile
    def both(bias, sinks, *others):
        out, backward = jax.vjp(lambda *x: attend(*x, *others), *inputs, bias, sinks)
        return out, *backward(jnp.asarray(output_gradient))

    return both


def of_plain_dense(arguments, dtype, *, compile):
    """Its answers; what is not asked for is 0, absent or without effect."""
    b, n, i, j = np.ogrid[:B, :N, :T, :S]
    factor, shift = 1 + 0 * n, 0 * (b + i + j)
    if "score_mod" in arguments:
        factor, shift = 1 + n / 10, (3 * b + 2 * i - j) / 8
    numbers = {
        "bias": np.zeros((B, N, T, S)),
        "sinks": np.full(N, -np.inf),
        "visible": np.ones((B, N, T, S), bool),
        "scale": H**-0.5,
        "softcap": 0.0,
    } | {k: x for k, x in arguments.items() if k != "score_mod"}
    numbers |= {"factor": factor, "shift": shift}
    found = _plain_dense(dtype, compile)(
        *(
            x if k == "visible" else np.asarray(x, dtype if k in ARRAYS else "float32")
            for k, x in numbers.items()
        )
    )
    return dict(zip(("out", "dq", "dk", "dv", "dbias", "dsinks"), found, strict=True))


def within_budget(subject, *, feature, dtype="float32"):
    """Outputs and all gradients; the log-sum-exp and the weights besides.

    `feature` is one of `ALONE`, or None for all that are honoured at once, which is
    compiled as users do.
    """
    ours, theirs = together(subject) if feature is None else ALONE[feature]
    compile = compiling.as_users_do if feature is None else jax.jit
    found = answers(subject, ours, dtype, compile=compile)
    wanted = of_loop(theirs, dtype)
    peer = None
    if dtype != "float64":
        peer = of_plain_dense(theirs, dtype, compile=compile)
    lse = found.pop("lse")
    for name, array in found.items():
        assert array.dtype == dtype, name
        largest = np.max(np.abs(wanted[name]))
        if peer is None:
            budget = 1e-12 * max(1, largest)
        else:
            ulp = float(np.spacing(np.asarray(largest, jnp.dtype(dtype))))
            budget = 2 * worst(peer[name], wanted[name]) + 4 * ulp
        error = worst(array, wanted[name])
        assert error <= budget, f"{name}: error {error:.3g}, budget {budget:.3g}"
    few = 1e-12 if dtype == "float64" else 4 * float(jnp.finfo(dtype).eps)
    assert lse.dtype == dtype
    np.testing.assert_allclose(
        np.asarray(lse, np.float64), wanted["lse"], rtol=few, atol=few
    )
    ours = rounded(ours, dtype)
    weights = jax.jit(functools.partial(attention.attention_weights, **ours))(
        *arrays(dtype)[:2]
    )
    assert weights.dtype == (dtype if dtype == "float64" else "float32")
    few = 1e-12 if dtype == "float64" else 2e-6
    assert worst(weights, wanted["weights"]) <= few


def in_float64(subject):
    """Computed in float64, not only returned in it: every feature by itself."""
    values.in_float64(subject)
    if isinstance(subject, subjects.Implementation):
        for feature in ALONE:
            within_budget(subject, feature=feature, dtype="float64")

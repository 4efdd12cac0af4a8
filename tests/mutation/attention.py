"""Mutations of the equation and of what carries it: see `mutations`."""

import types

_SOFTMAX = (
    (
        "jnp.where(mask, scores, -jnp.inf)",
        "jnp.where(mask, -jnp.inf, scores)",
        "the mask is inverted",
    ),
    (
        "jnp.where(mask, scores, -jnp.inf)",
        "jnp.where(mask, scores, jnp.finfo(scores.dtype).min)",
        "masked scores are the least finite number",
    ),
    (
        "peak = jnp.max(scores, axis=-1,",
        "peak = jnp.max(scores, axis=None,",
        "one peak stabilises all rows",
    ),
    (
        "peak = jnp.maximum(peak, sink)",
        "peak = peak * jnp.ones_like(sink)",
        "a sink does not set the peak",
    ),
    (
        "peak = jnp.where(peak == -jnp.inf, 0, peak)",
        "peak = jnp.zeros_like(peak)",
        "no peak is subtracted",
    ),
    (
        "    peak = jnp.where(peak == -jnp.inf, 0, peak)\n",
        "",
        "a row that sees nothing is NaN",
    ),
    (
        "total = jnp.sum(exponentials, axis=-1,",
        "total = jnp.sum(exponentials, axis=0,",
        "the softmax is normalised over the queries",
    ),
    (
        "total += jnp.exp(sink - peak)",
        "total += jnp.exp(sink)",
        "the sink is not stabilised as the scores are",
    ),
    (
        "jnp.where(empty, -jnp.inf, jnp.log(divisor) + peak)",
        "jnp.log(divisor) + peak",
        "the log-sum-exp of nothing is 0",
    ),
    (
        "jnp.log(divisor) + peak)",
        "jnp.log(divisor))",
        "the log-sum-exp lacks the peak",
    ),
    (
        "weights * (d_scores - d_log)",
        "weights * d_scores",
        "the derivative ignores the normaliser",
    ),
    (
        "d_log += jnp.exp(sink - finite) * d_sink",
        "d_log -= jnp.exp(sink - finite) * d_sink",
        "the sink's derivative has the wrong sign",
    ),
    (
        "jnp.matmul(query * scale, key.T",
        "jnp.matmul(query * scale * scale, key.T",
        "scaled twice",
    ),
    (
        "s = jnp.matmul(query * scale, key.T, precision=precision)",
        "s = scale * jnp.matmul(query, key.T, precision=precision)",
        "scaled after the product",
    ),
    (
        "s = softcap * jnp.tanh(s / softcap)",
        "s = jnp.tanh(s / softcap)",
        "the soft cap is 1, whatever was asked for",
    ),
    (
        "    if softcap is not None:\n",
        "    if bias is not None:\n        s, bias = s + bias, None\n"
        "    if softcap is not None:\n",
        "the bias is capped too",
    ),
    (
        "s = score_mod(s, q_index, kv_index,",
        "s = score_mod(s, kv_index, q_index,",
        "a score modifier gets queries for keys",
    ),
    (
        "jnp.log(jnp.where(visible, weights, 1))",
        "jnp.log(weights)",
        "the gradient of entropy is NaN at 0",
    ),
)

_HEADS = (
    (
        "num_heads, head_width(x.shape[-1], num_heads))",
        "head_width(x.shape[-1], num_heads), num_heads).swapaxes(-1, -2)",
        "features are dealt to the heads in turn",
    ),
    (
        "if num_heads < 1 or width % num_heads:",
        "if num_heads < 1:",
        "a width that does not divide is not named",
    ),
    (
        "return x.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])",
        "y = x.swapaxes(-3, -2)\n"
        "    return y.reshape(*x.shape[:-2], x.shape[-2] * x.shape[-1])",
        "merged with the head axis before the length",
    ),
    (
        "query = query.reshape(*leading, kv_heads, groups, width)",
        "query = query.reshape(*leading, groups, kv_heads, width)\n"
        "        query = query.swapaxes(-3, -2)",
        "keys are tiled over the query heads, not repeated",
    ),
    (
        "axes = (kv_heads, groups) if",
        "axes = (groups, kv_heads) if",
        "groups of masks and biases are key/value heads",
    ),
    (
        "if kv_heads < 1 or num_heads % kv_heads:",
        "if kv_heads < 1:",
        "heads that do not divide are not named",
    ),
)

_REFERENCE = (
    (
        "batch = head = jnp.int32(0)",
        "head = jnp.int32(0)",
        "rows do not share broadcast dropout",
    ),
    (
        "heads.over_heads(one_head, out_axis=1)",
        "heads.over_heads(one_head, out_axis=0)",
        "outputs are [B N T D]",
    ),
    (
        "return softmax.masked_softmax_and_log_normalizer(scores, mask, sink=sink)",
        "weights, log = softmax.masked_softmax_and_log_normalizer(scores, sink=sink)\n"
        "    return weights if mask is None else weights * mask, log",
        "masked after the softmax",
    ),
    (
        "return [x.astype(numerics.accumulation_dtype(x.dtype)) for x in arrays]",
        "return list(arrays)",
        "computed in the dtype of the inputs",
    ),
    (
        "arguments.materialize(options.visible, query, key)",
        "arguments.materialize(options.mask, query, key)",
        "only the mask argument is honoured",
    ),
    (
        "jnp.arange(num_heads, dtype=jnp.int32)[None],",
        "jnp.arange(num_heads, dtype=jnp.int32)[None] // 2,",
        "pairs of heads are told one index",
    ),
)

_DROPOUT = (
    ("weights / (1 - rate)", "weights", "what is kept does not grow"),
    (
        "jax.random.fold_in(jax.random.fold_in(rng, batch), head)",
        "jax.random.fold_in(rng, batch + head)",
        "row 0, head 1 drops what row 1, head 0 drops",
    ),
    (
        "jax.random.fold_in(jax.random.fold_in(rng, batch), head)",
        "jax.random.fold_in(rng, batch)",
        "all heads drop the same",
    ),
    ("return bits >= ", "return bits < ", "the share that is dropped is kept"),
    (
        "jnp.uint32(min(round(rate * 2**32), 2**32 - 1))",
        "jnp.uint32(round(rate * 2**32))",
        "a rate just below 1 overflows",
    ),
)

_NUMERICS = (
    (
        "jnp.float64 if dtype == jnp.float64 else jnp.float32",
        "jnp.float32",
        "float64 is computed in float32",
    ),
    (
        "jnp.float64 if dtype == jnp.float64 else jnp.float32",
        "dtype",
        "16 bits are computed in 16 bits",
    ),
)

ROWS = types.MappingProxyType(
    {
        "attention/softmax.py": _SOFTMAX,
        "attention/heads.py": _HEADS,
        "attention/dot_product/reference.py": _REFERENCE,
        "attention/dropout.py": _DROPOUT,
        "attention/numerics.py": _NUMERICS,
    }
)

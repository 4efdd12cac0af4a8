"""Wrong edits of linear attention, of recurrences, and of what stands beside them."""

import types

_LINEAR = (
    (
        "return jnp.where(x > 0, x + 1, jnp.exp(jnp.where(x > 0, 0, x)))",
        "return jnp.where(x > 0, x, jnp.exp(jnp.where(x > 0, 0, x)))",
        "the feature map jumps at 0",
    ),
    (
        "visible = jnp.tril(visible)",
        "visible = jnp.tril(visible, -1)",
        "a causal query does not see its own key",
    ),
    (
        "return _quadratic(state, query, key, value, is_causal=True)",
        "return _quadratic(state, query, key, value, is_causal=False)",
        "a chunk sees its own future",
    ),
    (
        "queries = queries.reshape(B, T, K, N // K, queries.shape[-1])",
        "queries = queries.reshape(B, T, N // K, K, -1).swapaxes(2, 3)",
        "query heads read the keys of another group",
    ),
)
_LINEAR_SUMS = (
    (
        "values=decay[:, None] * self.values + terms.T @ value,",
        "values=self.values + terms.T @ value,",
        "what was summed below a smaller peak is not corrected",
    ),
    (
        "total=decay * self.total + jnp.sum(terms, axis=0),",
        "total=self.total + jnp.sum(terms, axis=0),",
        "the total is not corrected for a new peak",
    ),
    (
        "return jnp.where(token_mask[:, :, None, None], y, nothing)",
        "return y",
        "padding has features",
    ),
    (
        "jnp.sum(weights, axis=1) + query @ self.total,",
        "jnp.sum(weights, axis=1),",
        "the mean does not count the past",
    ),
    (
        "nothing = (total == 0)[:, None]",
        "nothing = jnp.zeros_like(total[:, None], bool)",
        "a query that sees nothing is NaN",
    ),
)
_RANDOM_FEATURES = (
    (
        "half_square = jnp.sum(x * x, axis=-1, keepdims=True) / 2",
        "half_square = jnp.sum(x * x, axis=-1, keepdims=True)",
        "features are biased",
    ),
    (
        "rows = directions * jnp.linalg.norm(rows, axis=1, keepdims=True)",
        "rows = directions",
        "orthogonal rows are too short",
    ),
    (
        "root = math.sqrt(scale)",
        "root = scale",
        "queries and keys are both scaled in full",
    ),
)
_LOWRANK = (
    (
        "for x in (rows.key, rows.value)\n    )\n",
        "for x in (rows.key, rows.value)\n    )\n    values = value.astype(dtype)\n",
        "values of padding are mixed in",
    ),
    (
        "jnp.matmul, (None if projection.ndim == 2 else 0, 1), out_axes=1",
        "jnp.matmul, (None, 1), out_axes=1",
        "no head has a projection of its own",
    ),
    ("if is_causal:", "if False:", "asking for causal is not refused"),
)
_ADDITIVE = (
    (
        "return jnp.tanh(query[None] + key) @ score_vector",
        "return (query[None] + key) @ score_vector",
        "scores are not squashed",
    ),
    (
        "mask = real if mask is None else mask & real",
        "mask = real if mask is None else mask",
        "padding is seen where there is a mask too",
    ),
    (
        "return visible.at(position[None], keys, **index, length=S)[0, 0, 0]",
        "return visible.at(position[None] * 0, keys, **index, length=S)[0, 0, 0]",
        "every query has the mask of the first",
    ),
)
_RECURRENCE = (
    (
        "return later_a * a, later_a * b + later_b",
        "return later_a * a, a * b + later_b",
        "steps are composed the wrong way round",
    ),
    (
        "inputs = inputs.at[0].add(decay[0] * state)",
        "inputs = inputs.at[0].add(state)",
        "the initial state does not decay in the first step of a tree",
    ),
    (
        "sums = jnp.cumsum(where(t > s, log_decay[:, None], 0), axis=0)",
        "sums = jnp.cumsum(where(t >= s, log_decay[:, None], 0), axis=0)",
        "a token takes its own decay",
    ),
    (
        "decay = checks.only_real(decay.astype(dtype), token_mask, 1)",
        "decay = decay.astype(dtype)",
        "padding takes a step",
    ),
    (
        "return state, outputs.reshape(-1, *outputs.shape[2:])[:length]",
        "return state * 1.0, outputs.reshape(-1, *outputs.shape[2:])[-length:]",
        "outputs of a ragged end are shifted",
    ),
)
_CONVOLUTION = (
    (
        "return line[len(x) :], [line[i : i + len(x)] for i in range(len(state) + 1)]",
        "return line[: len(state)], "
        "[line[i : i + len(x)] for i in range(len(state) + 1)]",
        "the state that is left is the one that came",
    ),
    (
        "index = jnp.where(real, len(state) + count - 1, len(state) + len(x))",
        "index = jnp.where(real, len(state) + jnp.arange(len(x)), len(state) + len(x))",
        "padding stands between tokens",
    ),
    (
        "return lax.dynamic_slice_in_dim(line, count[-1], len(state)), taps",
        "return lax.dynamic_slice_in_dim(line, len(x), len(state)), taps",
        "the state ends with padding",
    ),
)
_RWKV = (
    (
        "output = _mean(_then(state, 0, _token(key + bonus, value)))",
        "output = _mean(_then(state, log_decay, _token(key + bonus, value)))",
        "the past decays before it is read",
    ),
    (
        "kept = jnp.exp((past.peak - finite) + log_decay)",
        "kept = jnp.exp(past.peak - finite)",
        "sums do not decay",
    ),
    (
        "finite = jnp.where(peak == -jnp.inf, 0, peak)\n    # In",
        "finite = peak\n    # In",
        "two empty states make NaN",
    ),
    (
        "before = jax.tree.map(lambda x: x[:-1], states)",
        "before = jax.tree.map(lambda x: x[1:], states)",
        "a token reads its own sums",
    ),
)
_RWKV6 = (
    (
        "output = receptance @ (state + bonus[:, None] * present)",
        "output = receptance @ (state + present)",
        "the present token has no bonus",
    ),
    (
        "return jnp.exp(log_decay)[:, None] * state + present, output",
        "return jnp.exp(log_decay)[:, None] * (state + present), output",
        "a token decays in its own step",
    ),
    (
        "before = jnp.concatenate([jnp.full_like(left[:1], -jnp.inf), left[:-1]])",
        "before = left",
        "the quadratic form takes the present decay",
    ),
)
_MAMBA = (
    (
        "state = decay * state + B[:, None] * (step_size * x)[None, :]",
        "state = decay * state + B[:, None] * x[None, :]",
        "inputs do not depend on the step size",
    ),
    (
        "return state, (y + D[None, None] * wide).astype(x.dtype)",
        "return state, y.astype(x.dtype)",
        "nothing goes past the state",
    ),
    (
        'y += jnp.einsum("tm,tme,me->te", C, reach, state)',
        'y += jnp.einsum("tm,me->te", C, state)',
        "the quadratic form reads the initial state undecayed",
    ),
)
_RETENTION = (
    (
        "return np.log1p(-(2.0 ** (-5.0 - np.arange(num_heads)))).astype(np.float32)",
        "return np.log1p(-(2.0 ** (-5.0 + 0 * np.arange(num_heads)))).astype("
        "np.float32)",
        "all heads decay alike",
    ),
    (
        "return since[-1] * state + (key * left[-1][:, None]).T @ value, output",
        "return since[-1] * state + key.T @ value, output",
        "a chunk's keys do not decay to its end",
    ),
    (
        "wide = (query.astype(dtype) * scale, key.astype(dtype), value.astype(dtype))",
        "wide = (query.astype(dtype), key.astype(dtype), value.astype(dtype))",
        "scores are not scaled",
    ),
)
_HULL = (
    (
        "if not weight.min() >= -atol:  # NaN too",
        "if False:",
        "negative weights pass",
    ),
    (
        "equivalence.assert_close(\n        total, np.ones_like(total)",
        "equivalence.assert_close(\n        total, total",
        "weights of any sum pass",
    ),
)
_MODELS_LINEAR = (
    ("token_mask=token_mask,", "token_mask=None,", "padding is attended to"),
    ("keep(state)", "pass", "decoding forgets its state"),
)
_MODELS_RETENTION = (
    ("y *= nn.silu(gate)", "pass", "there is no gate"),
    ("keep(state)", "pass", "decoding forgets its state"),
)
_MODELS_RWKV = (
    ("keep(after)", "pass", "decoding forgets its sums"),
    (
        "return weight * x + (1 - weight) * before",
        "return (1 - weight) * x + weight * before",
        "a token is mixed with the one before it the wrong way round",
    ),
    (
        "nn.sigmoid(receptance) * x, width)",
        "receptance * x, width)",
        "the receptance is no gate",
    ),
)
_MODELS_MAMBA = (
    ("keep_line(last)", "pass", "decoding forgets the last tokens"),
    ("x *= nn.silu(gate)", "x *= gate", "the gate is linear"),
    ("-jnp.exp(log_rates),", "jnp.exp(log_rates),", "states grow"),
)
_MODELS_RECURRENT = (
    (
        "return update * state + (1 - update) * candidate",
        "return (1 - update) * state + update * candidate",
        "the update gate is inverted",
    ),
    (
        "jnp.tanh(inputs[2] + (reset * state) @ kernels.candidate)",
        "jnp.tanh(inputs[2] + reset * (state @ kernels.candidate))",
        "the candidate is that of other libraries",
    ),
    (
        "following = jnp.where(real, following, state)",
        "pass",
        "padding takes a step",
    ),
)
_MODELS_MIXERS = (
    (
        "return masks.sliding_window(config.window)",
        "return masks.sliding_window(config.window + 1)",
        "a window is one key too wide",
    ),
    (
        "mask &= masks.dense(token_mask[:, None, None, :])",
        "pass",
        "padding is attended to",
    ),
    (
        "if self.absolute and token_positions is not None:",
        "if False:",
        "behind padding global tokens are counted from the padding",
    ),
    (
        "seed=layer,",
        "seed=0,",
        "all layers of bigbird look at the same blocks at random",
    ),
    (
        "jax.random.key(layer), config.features, config.head_width",
        "jax.random.key(0), config.features, config.head_width",
        "all layers of performer have the same features",
    ),
    (
        "return 2 * num_kv_heads * config.head_width * kept",
        "return 2 * config.num_heads * config.head_width * kept",
        "the state of grouped heads is counted for every query head",
    ),
)

ROWS = types.MappingProxyType(
    {
        "attention/linear.py": _LINEAR,
        "attention/linear_sums.py": _LINEAR_SUMS,
        "attention/random_features.py": _RANDOM_FEATURES,
        "attention/lowrank.py": _LOWRANK,
        "attention/additive.py": _ADDITIVE,
        "attention/recurrence.py": _RECURRENCE,
        "attention/convolution.py": _CONVOLUTION,
        "attention/rwkv.py": _RWKV,
        "attention/rwkv6.py": _RWKV6,
        "attention/mamba.py": _MAMBA,
        "attention/retention.py": _RETENTION,
        "attention/properties/hull.py": _HULL,
        "models/linear.py": _MODELS_LINEAR,
        "models/retention.py": _MODELS_RETENTION,
        "models/rwkv.py": _MODELS_RWKV,
        "models/mamba.py": _MODELS_MAMBA,
        "models/recurrent.py": _MODELS_RECURRENT,
        "models/mixers.py": _MODELS_MIXERS,
    }
)

"""Mutations of the public entry and of its arguments: see `mutations`."""

import types

_DOT_PRODUCT = (
    (
        "name = implementation or choice.choose(q, k, v, options)",
        "name = choice.choose(q, k, v, options)",
        "the implementation asked for is ignored",
    ),
    (
        "output = rows.restore(output).astype(v.dtype)",
        "output = rows.restore(output)",
        "outputs stay in the dtype of the sums",
    ),
    (
        "rows.restore(residual).astype(k.dtype)",
        "rows.restore(residual)",
        "the log-sum-exp stays in the dtype of the sums",
    ),
)
_JAX_NN = (
    (
        "window, is_causal = (window[0], 0), True",
        "window, is_causal = (window[1], 0), True",
        "the window's future is taken for its past",
    ),
    (
        "        scale=options.scale,\n        is_causal=is_causal,\n",
        "        scale=options.scale,\n",
        "causal is not handed on to jax.nn",
    ),
    (
        "sees = jnp.any(visible, axis=-1)",
        "sees = jnp.all(visible, axis=-1)",
        "queries that see some keys only are 0",
    ),
    (
        "sees = jnp.swapaxes(sees, 1, 2)",
        "sees = jnp.swapaxes(sees, 0, 2)",
        "what queries see is transposed wrongly",
    ),
    (
        "        output = jnp.where(sees[..., None], output, 0)\n",
        "",
        "a query that sees nothing gives the mean in 'xla'",
    ),
    (
        "visible = arguments.materialize(options.visible, query, key)",
        "visible = arguments.materialize(options.mask, query, key)",
        "'xla' looks for empty rows in the mask argument only",
    ),
    (
        "options.dropout_rng is not None,\n",
        "False,\n",
        "'xla' ignores dropout",
    ),
    (
        'query.dtype == jnp.float16 and jax.default_backend() == "cpu"',
        'query.dtype == jnp.float16 and jax.default_backend() == "gpu"',
        "'xla' asks a CPU for products of float16",
    ),
)

_ARGUMENTS = (
    (
        "return rows.without_padding(options.visible), options",
        "return rows, options",
        "NaN in the padding reaches outputs",
    ),
    (
        "1 / math.sqrt(max(width, 1))",
        "1 / max(width, 1)",
        "the scale is 1/H",
    ),
    (
        "parts.append(masks.causal())",
        "parts.append(masks.causal(1))",
        "causal shows the next key",
    ),
    (
        "masks.window(*self.local_window_size)",
        "masks.window(*self.local_window_size[::-1])",
        "the window is turned round",
    ),
    (
        "masks.lengths(*lengths)",
        "masks.lengths(*lengths[::-1])",
        "lengths of queries are those of keys",
    ),
    (
        "lambda a, b: a & b",
        "lambda a, b: a | b",
        "masks are combined with or",
    ),
    (
        "shape = (1,) * (rank - x.ndim) + x.shape",
        "shape = x.shape + (1,) * (rank - x.ndim)",
        "masks and biases are aligned from the left",
    ),
    (
        "if any(n != 1 for n in leading):",
        "if len(leading) == 1 and leading[0] != 1:",
        "several batch dimensions are not broadcast",
    ),
    (
        "left, right = np.broadcast_to(sizes, (2,)).tolist()\n    return left, right",
        "left, right = np.broadcast_to(sizes, (2,)).tolist()\n"
        "    return left, right if sizes.ndim else 0",
        "one number is a window into the past only",
    ),
    (
        "if not 0 <= dropout_rate < 1:",
        "if not 0 <= dropout_rate <= 1:",
        "a dropout rate of 1 is let through",
    ),
    (
        "dropout_rng=dropout_rng if dropout_rate else None",
        "dropout_rng=dropout_rng",
        "a key without a rate costs a mask",
    ),
    (
        "if softcap is not None and not softcap > 0:",
        "if softcap is not None and softcap < 0:",
        "a soft cap of 0 is let through",
    ),
    (
        "if sinks.shape != (num_heads,):",
        "if sinks.ndim != 1:",
        "one sink is shared by all heads",
    ),
    (
        "batch_size=batch_size, num_heads=num_heads\n",
        "batch_size=batch_size, num_heads=key.shape[2]\n",
        "masks are made for the key/value heads",
    ),
)
_CHECKS = (
    (
        "query=clear(self.query, visible.valid_queries(self.query.shape[1])),",
        "query=self.query,",
        "NaN in the padding of queries reaches gradients",
    ),
    (
        "key=clear(self.key, valid_keys),",
        "key=self.key,",
        "NaN in the padding of keys reaches weights",
    ),
    (
        "if x.dtype != query.dtype:",
        "if x.dtype.itemsize != query.dtype.itemsize:",
        "float16 and bfloat16 are mixed",
    ),
    (
        "if x.shape != expected:",
        "if x.ndim != len(expected):",
        "arrays of any size are let through",
    ),
)

ROWS = types.MappingProxyType(
    {
        "attention/dot_product/api.py": _DOT_PRODUCT,
        "attention/dot_product/jax_nn.py": _JAX_NN,
        "attention/dot_product/arguments.py": _ARGUMENTS,
        "attention/checks.py": _CHECKS,
    }
)

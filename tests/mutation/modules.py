"""Mutations of the module: see `mutations`."""

import types

_MULTIHEAD = (
    (
        "        if inputs_k is None and inputs_kv is None and key_positions is None:\n"
        "            key_positions = query_positions\n",
        "",
        "keys do not follow the positions of the queries in self-attention",
    ),
    (
        "if inputs_k is None and inputs_kv is None and key_positions is None:",
        "if key_positions is None:",
        "the memory of cross-attention stands where the queries stand",
    ),
    (
        'project("key", inputs_k, num_kv_heads)',
        'project("key", inputs_v, num_kv_heads)',
        "keys are made of the values' inputs",
    ),
    (
        "                mask=mask,\n",
        "",
        "the weights that are sown are not masked",
    ),
    (
        "                score_mod=score_mod,\n",
        "",
        "the weights that are sown know no positions",
    ),
    (
        "if self.dropout_rate > 0 and not nn.merge_param(",
        "if self.dropout_rate > 0 and nn.merge_param(",
        "dropout when deterministic, and only then",
    ),
    (
        "            value,\n            mask=mask,\n            scale=self.scale,\n",
        "            value,\n            mask=mask,\n",
        "the module's scale is ignored",
    ),
    (
        "features=(self.out_features or inputs_q.shape[-1],)",
        "features=(self.out_features or qkv_features,)",
        "outputs are as wide as the heads",
    ),
    (
        "kernel_init=self.out_kernel_init or self.kernel_init",
        "kernel_init=self.kernel_init",
        "the output's initialiser is ignored",
    ),
    (
        "if inputs_k is not None or inputs_v is not None:",
        "if inputs_k is not None and inputs_v is not None:",
        "inputs given twice are let through",
    ),
    (
        "inputs_k if inputs_v is None else inputs_v",
        "inputs_k",
        "values are made of the keys' inputs",
    ),
    (
        "scheme.score_mod(query.shape[-2], *flat)",
        "scheme.score_mod(key.shape[-2], *flat)",
        "the slopes of ALiBi are those of the key/value heads",
    ),
    (
        "scheme.rotate(key, key_positions)",
        "scheme.rotate(key, query_positions)",
        "keys turn by the positions of the queries",
    ),
    ("return mask != 0", "return mask == 0", "flax's masks are inverted"),
    (
        "if not np.isin(numbers, (0, 1)).all():",
        "if not np.isin(numbers, (0, 1)).any():",
        "an additive bias is let through as a mask",
    ),
)

_POSITIONAL = (
    (
        "score_mods.alibi(slopes, query_positions, key_positions)",
        "score_mods.alibi(slopes)",
        "ALiBi ignores positions",
    ),
    (
        "if ids.shape[-1] > self.size:",
        "if False:",
        "learned positions end before the tokens do",
    ),
)

ROWS = types.MappingProxyType(
    {"models/multihead.py": _MULTIHEAD, "models/positional.py": _POSITIONAL}
)

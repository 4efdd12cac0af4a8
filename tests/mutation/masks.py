"""Mutations of masks and positions: see `mutations`."""

import types

_MASKS = (
    (
        '_at_least(1, size, name="size") - 1, 0, offset',
        '_at_least(1, size, name="size"), 0, offset',
        "a sliding window does not count the query itself",
    ),
    (
        "leaves.Causal(offset=_offset(offset))",
        "leaves.Causal(offset=_offset(0))",
        "the offset of causal is dropped",
    ),
    (
        "return np.int32(offset) if offset else None",
        "return None",
        "offsets that are Python numbers are dropped",
    ),
    (
        "return np.int32(offset) if offset else None",
        "return jnp.int32(offset) if offset else None",
        "masks with an offset cannot be hashed",
    ),
    (
        'ranks=(0,), name="offset").astype(jnp.int32)',
        'ranks=(0,), name="offset")',
        "an offset of another dtype compiles anew",
    ),
    ("return min(value, 2**30)", "return value", "long distances overflow int32"),
    ("if array.ndim > 4:", "if array.ndim > 5:", "arrays of 5 dimensions are masks"),
)

_ALGEBRA = (
    (
        "if self.in_order or index is None or data.shape[axis] == 1:",
        "if self.in_order or index is None:",
        "what all rows share is copied for each",
    ),
    (
        "& (key >= 0))",
        "& (key > 0))",
        "nobody may attend to key 0 at positions of the call",
    ),
    (
        "self._visible(points) & (key >= 0))",
        "self._visible(points))",
        "an empty slot is seen under ~",
    ),
    (
        "size not in (1, asked):",
        "size > asked:",
        "masks of too few rows or heads are let through",
    ),
    (
        "self._valid(T, for_queries=True)",
        "self._valid(T, for_queries=False)",
        "padding of keys is cleared from queries",
    ),
    (
        "self.left._visible(points) | self.right._visible(points)",
        "self.left._visible(points) ^ self.right._visible(points)",
        "| is exclusive or",
    ),
    (
        "b if a is None else a if b is None else a & b",
        "b if a is None else a if b is None else a | b",
        "padding under & is what both call padding",
    ),
    (
        "return None if a is None or b is None else a | b",
        "return None if a is None or b is None else a & b",
        "padding under | is what one calls padding",
    ),
    (
        "return None if a is None or b is None else a | b",
        "return b if a is None else a if b is None else a | b",
        "padding of one side is cleared, though the other shows it",
    ),
    ("return ~self.mask._visible", "return self.mask._visible", "~ does nothing"),
)

_LEAVES = (
    (
        "query = query + self.offset",
        "query = query - self.offset",
        "an offset is subtracted",
    ),
    (
        "return points.key <= query\n",
        "return points.key < query\n",
        "causal hides the query's own key",
    ),
    (
        "visible &= points.key >= query - self.left",
        "visible &= points.key > query - self.left",
        "the window's left distance is exclusive",
    ),
    (
        "(points.key <= query) | (points.key <",
        "(points.key <= query) & (points.key <",
        "nothing but the prefix is seen",
    ),
    (
        "return has_query & has_key & (query_ids == key_ids)",
        "return query_ids == key_ids",
        "positions past the ids have a segment",
    ),
    (
        "inside = position < _per_row(length, points)",
        "inside = position <= _per_row(length, points)",
        "lengths are one too long",
    ),
    (
        "visible &= inside & (position >= 0)",
        "visible &= inside",
        "positions before the first are inside of the length",
    ),
    (
        "position = position + self.offset",
        "position = position - self.offset",
        "padding of queries is shifted the wrong way",
    ),
    (
        "return (position >= 0) & (position < jnp.reshape(lengths, (-1, 1)))",
        "return (position >= 0) & (position <= jnp.reshape(lengths, (-1, 1)))",
        "the first key of the padding is not cleared",
    ),
    (
        "_lookup(visible, query, axis=2)\n            visible &= inside\n",
        "_lookup(visible, query, axis=2)\n",
        "queries past a dense array read its first row",
    ),
    (
        "shape[3] not in (1, S) or (",
        "(",
        "a dense array of too few keys is let through",
    ),
    (
        "jnp.asarray(lengths).reshape(-1, 1, 1, 1)",
        "jnp.asarray(lengths).reshape(1, -1, 1, 1)",
        "lengths of rows go to heads",
    ),
    (
        "(positions >= 0) & (positions < data.shape[axis])",
        "(positions >= 0) & (positions <= data.shape[axis])",
        "the position past the data is inside of it",
    ),
    (
        "(positions >= 0) & (positions < data.shape[axis])",
        "positions < data.shape[axis]",
        "negative positions are inside of the data",
    ),
)

_POSITIONS = (
    (
        "jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)",
        "jnp.concatenate([a * cos + b * sin, b * cos - a * sin], axis=-1)",
        "rotary turns clockwise",
    ),
    (
        "a, b = wide[..., 0::2], wide[..., 1::2]",
        "a, b = jnp.split(wide, 2, axis=-1)",
        "the interleaved layout pairs halves",
    ),
    (
        "dtype = numerics.accumulation_dtype(x.dtype)",
        "dtype = x.dtype",
        "angles are computed in the dtype of the model",
    ),
    ("width) / scaling", "width) * scaling", "positions are stretched, not squeezed"),
    (
        "np.arange(0, width, 2) / width)",
        "np.arange(0, width, 2) / (width // 2))",
        "frequencies fall twice as fast",
    ),
)

_SCORE_MODS = (
    (
        "np.arange(1, 2 * n, 2))",
        "np.arange(2, 2 * n + 1, 2))",
        "slopes between powers of two repeat the others",
    ),
    ("return -slopes[head]", "return slopes[head]", "ALiBi favours what is far"),
    (
        "jnp.abs(relative).astype(dtype)\n\n\n@_relative\ndef _relative_bias",
        "relative.astype(dtype)\n\n\n@_relative\ndef _relative_bias",
        "ALiBi favours the past",
    ),
    (
        "else positions[batch, index]",
        "else positions[0, index]",
        "all rows have the positions of the first",
    ),
    (
        "future = past[1:] + n if bidirectional",
        "future = past[1:] if bidirectional",
        "keys after the query share the buckets of those before it",
    ),
    (
        "* (n - exact) + 1e-9)",
        "* (n - exact))",
        "rounding moves a border between buckets",
    ),
    ("return -scales[head]", "return scales[head]", "Kerple favours what is far"),
    (
        "jnp.where(query == key, score, -jnp.inf)",
        "jnp.where(query >= key, score, -jnp.inf)",
        "earlier documents are visible",
    ),
)

_BLOCKS = (
    (
        "some=(key_least <= query_most)",
        "some=(key_least < query_most)",
        "equal numbers at the end of a block are not seen",
    ),
    (
        "Blocks(~self.every, ~self.some)",
        "Blocks(~self.some, ~self.every)",
        "what is not visible is what was",
    ),
    (
        "np.minimum(first + (block - 1), length - 1)",
        "first + (block - 1)",
        "the last block ends behind the end",
    ),
)

_SPARSE = (
    (
        "return query - (self.window - 1), query + 1",
        "return query - self.window, query + 1",
        "a causal window is one block longer",
    ),
    (
        "query + (self.window // 2 + 1)",
        "query + self.window // 2",
        "the window's last block is lost",
    ),
    (
        "(query >= 0) & (query < self.globals)",
        "(query >= 0) & (query <= self.globals)",
        "one block more is global",
    ),
)

ROWS = types.MappingProxyType(
    {
        "attention/masks/constructors.py": _MASKS,
        "attention/masks/algebra.py": _ALGEBRA,
        "attention/masks/leaves.py": _LEAVES,
        "attention/masks/block_maps.py": _BLOCKS,
        "attention/masks/sparse.py": _SPARSE,
        "attention/positions.py": _POSITIONS,
        "attention/score_mods.py": _SCORE_MODS,
    }
)

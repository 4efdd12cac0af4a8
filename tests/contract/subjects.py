"""What the contract suite runs: implementations as functions of a sequence.

A subject maps x [B T E] to y [B T F], given parameters, and is written once more in
float64 NumPy. Modules are such functions (tests/contract/module_subjects.py); of an
implementation one is made by cutting x into queries, keys and values, which attend
with everything switched on that the implementation honours. B, T, N and H are all 4,
so that an axis taken for another shows in the numbers alone, as it does in the field.
"""

import dataclasses
from typing import Any, ClassVar

import jax
import numpy as np

import attention
from attention import positions, score_mods
from tests.support import modules_by_hand, oracle

B = T = N = H = 4
K = 2
SOFTCAP = 3.0
DROPOUT_RATE = 0.25


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Given:
    """What a subject may be called with besides parameters and x; None: without.

    Attributes:
      lengths: int32 [B], how many keys of each row count.
      mask: a `masks.Mask` besides the subject's own.
      at: int32 [T], positions of x; None: counted from 0.
      memory: [B S E], what gives keys and values instead of x.
      rng: a key; with it weights are dropped.
    """

    lengths: Any = None
    mask: Any = None
    at: Any = None
    memory: Any = None
    rng: Any = None

    def places(self, length, key_length):
        """Positions of queries and of keys."""
        at = np.arange(length, dtype=np.int32) if self.at is None else self.at
        if self.memory is None:
            return at, at
        return at, np.arange(key_length, dtype=np.int32)


NOTHING = Given()


def normal(seed, *shapes, dtype="float32"):
    """Standard normal arrays."""
    rng = np.random.default_rng(seed)
    return [rng.normal(size=shape).astype(dtype) for shape in shapes]


def shown(x, given, left, right):
    """What a window shows of the keys that count, bool [B N T S]."""
    length = (x if given.memory is None else given.memory).shape[1]
    visible = np.zeros((x.shape[0], N, x.shape[1], length), bool)
    for b, n, i, j in np.ndindex(visible.shape):
        visible[b, n, i, j] = (
            (given.lengths is None or j < given.lengths[b])
            and (left is None or i - j <= left)
            and (right is None or j - i <= right)
        )
    return visible


@dataclasses.dataclass(frozen=True)
class Implementation:
    """Causal attention with rotary positions and everything that is honoured.

    Attributes:
      name: of `attention.IMPLEMENTATIONS`.
      lacks: the properties that it is declared not to have.
    """

    name: str
    lacks: frozenset[str] = frozenset()
    kind: ClassVar[str] = "implementation"
    # E: queries, keys and values side by side.
    width: ClassVar[int] = (N + 2 * K) * H

    def parameters(self, dtype):
        """Bias, sinks and ALiBi slopes, as far as they are honoured."""
        bias, sinks, slopes = normal(1, (N, 9, 9), (N,), (N,), dtype=dtype)
        parameters = {"bias": bias}
        if "sinks" not in self.lacks:
            parameters["sinks"] = sinks
        if "score_mod" not in self.lacks:
            parameters["slopes"] = slopes
        return parameters

    def attend(self, *arrays, **options):
        """The public entry."""
        return attention.dot_product_attention(
            *arrays, implementation=self.name, **options
        )

    def split(self, x, memory=None):
        """Queries of x, keys and values of the memory."""
        memory = x if memory is None else memory
        query = x[..., : N * H].reshape(*x.shape[:-1], N, H)
        both = memory[..., N * H :].reshape(*memory.shape[:-1], 2, K, H)
        return query, both[..., 0, :, :], both[..., 1, :, :]

    def apply(self, parameters, x, given=NOTHING):
        """Outputs of all heads, side by side."""
        arrays, options = self._arguments(parameters, x, given)
        if given.rng is not None:
            options |= {"dropout_rate": DROPOUT_RATE, "dropout_rng": given.rng}
        out = self.attend(*arrays, **options)
        return out.reshape(*x.shape[:-1], N * H)

    def weights(self, parameters, x, given=NOTHING):
        """Attention weights [B N T S]."""
        (query, key, _, *others), options = self._arguments(parameters, x, given)
        return attention.attention_weights(query, key, *others, **options)

    def _arguments(self, parameters, x, given):
        query, key, value = self.split(x, given.memory)
        at, key_at = given.places(query.shape[-3], key.shape[-3])
        bias = parameters["bias"][:, : query.shape[-3], : key.shape[-3]]
        score_mod = None
        if "slopes" in parameters:
            score_mod = score_mods.alibi(parameters["slopes"], at, key_at)
        query, key = positions.rotary(query, at), positions.rotary(key, key_at)
        return (query, key, value, bias, given.mask), {
            "is_causal": True,
            "key_value_seq_lengths": given.lengths,
            "softcap": None if "softcap" in self.lacks else SOFTCAP,
            "score_mod": score_mod,
            "sinks": parameters.get("sinks"),
        }

    def by_hand(self, parameters, x, given=NOTHING):
        """Outputs and weights in float64."""
        query, key, value = self.split(x, given.memory)
        visible = shown(x, given, None, 0)
        at, key_at = given.places(*visible.shape[2:])
        bias = parameters["bias"][:, : visible.shape[2], : visible.shape[3]]
        score_mod = None
        if "slopes" in parameters:
            score_mod = modules_by_hand.alibi(parameters["slopes"], at, key_at)
        found = oracle.attention(
            modules_by_hand.rotate(query, at),
            modules_by_hand.rotate(key, key_at),
            value,
            visible=visible,
            bias=np.broadcast_to(bias, visible.shape),
            softcap=None if "softcap" in self.lacks else SOFTCAP,
            score_mod=score_mod,
            sinks=parameters.get("sinks"),
        )
        return found["out"].reshape(*x.shape[:2], -1), found["weights"]

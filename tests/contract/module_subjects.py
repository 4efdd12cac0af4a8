"""What the contract suite runs: the modules, and what each computes, by hand."""

import dataclasses
import functools
import operator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np

from attention import masks
from models import config, multihead, transformer
from tests.contract import subjects
from tests.support import modules_by_hand, small

B, T, N, H, K = subjects.B, subjects.T, subjects.N, subjects.H, subjects.K
V = 5


@dataclasses.dataclass(frozen=True)
class Module:
    """A module of `models`, under a window that is its mask.

    Attributes:
      name: as the table of declarations calls it.
      width: E.
      left: how far back a query sees; None: all the way.
      right: the same for the future: 0, or None.
    """

    name: str
    width: int
    left: int | None
    right: int | None
    kind: ClassVar[str] = "module"

    def parameters(self, dtype):
        """Normal numbers; those of a model in narrower floats stay in float32."""
        init = functools.partial(self.call, "init", jax.random.key(0))
        shapes = jax.eval_shape(init, jnp.zeros((B, T, self.width)))
        rng = np.random.default_rng(2)
        dtype = "float64" if dtype == "float64" else "float32"
        return jax.tree.map(
            lambda shape: (0.5 * rng.normal(size=shape.shape)).astype(dtype), shapes
        )

    def apply(self, parameters, x, given=subjects.NOTHING):
        """The module's output, computed in the dtype of x."""
        rngs = {} if given.rng is None else {"rngs": {"dropout": given.rng}}
        return self.call("apply", parameters, x, given, **rngs)

    def weights(self, parameters, x, given=subjects.NOTHING):
        """The weights [B N T S] that the module sows."""
        sowing = {"sow_weights": True, "mutable": ["intermediates"]}
        _, sown = self.call("apply", parameters, x, given, **sowing)
        (weights,) = jax.tree.leaves(sown)
        return weights

    def mask(self, given):
        """All masks in one; None: all are seen."""
        parts = []
        if self.right == 0 and self.left is None:
            parts.append(masks.causal())
        elif self.right == 0:
            parts.append(masks.sliding_window(self.left + 1))
        if given.lengths is not None:
            parts.append(masks.lengths(given.lengths.reshape(-1)))
        if given.mask is not None:
            parts.append(given.mask)
        return functools.reduce(operator.and_, parts) if parts else None

    def call(
        self, method, variables, x, given=subjects.NOTHING, *, sow_weights=False, **rest
    ):
        """Calls `init` or `apply` of the module."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Attention(Module):
    """MultiHeadAttention; `module` has dropout."""

    module: multihead.MultiHeadAttention

    def call(self, method, variables, x, given=subjects.NOTHING, **rest):
        module = self.module.clone(dtype=x.dtype)
        return getattr(module, method)(
            variables,
            x,
            given.memory,
            mask=self.mask(given),
            query_positions=given.at,
            deterministic=given.rng is None,
            **rest,
        )

    def by_hand(self, parameters, x, given=subjects.NOTHING):
        """Outputs and weights in float64."""
        visible = subjects.shown(x, given, self.left, self.right)
        return modules_by_hand.multi_head(
            parameters["params"],
            x,
            given.memory,
            visible=visible,
            encoding=self.module.position_encoding,
            places=given.places(*visible.shape[2:]),
            scale=self.module.scale,
        )


@dataclasses.dataclass(frozen=True)
class Block(Module):
    """A transformer's block."""

    config: config.CausalLMConfig

    def call(
        self, method, variables, x, given=subjects.NOTHING, *, sow_weights=False, **rest
    ):
        settings = dataclasses.replace(self.config, dtype=x.dtype.name)
        return getattr(transformer.Block(settings, 0), method)(
            variables,
            x,
            token_mask=_token_mask(x, given),
            token_positions=given.at,
            deterministic=given.rng is None,
            sow_weights=sow_weights,
            **rest,
        )

    def by_hand(self, parameters, x, given=subjects.NOTHING):
        """Outputs and weights in float64."""
        visible = subjects.shown(x, given, self.left, self.right)
        return modules_by_hand.block(
            parameters["params"],
            x,
            visible=visible,
            encoding=self.config.positions,
            places=given.places(*visible.shape[2:]),
            scale=self.config.scale,
        )


@dataclasses.dataclass(frozen=True)
class Language(Module):
    """A language model of one block, after its embeddings."""

    config: config.CausalLMConfig

    def call(self, method, variables, x, given=subjects.NOTHING, **rest):
        settings = dataclasses.replace(self.config, dtype=x.dtype.name)
        model = transformer.CausalLM(settings, V)
        if method == "init":
            tokens = jnp.zeros((B, T), jnp.int32)
            return model.init(variables, tokens, deterministic=True)
        return model.apply(
            variables,
            x,
            token_mask=_token_mask(x, given),
            token_positions=given.at,
            deterministic=given.rng is None,
            method="from_embeddings",
            **rest,
        )

    def by_hand(self, parameters, x, given=subjects.NOTHING):
        """Logits and weights in float64."""
        visible = subjects.shown(x, given, self.left, self.right)
        return modules_by_hand.causal_lm(
            parameters["params"],
            x,
            visible=visible,
            encoding=self.config.positions,
            places=given.places(*visible.shape[2:]),
            scale=self.config.scale,
        )


def _token_mask(x, given):
    """Which tokens count."""
    if given.lengths is None:
        return None
    return np.arange(x.shape[1])[None] < given.lengths[:, None]


CONFIG = dataclasses.replace(
    small.CONFIG,
    num_layers=1,
    num_heads=N,
    num_kv_heads=K,
    width=N * H,
    mlp_width=8,
    context=T,
    window=4,
    block_size=2,
    dropout_rate=subjects.DROPOUT_RATE,
)


def _attention(name, *, left, right, **fields):
    module = multihead.MultiHeadAttention(
        num_heads=N, dropout_rate=subjects.DROPOUT_RATE, **fields
    )
    return Attention(name, N * H, left, right, module)


MODULES = (
    _attention("attention", left=None, right=None),
    _attention(
        "rotary attention",
        left=None,
        right=0,
        num_kv_heads=K,
        position_encoding="rotary",
        scale=0.7,
    ),
    Block("block", CONFIG.width, None, 0, CONFIG),
    Language(
        "language model",
        CONFIG.width,
        2,
        0,
        dataclasses.replace(
            CONFIG,
            num_kv_heads=1,
            positions="alibi",
            mixers="window",
            window=3,
            scale=0.4,
        ),
    ),
)

"""The sums that linear attention keeps of keys and values, for one head.

    S = Σⱼ φ(kⱼ) vⱼᵀ,    z = Σⱼ φ(kⱼ),    o = φ(q)ᵀ S / φ(q)ᵀ z

`Sums` are these themselves. Where log φ is what is known, `LogSums` keep them in
proportion to the largest term so far of each feature, m, as flash attention keeps those
of softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867):

    m' = max(m, log φ(k))
    S ← exp(m - m') S + exp(log φ(k) - m') vᵀ,    and z alike

They neither overflow nor vanish, however large the inputs, and m is a maximum over the
past alone: the usual one over the whole sequence cancels too, but in exact arithmetic
only, so that one large key of the future would wipe out what came before it.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

FeatureMap = Callable[[Float[Array, "... H"]], Float[Array, "... M"]]


@dataclasses.dataclass(frozen=True)
class Exponential:
    """The positive feature map φ(x) = exp(log(x)), computed with by its logarithm.

    Attributes:
      log: maps [... H] to log φ [... M]. What it adds to all features of one query
        alike changes nothing.
    """

    log: FeatureMap

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... M"]:
        """The features themselves, which may overflow."""
        return jnp.exp(self.log(x))


class Sums(NamedTuple):
    """Sums over features; queries and keys are given by φ."""

    values: Float[Array, "M D"]  # Σⱼ φ(kⱼ) vⱼᵀ
    total: Float[Array, "M"]  # Σⱼ φ(kⱼ)

    @classmethod
    def empty(cls, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "Sums":
        """The sums over none of these keys."""
        # Sums of no term, not zeros: under `jax.shard_map` they vary as the arrays do.
        return cls(key[:0].T @ value[:0], jnp.sum(key[:0], axis=0))

    def add(self, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "Sums":
        """The sums over these keys, too."""
        return self._replace(
            values=self.values + key.T @ value, total=self.total + jnp.sum(key, axis=0)
        )

    def read(self, query: Float[Array, "T M"]) -> Float[Array, "T D"]:
        """The outputs of queries that see all keys so far."""
        return _mean(query @ self.values, query @ self.total)

    def attend(
        self,
        query: Float[Array, "T M"],
        key: Float[Array, "S M"],
        value: Float[Array, "S D"],
        visible: Bool[Array, "T S"],
    ) -> Float[Array, "T D"]:
        """The outputs of queries that see all keys so far, and some of these."""
        weights = jnp.where(visible, query @ key.T, 0)
        return _mean(
            weights @ value + query @ self.values,
            jnp.sum(weights, axis=1) + query @ self.total,
        )


class LogSums(NamedTuple):
    """`Sums`, over exp(peak); queries and keys are given by log φ."""

    values: Float[Array, "M D"]
    total: Float[Array, "M"]
    peak: Float[Array, "M"]  # maxⱼ log φ(kⱼ), -inf before the first key

    @classmethod
    def empty(cls, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "LogSums":
        """The sums over none of these keys."""
        sums = Sums.empty(key, value)
        return cls(*sums, peak=sums.total - jnp.inf)

    def add(self, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "LogSums":
        """The sums over these keys, too."""
        # Any peak gives the same outputs: derivatives may take it for a constant.
        peak = jnp.maximum(self.peak, jnp.max(key, axis=0, initial=-jnp.inf))
        peak = lax.stop_gradient(peak)
        decay = jnp.exp(self.peak - _finite(peak))
        terms = jnp.exp(key - _finite(peak)[None])
        return self._replace(
            values=decay[:, None] * self.values + terms.T @ value,
            total=decay * self.total + jnp.sum(terms, axis=0),
            peak=peak,
        )

    def read(self, query: Float[Array, "T M"]) -> Float[Array, "T D"]:
        """The outputs of queries that see all keys so far."""
        past = query + self.peak[None]
        largest = jnp.max(past, axis=1, initial=-jnp.inf)
        past = jnp.exp(past - _finite(lax.stop_gradient(largest))[:, None])
        return _mean(past @ self.values, past @ self.total)

    def attend(
        self,
        query: Float[Array, "T M"],
        key: Float[Array, "S M"],
        value: Float[Array, "S D"],
        visible: Bool[Array, "T S"],
    ) -> Float[Array, "T D"]:
        """The outputs of queries that see all keys so far, and some of these."""
        # Feature by feature: as a product of matrices it would need one peak of all
        # keys, also of those that a query must not see.
        terms = jnp.where(visible[:, :, None], query[:, None] + key[None], -jnp.inf)
        past = query + self.peak[None]
        largest = jnp.maximum(
            jnp.max(terms, axis=(1, 2), initial=-jnp.inf),
            jnp.max(past, axis=1, initial=-jnp.inf),
        )
        largest = _finite(lax.stop_gradient(largest))[:, None]
        weights = jnp.sum(jnp.exp(terms - largest[..., None]), axis=2)
        past = jnp.exp(past - largest)
        return _mean(
            weights @ value + past @ self.values,
            jnp.sum(weights, axis=1) + past @ self.total,
        )


def kind(feature_map: FeatureMap) -> type[Sums] | type[LogSums]:
    """The sums that are kept of such features."""
    return LogSums if isinstance(feature_map, Exponential) else Sums


def features(
    feature_map: FeatureMap,
    x: Float[Array, "B T N H"],
    mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T N M"]:
    """φ, or log φ, as the sums of this kind want it; of no key where masked.

    Raises:
      ValueError: if the feature map changes more than the last axis.
    """
    nothing = 0.0
    if isinstance(feature_map, Exponential):
        feature_map, nothing = feature_map.log, -jnp.inf
    y = feature_map(x)
    if y.shape[:-1] != x.shape[:-1]:
        raise ValueError(
            f"feature_map must map the last axis of {x.shape} alone, got {y.shape}"
        )
    return y if mask is None else jnp.where(mask[:, :, None, None], y, nothing)


def _mean(
    weighted: Float[Array, "T D"], total: Float[Array, "T"]
) -> Float[Array, "T D"]:
    """Weighted sums over their total weight; 0 where that is 0."""
    nothing = (total == 0)[:, None]
    return jnp.where(nothing, 0, weighted / jnp.where(nothing, 1, total[:, None]))


def _finite(peak: Float[Array, "..."]) -> Float[Array, "..."]:
    """Of no key 0, since -inf - -inf would be NaN."""
    return jnp.where(peak == -jnp.inf, 0, peak)

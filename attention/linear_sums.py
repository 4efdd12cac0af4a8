"""The state of linear attention for one head: sums over keys and values.

    S = Σⱼ φ(kⱼ) vⱼᵀ,    z = Σⱼ φ(kⱼ),    o = φ(q)ᵀ S / φ(q)ᵀ z

`Sums` stores S and z. For a feature map with known logarithm, `LogSums` divides them by
exp(m), where mᵣ is the largest log φ(k)ᵣ so far, just as flash attention rescales the
sums of softmax (Milakov and Gimelshein, 2018, arXiv:1805.02867):

    m' = max(m, log φ(k))
    S ← exp(m - m') S + exp(log φ(k) - m') vᵀ
    z ← exp(m - m') z + exp(log φ(k) - m')

These sums neither overflow nor vanish, however large the inputs. The maximum m is taken
over the past only. A maximum over the whole sequence would cancel as well, but only in
exact arithmetic: in floating point one large future key would round the terms of all
earlier keys to 0.
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
    """A positive feature map φ that is defined by its logarithm.

    Attributes:
      log: maps x [... H] to log φ(x) [... M]. A constant added to all log features of
        one query does not change its output.
    """

    log: FeatureMap

    def __call__(self, x: Float[Array, "... H"]) -> Float[Array, "... M"]:
        """The features φ(x), which may overflow."""
        return jnp.exp(self.log(x))


class Sums(NamedTuple):
    """The sums S and z; the methods take queries and keys as features φ(q), φ(k)."""

    values: Float[Array, "M D"]  # Σⱼ φ(kⱼ) vⱼᵀ
    total: Float[Array, "M"]  # Σⱼ φ(kⱼ)

    @classmethod
    def empty(cls, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "Sums":
        """The sums before the first key, with shapes and dtypes of these arrays."""
        # Empty sums rather than zeros: under `jax.shard_map` they get the sharding type
        # of the arrays.
        return cls(key[:0].T @ value[:0], jnp.sum(key[:0], axis=0))

    def add(self, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "Sums":
        """Adds these keys and values to the sums."""
        return self._replace(
            values=self.values + key.T @ value, total=self.total + jnp.sum(key, axis=0)
        )

    def read(self, query: Float[Array, "T M"]) -> Float[Array, "T D"]:
        """The outputs of queries that see all keys summed so far."""
        return _mean(query @ self.values, query @ self.total)

    def attend(
        self,
        query: Float[Array, "T M"],
        key: Float[Array, "S M"],
        value: Float[Array, "S D"],
        visible: Bool[Array, "T S"],
    ) -> Float[Array, "T D"]:
        """The outputs of queries that see all keys summed so far and visible new ones.

        Args:
          query: the queries, as features or log features.
          key: keys that are not in the sums yet.
          value: their values.
          visible: True where a query sees one of these keys.

        Returns:
          The outputs [T D].
        """
        weights = jnp.where(visible, query @ key.T, 0)
        return _mean(
            weights @ value + query @ self.values,
            jnp.sum(weights, axis=1) + query @ self.total,
        )


class LogSums(NamedTuple):
    """S and z divided by exp(peak); the methods take log φ(q) and log φ(k)."""

    values: Float[Array, "M D"]
    total: Float[Array, "M"]
    peak: Float[Array, "M"]  # m = maxⱼ log φ(kⱼ), -inf before the first key

    @classmethod
    def empty(cls, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "LogSums":
        """The sums before the first key, with shapes and dtypes of these arrays."""
        sums = Sums.empty(key, value)
        return cls(*sums, peak=sums.total - jnp.inf)

    def add(self, key: Float[Array, "S M"], value: Float[Array, "S D"]) -> "LogSums":
        """Adds these keys and values to the sums."""
        # The outputs do not depend on the peak, so it needs no gradient.
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
        """The outputs of queries that see all keys summed so far."""
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
        """The outputs of queries that see all keys summed so far and visible new ones.

        Args:
          query: the queries, as features or log features.
          key: keys that are not in the sums yet.
          value: their values.
          visible: True where a query sees one of these keys.

        Returns:
          The outputs [T D].
        """
        # Computed feature by feature: a matrix product would need one peak over all
        # keys, including those that a query must not see.
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
    """`LogSums` for an `Exponential` feature map, else `Sums`."""
    return LogSums if isinstance(feature_map, Exponential) else Sums


def features(
    feature_map: FeatureMap,
    x: Float[Array, "B T N H"],
    token_mask: Bool[Array, "B T"] | None = None,
) -> Float[Array, "B T N M"]:
    """φ(x), or log φ(x) if the feature map is an `Exponential`.

    Args:
      feature_map: φ, which maps the last axis.
      x: queries or keys.
      token_mask: False marks padding, whose features φ are 0.

    Returns:
      The features [B T N M], in the form that `kind(feature_map)` takes.

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
    if token_mask is None:
        return y
    return jnp.where(token_mask[:, :, None, None], y, nothing)


def _mean(
    weighted: Float[Array, "T D"], total: Float[Array, "T"]
) -> Float[Array, "T D"]:
    """Weighted sums divided by their total weight; 0 where the total is 0."""
    nothing = (total == 0)[:, None]
    return jnp.where(nothing, 0, weighted / jnp.where(nothing, 1, total[:, None]))


def _finite(peak: Float[Array, "..."]) -> Float[Array, "..."]:
    """Replaces the -inf of an empty maximum by 0, since -inf - -inf would be NaN."""
    return jnp.where(peak == -jnp.inf, 0, peak)

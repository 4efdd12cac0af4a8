"""Whether outputs are means of the values: attention as a lookup.

    yᵢ = Σⱼ wᵢⱼ vⱼ,    wᵢⱼ ≥ 0,    Σⱼ wᵢⱼ = 1

so that no output leaves the convex hull of the values. Softmax gives such weights, and
so does whatever divides by a sum of positive ones; sums that only decay do not.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jaxtyping import Shaped

from attention.properties import calls, equivalence, movements


def assert_in_hull(
    fn: Callable[[Any], Any],
    values: Shaped[movements.AnyArray, "B S ..."],
    *,
    atol: float = 1e-5,
) -> None:
    """Asserts that each output is a mean of the values, channel by channel.

    The weights are read off with values that are 1 at one position and 0 elsewhere.
    They may differ between channels, but not with the values.

    Args:
      fn: maps values [B S ...] to outputs [B T ...] of as many channels.
      values: any values [B S ...], to see that the weights do not depend on them.
      atol: amount by which a weight may be negative, and a sum differ from 1; and an
        output from the mean, as a share of the largest value.

    Raises:
      AssertionError: naming a negative weight, a sum that is not 1, or an output that
        is no such mean.
    """
    rows = np.asarray(values)

    def weights(source: int) -> np.ndarray:
        one_hot = np.zeros_like(rows)
        one_hot[:, source] = 1
        return np.asarray(fn(calls.in_library_of(values, one_hot)))

    weight = np.stack([weights(j) for j in range(rows.shape[1])])
    if not weight.min() >= -atol:  # NaN too
        source, row, target, *_ = np.unravel_index(np.argmin(weight), weight.shape)
        raise AssertionError(
            f"output {target} of row {row} takes value {source} "
            f"{weight.min():.3g} times"
        )
    total = weight.sum(axis=0)
    equivalence.assert_close(
        total, np.ones_like(total), "sum of the weights", atol=atol
    )
    output = np.asarray(fn(values))
    # A function may compute in another precision than that of its values.
    mean = np.einsum("sbt...,bs...->bt...", weight, rows).astype(output.dtype)
    atol *= max(1.0, float(np.max(np.abs(rows))))
    equivalence.assert_close(output, mean, "output", atol=atol)

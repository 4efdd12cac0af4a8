"""Annotations are checked while tests run, except where a refusal is expected."""

import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest

from attention import softmax
from tests.support import annotations

HOOKED = hasattr(softmax.masked_softmax, "__wrapped__")


def complaint(f, *args):
    """What the check of annotations says of a call; None where it is content."""
    try:
        f(*args)
    except jaxtyping.TypeCheckError as error:
        return str(error)
    return None


@pytest.mark.skipif(not HOOKED, reason="switched off by TYPES=off")
def test_a_call_that_breaks_an_annotation_raises():
    scores, mask = jnp.zeros((2, 3)), jnp.zeros(3, jnp.int32)
    assert "parameter 'mask'" in complaint(softmax.masked_softmax, scores, mask)
    assert complaint(softmax.masked_softmax, scores, mask > 0) is None
    assert complaint(softmax.masked_softmax, np.zeros((2, 3), np.float32)) is None


@pytest.mark.parametrize("ones", [np.ones, jnp.ones])
def test_a_result_that_breaks_an_annotation_raises(ones):
    def shorter(
        x: jaxtyping.Float[jnp.ndarray, "T"],
    ) -> jaxtyping.Float[jnp.ndarray, "T"]:
        return x[1:]

    def rounded(
        x: jaxtyping.Float[jnp.ndarray, "T"],
    ) -> jaxtyping.Float[jnp.ndarray, "T"]:
        return x.astype("int32")

    def same(
        x: jaxtyping.Float[jnp.ndarray, "T"],
    ) -> jaxtyping.Float[jnp.ndarray, "T"]:
        return x

    for f in (shorter, rounded):
        checked = jaxtyping.jaxtyped(f, typechecker=annotations.checked)
        assert "return value" in complaint(checked, ones(3, "float32"))
    checked = jaxtyping.jaxtyped(same, typechecker=annotations.checked)
    assert complaint(checked, ones(3, "float32")) is None


@pytest.mark.skipif(not HOOKED, reason="switched off by TYPES=off")
def test_of_a_long_test_only_the_first_calls_are_checked():
    scores = jnp.zeros((2, 3))
    annotations.calls[0] = annotations.MOST_CALLS - 1
    assert complaint(softmax.masked_softmax, scores, scores) is not None
    assert complaint(softmax.masked_softmax, scores, scores > 0) is None
    assert jaxtyping.config.jaxtyping_disable
    annotations.begin_test()
    assert complaint(softmax.masked_softmax, scores, scores) is not None


def test_what_a_test_expects_to_be_refused_is_refused_by_the_code_itself():
    with pytest.raises(TypeError, match="JAX value"):
        softmax.masked_softmax("scores")

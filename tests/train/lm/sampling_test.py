"""Sampling: the same tokens as a loop on the host that reads the text anew."""

import jax
import jax.numpy as jnp
import numpy as np

from tests.models import transformer_test as small
from train.lm import sampling


def by_hand(model, variables, prompt, rng, *, length, temperature):
    """One forward pass of what is known, at most T tokens, for every token."""
    tokens = list(prompt)
    for key in jax.random.split(rng, length):
        known = np.asarray(tokens[-small.T :], np.int32)[None]
        last = small.logits(model, variables, known)[0, -1]
        tokens.append(int(jax.random.categorical(key, last / temperature)))
    return tokens[len(prompt) :]


def test_sample_equals_the_loop_on_the_host():
    """From a short prompt, and on past the context, with learned positions."""
    model, variables = small.make(positions="learned", num_layers=1)
    prompt = small.TOKENS[0, : small.T - 2]
    options = dict(length=4, temperature=0.7)
    found = sampling.sample(
        model,
        variables["params"],
        prompt,
        jax.random.key(5),
        context=small.T,
        **options,
    )
    wanted = by_hand(model, variables, prompt, jax.random.key(5), **options)
    assert found.tolist() == wanted
    assert found.dtype == jnp.int32

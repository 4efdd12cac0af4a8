"""Honest models that the verifier must not accuse, and the table of them.

Many are twins of a planted leak, without its bug. What the table says an honest model
shows is rounding (its sums run in another order) or NaN where a later input is not
finite (0 · NaN).
"""

import types
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np

from tests.specimens import tokens_leaks
from tests.specimens.mixers_leaks import DECAY, GATE, TAPS, so_far
from tests.specimens.parts import (
    CHUNK,
    EMBEDDING,
    LENGTH,
    VOCAB,
    WIDTH,
    Specimen,
    attend,
    attend_causally,
    causal,
    convolve,
    lazy,
    logits,
    merge,
    normal,
    normalised,
    projected,
    softmax,
    tokens,
    vectors,
)

POSITIONS = normal(LENGTH, WIDTH, seed=6)
EXPERTS = normal(WIDTH, 4, seed=7)


def additive_mask(x):
    """-1e9 is added to masked scores, in float32."""
    scores, value = projected(x)
    bias = np.where(causal(x.shape[1]), 0, -1e9).astype(np.float32)
    return merge(softmax(scores + bias) @ value)


def float16_attention(x):
    """Masked by -inf, all in float16."""
    scores, value = projected(x)
    scores = np.where(causal(x.shape[1]), scores.astype(np.float16), -np.inf)
    return merge(softmax(scores.astype(np.float16)) @ value.astype(np.float16))


def bfloat16_attention(x):
    """Scores, weights and outputs are rounded to bfloat16."""
    scores, value = (y.astype(jnp.bfloat16).astype(np.float32) for y in projected(x))
    weights = softmax(np.where(causal(x.shape[1]), scores, -np.inf))
    weights = weights.astype(jnp.bfloat16).astype(np.float32)
    return merge(weights @ value).astype(jnp.bfloat16)


def dropout(x, *, training=False):
    """Training drops half of the inputs, drawn from NumPy's global state."""
    kept = np.random.random(x.shape) < 0.5 if training else 1
    return so_far(x * kept)


def cached_decoding(x):
    """One position after another, each from the slots filled so far."""
    cache = np.zeros_like(x)
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        cache[:, t] = x[:, t]
        past = cache[:, : t + 1]
        y[:, t : t + 1] = softmax(x[:, t : t + 1] @ past.mT) @ past
    return y


def window(x):
    """Four keys, the query's own among them."""
    return attend(x, causal(x.shape[1]) & ~causal(x.shape[1], k=-4))


def chunked_linear_attention(x):
    """A state from the chunks before, a masked product within the chunk."""
    state = np.zeros((len(x), x.shape[2], x.shape[2]), np.float32)
    parts = []
    for start in range(0, x.shape[1], CHUNK):
        chunk = x[:, start : start + CHUNK]
        within = np.where(causal(chunk.shape[1]), chunk @ chunk.mT, 0)
        parts.append(within @ chunk + chunk @ state)
        state = state + chunk.mT @ chunk
    return np.concatenate(parts, axis=1)


def summaries_of_earlier_chunks(x):
    """Each chunk of 8 reads the sum of the chunk before it."""
    starts = np.arange(0, x.shape[1], CHUNK)
    summaries = np.add.reduceat(x, starts, axis=1)
    earlier = np.pad(summaries, ((0, 0), (1, 0), (0, 0)))
    return x + earlier[:, np.arange(x.shape[1]) // CHUNK]


def causal_convolution(x):
    """Five taps for every feature, padded in front."""
    return convolve(x, TAPS, first=-4)


def token_shift(x):
    """Each position is mixed with the one before."""
    return convolve(x, np.float32([0.5, 0.5]), first=-1)


def padded_filter(x):
    """A long filter through the FFT, padded to twice the length."""
    length = x.shape[1]
    spectrum = np.fft.rfft(x, 2 * length, axis=1)
    spectrum = spectrum * np.fft.rfft(DECAY[:length], 2 * length, axis=0)
    return np.fft.irfft(spectrum, 2 * length, axis=1)[:, :length].astype(np.float32)


def total_minus_suffix(x):
    """What came so far is everything less what is yet to come."""
    suffix = np.cumsum(x[:, ::-1], axis=1)[:, ::-1]
    return x.sum(axis=1, keepdims=True) - suffix + x


def moving_average(x):
    """An exponential moving average, step by step."""
    state = np.zeros_like(x[:, 0])
    y = np.zeros_like(x)
    for t in range(x.shape[1]):
        y[:, t] = state = 0.9 * state + 0.1 * x[:, t]
    return y


def running_maximum(x):
    return np.maximum.accumulate(x, axis=1)


def norm_over_past(x):
    """Divided by the root mean square of what came so far."""
    return x / np.sqrt(so_far(np.square(x)) + 1e-6)


def flipped_twice(x):
    """A sum from the end, between two flips."""
    y = np.flip(x, axis=1)
    y = np.cumsum(y[:, ::-1], axis=1)[:, ::-1]
    return np.flip(y, axis=1)


def experts_chosen_by_token(x):
    """Each token goes to the best two of four experts."""
    scores = x @ EXPERTS
    second = np.sort(scores, axis=-1)[..., -2:-1]
    return np.where(scores >= second, np.tanh(scores), 0)


def expert_capacity_from_front(x):
    """An expert is full after four tokens, counted from the start."""
    wants = x @ GATE > 0
    return x + np.where(wants & (np.cumsum(wants, axis=1) <= 4), 1, 0)[..., None]


def count_of_nonzeros_so_far(x):
    """Sums are divided by the number of inputs so far that are not zero."""
    count = np.cumsum(np.any(x != 0, axis=-1), axis=1)[..., None]
    return np.cumsum(x, axis=1) / np.maximum(count, 1)


def blank_where_not_finite(x):
    """Inputs that are not finite count as zero."""
    return so_far(np.where(np.isfinite(x), x, 0))


def norm_over_features(x):
    return normalised(x) + np.fft.fft(x, axis=-1).real.astype(np.float32)


def constant(x):
    return np.zeros_like(x)


def learned_positions(x):
    """A table of positions, which refuses what is longer."""
    if x.shape[1] > LENGTH:
        raise ValueError(f"{x.shape[1]} positions, but only {LENGTH} are learned")
    return attend_causally(x + POSITIONS[: x.shape[1]])


def fixed_length(x):
    """Weights over time for one length."""
    return np.tril(normal(LENGTH, LENGTH, seed=8)) @ x


def over_two_devices(x):
    """Rows are laid out over two devices, so an odd number is refused."""
    y = np.cumsum(x.reshape(2, -1, *x.shape[1:]), axis=2)
    return y.reshape(x.shape)


def ids(x):
    """Returns ids [B T], not vectors."""
    return (so_far(x) @ EXPERTS).argmax(axis=-1)


def previous_tokens(tokens):
    """Logits from the counts of the tokens so far."""
    return np.cumsum(np.eye(VOCAB)[tokens], axis=1)


def end_of_text_resets(tokens):
    """Attention within a text; texts are numbered by the ends before them."""
    text = np.cumsum(tokens == 0, axis=1)
    visible = causal(tokens.shape[1]) & (text[:, :, None] == text[:, None])
    y = attend(EMBEDDING[tokens], visible[:, None])
    return logits(y)


NAN = ("nan-unsafe",)
ROUNDING = ("rounding", "nan-unsafe")

HONEST: Mapping[str, Specimen] = types.MappingProxyType(
    {
        # Of this codebase.
        "CausalLM": lazy("jax_specimens", "our_language_model", input="tokens"),
        # From outside.
        "flax attention": lazy("jax_specimens", "flax_attention", shows=NAN),
        "JAX scan": lazy("jax_specimens", "jax_recurrence"),
        "flax dilated convolution": lazy("jax_specimens", "flax_dilated_convolution"),
        "jax.nn attention": lazy("jax_specimens", "jax_attention", shows=NAN),
        "PyTorch attention": lazy(
            "torch_specimens", "Attention", needs="torch", shows=NAN
        ),
        "PyTorch TransformerEncoderLayer": lazy(
            "torch_specimens", "EncoderLayer", needs="torch", shows=NAN
        ),
        "PyTorch LSTM": lazy("torch_specimens", "LSTM", input="tokens", needs="torch"),
        "attention": vectors(attend_causally, shows=NAN),
        "additive mask": vectors(additive_mask, shows=NAN),
        "float16 attention": vectors(float16_attention, shows=NAN),
        "bfloat16 attention": vectors(bfloat16_attention, shows=NAN),
        "dropout": vectors(dropout),
        "window": vectors(window, shows=NAN),
        "cached decoding": vectors(cached_decoding),
        "chunked linear attention": vectors(chunked_linear_attention, shows=NAN),
        "summaries of earlier chunks": vectors(summaries_of_earlier_chunks),
        "causal convolution": vectors(causal_convolution),
        "token shift": vectors(token_shift),
        "padded FFT filter": vectors(padded_filter, shows=ROUNDING),
        "total minus suffix": vectors(total_minus_suffix, shows=ROUNDING),
        "moving average": vectors(moving_average),
        "cumulative mean": vectors(so_far),
        "running maximum": vectors(running_maximum),
        "norm over the past": vectors(norm_over_past),
        "norm over features": vectors(norm_over_features),
        "flipped twice": vectors(flipped_twice),
        "experts chosen by token": vectors(experts_chosen_by_token),
        "expert capacity from the front": vectors(expert_capacity_from_front),
        "count of nonzeros so far": vectors(count_of_nonzeros_so_far),
        "blank where not finite": vectors(blank_where_not_finite),
        "constant": vectors(constant),
        "learned positions": vectors(learned_positions, shows=NAN),
        "fixed length": vectors(fixed_length, shows=NAN),
        "over two devices": vectors(over_two_devices),
        "ids": vectors(ids),
        "counts of tokens so far": tokens(previous_tokens),
        "attention within texts": tokens(end_of_text_resets),
        "bigram trainer": tokens(
            tokens_leaks.honest, trainer=tokens_leaks.honest_trainer
        ),
    }
)

"""Planted leaks: bugs of masks and of attention. x [B T E] -> y [B T E]."""

import numpy as np

from tests.specimens.parts import (
    CHUNK,
    HEADS,
    attend,
    attend_causally,
    causal,
    merge,
    projected,
    softmax,
)


def mask_off_by_one(x):
    """The triangle has a diagonal too many."""
    return attend(x, causal(x.shape[1], k=1))


def mask_transposed(x):
    """Queries and keys have changed places in the mask."""
    return attend(x, causal(x.shape[1]).T)


def mask_after_softmax(x):
    """Weights are masked after the softmax, and not divided by their sum again."""
    scores, value = projected(x)
    return merge(softmax(scores) * causal(x.shape[1]) @ value)


def mask_multiplied(x):
    """Scores are multiplied by the mask: a masked score is 0, not -inf."""
    scores, value = projected(x)
    return merge(softmax(scores * causal(x.shape[1])) @ value)


def mask_not_on_one_head(x):
    """A mask for every head, of which the last was forgotten."""
    visible = np.stack([causal(x.shape[1])] * HEADS)
    visible[-1] = True
    return attend(x, visible)


def mask_or_padding(x):
    """The causal mask is joined with the padding mask by | in place of &."""
    is_token = np.any(x != 0, axis=-1)[:, None, None, :]
    return attend(x, causal(x.shape[1]) | is_token)


def mask_in_first_layer_only(x):
    """The second layer is called without the mask."""
    hidden = attend_causally(x)
    return hidden + attend(hidden, True)


def softmax_over_queries(x):
    """The softmax runs over the axis of queries."""
    scores, value = projected(x)
    masked = np.where(causal(x.shape[1]), scores, -np.inf)
    return merge(softmax(masked, axis=-2) @ value)


def scores_standardised(x):
    """Scores are divided by their deviation over the whole sequence."""
    scores, value = projected(x)
    scores = scores / scores.std(axis=(1, 2, 3), keepdims=True)
    return merge(softmax(np.where(causal(x.shape[1]), scores, -np.inf)) @ value)


def stabilised_over_sequence(x):
    """The maximum that stabilises exp is taken over masked scores too.

    It cancels in exact arithmetic; in float32 a huge later score takes all the weights
    with it.
    """
    scores, value = projected(x)
    weights = np.exp(scores - scores.max(axis=(2, 3), keepdims=True))
    weights = weights * causal(x.shape[1])
    return merge(weights / weights.sum(axis=-1, keepdims=True) @ value)


def additive_float16_mask(x):
    """-1e4 is added to masked scores in float16, where scores may differ by more."""
    scores, value = projected(x)
    bias = np.where(causal(x.shape[1]), 0, -1e4).astype(np.float16)
    weights = softmax(scores.astype(np.float16) + bias)
    return merge(weights @ value.astype(np.float16))


def empty_row_sees_all(x):
    """A query sees keys before its own; the first sees none, and -1e9 cancels."""
    scores, value = projected(x)
    bias = np.where(causal(x.shape[1], k=-1), 0, -1e9).astype(np.float32)
    return merge(softmax(scores + bias) @ value)


def penalty_for_mask(x):
    """Distance is punished on both sides, as ALiBi does it, and nothing is masked."""
    scores, value = projected(x)
    position = np.arange(x.shape[1])
    distance = np.abs(position[:, None] - position)
    return merge(softmax(scores - distance.astype(np.float32)) @ value)


def window_with_wrong_sign(x):
    """Key minus query is compared with the window where query minus key was meant."""
    position = np.arange(x.shape[1])
    distance = position - position[:, None]
    return attend(x, (distance >= 0) & (distance < 4))


def window_to_both_sides(x):
    """A window of a width, without the causal mask."""
    position = np.arange(x.shape[1])
    return attend(x, np.abs(position[:, None] - position) < 4)


def prefix_mask_left_on(x):
    """The prompt's five positions still see one another."""
    visible = causal(x.shape[1])
    visible[:5, :5] = True
    return attend(x, visible)


def mask_in_blocks_of_two(x):
    """The mask is made for blocks of two keys: a query at an even place sees one on."""
    block = np.arange(x.shape[1]) // 2
    return attend(x, block[:, None] >= block)


def mask_of_32_positions(x):
    """The buffer of the mask ends at 32; beyond it nothing is masked."""
    visible = np.ones((x.shape[1],) * 2, bool)
    visible[:32, :32] = causal(32)[: len(visible), : len(visible)]
    return attend(x, visible)


def ragged_chunk_unmasked(x):
    """Attention within chunks of 8; what is left over at the end has its own path."""
    position = np.arange(x.shape[1])
    chunk = position // CHUNK
    left_over = position >= len(position) // CHUNK * CHUNK
    visible = causal(len(position)) | (left_over[:, None] & left_over)
    return attend(x, visible & (chunk[:, None] == chunk))


def long_path_unmasked(x):
    """Past 64 positions another kernel runs, to which nobody passed the mask."""
    return attend(x, causal(x.shape[1]) if x.shape[1] <= 64 else True)


def one_row_unmasked(x):
    """One row alone is taken for a step of decoding, which needs no mask."""
    return attend(x, causal(x.shape[1]) if len(x) > 1 else True)


def mask_of_rows_or_heads(x):
    """A padding mask of N rows is taken for a mask of N heads, whole as it is."""
    mask = np.ones((len(x), x.shape[1], x.shape[1]), bool)
    if len(mask) == HEADS:
        return attend(x, mask)
    return attend(x, mask[:, None] & causal(x.shape[1]))


def rows_packed(x):
    """Batches of eight are packed into one row, with no mask between their parts."""
    if len(x) != 8:
        return attend_causally(x)
    return attend_causally(x.reshape(1, -1, x.shape[2])).reshape(x.shape)


def heads_merged_without_moving(x):
    """[B N T H] is reshaped to [B T E] before the axis of heads is moved."""
    scores, value = projected(x)
    weights = softmax(np.where(causal(x.shape[1]), scores, -np.inf))
    return (weights @ value).reshape(x.shape)


def cache_read_one_late(x):
    """Prefill fills the cache; step t then reads its slots up to t + 1."""
    steps = [x[:, : t + 2].mean(axis=1) for t in range(x.shape[1])]
    return np.stack(steps, axis=1)

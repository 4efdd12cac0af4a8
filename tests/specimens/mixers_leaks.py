"""Planted leaks: bugs of everything beside attention. x [B T E] -> y [B T E]."""

import numpy as np

from tests.specimens.parts import (
    CHUNK,
    WIDTH,
    attend_causally,
    convolve,
    normal,
    normalised,
    softmax,
)

TAPS = normal(5, WIDTH, seed=2)
# A filter that reaches far back, and mixing weights that reach from key to query.
DECAY = np.exp(-np.arange(128) / 8).astype(np.float32)[:, None]
TOKEN_MIXING = normal(128, 128, seed=3)
GATE = normal(WIDTH, seed=4)


def so_far(x):
    """The cumulative mean, the honest part of many leaks."""
    return np.cumsum(x, axis=1) / np.arange(1, x.shape[1] + 1)[:, None]


def norm_over_time(x):
    """LayerNorm over the axis of time."""
    return attend_causally(normalised(x, axis=1))


def batch_statistics(x):
    """BatchNorm with the statistics of the batch, over rows and time."""
    return attend_causally(normalised(x, axis=(0, 1)))


def batch_statistics_per_position(x):
    """BatchNorm of every position: no later input is seen, but other rows are."""
    return attend_causally(x - x.mean(axis=0))


def time_statistics_in_training(x, train=False):
    """Training normalises by the mean of the sequence, evaluation does not."""
    return attend_causally(x - x.mean(axis=1, keepdims=True) if train else x)


def positions_dropped_in_training(x, training=False):
    """Training leaves out the half of a sequence with the smallest norms."""
    if not training:
        return so_far(x)
    norms = np.square(x).sum(axis=-1, keepdims=True)
    return so_far(np.where(norms >= np.median(norms, axis=1, keepdims=True), x, 0))


def centred_convolution(x):
    """Padding on both sides, as 'same' does."""
    return convolve(x, TAPS, first=-2)


def token_shift_reversed(x):
    """Each position is mixed with the next, where the one before was meant."""
    return x + np.pad(x, ((0, 0), (0, 1), (0, 0)))[:, 1:]


def token_shift_rolled(x):
    """np.roll: what falls off the end comes back at the start."""
    return x + np.roll(x, 1, axis=1)


def central_differences(x):
    """np.gradient takes differences to both sides."""
    return np.gradient(x, axis=1) if x.shape[1] > 1 else x


def projection_of_transpose(x):
    """[B T E] is reshaped to [B E T] where a transpose was meant, and back by one."""
    return np.tanh(x.reshape(len(x), x.shape[2], x.shape[1])).mT


def token_mixing_transposed(x):
    """The triangle of an MLP over time is taken before its weights are transposed."""
    length = x.shape[1]
    return np.tril(TOKEN_MIXING[:length, :length]).T @ x


def low_rank_over_time(x):
    """Linformer: keys and values are mixtures of the whole sequence."""
    landmarks = TOKEN_MIXING[: x.shape[1], :4].T @ x
    return softmax(x @ landmarks.mT) @ landmarks


def circular_filter(x):
    """A long filter through the FFT, without padding: the end wraps to the start."""
    length = x.shape[1]
    spectrum = np.fft.rfft(x, axis=1) * np.fft.rfft(DECAY[:length], axis=0)
    return np.fft.irfft(spectrum, length, axis=1).astype(np.float32)


def summary_of_own_chunk(x):
    """Each chunk of 8 reads the summary of itself, not of those before."""
    starts = np.arange(0, x.shape[1], CHUNK)
    summaries = np.add.reduceat(x, starts, axis=1)
    return x + summaries[:, np.arange(x.shape[1]) // CHUNK]


def expert_choice(x):
    """An expert takes the best quarter of the sequence, so a place depends on all."""
    scores = x @ GATE
    chosen = np.sort(scores, axis=1)[:, -max(1, x.shape[1] // 4)]
    return x + np.where(scores >= chosen[:, None], np.tanh(scores), 0)[..., None]


def expert_capacity_from_behind(x):
    """An expert is full after four tokens, counted from the end."""
    wants = x @ GATE > 0
    queue = np.cumsum(wants[:, ::-1], axis=1)[:, ::-1]
    return x + np.where(wants & (queue <= 4), 1, 0)[..., None]


def bidirectional(x):
    """A recurrence from each side."""
    forward, backward = np.zeros_like(x), np.zeros_like(x)
    state = other = np.zeros_like(x[:, 0])
    for t in range(x.shape[1]):
        forward[:, t] = state = np.tanh(x[:, t] + 0.5 * state)
        backward[:, -1 - t] = other = np.tanh(x[:, -1 - t] + 0.5 * other)
    return forward + backward


def sum_from_the_end(x):
    """The cumulative sum was flipped and not flipped back."""
    return np.cumsum(x[:, ::-1], axis=1)[:, ::-1]


def sorted_over_time(x):
    """np.sort over axis 1."""
    return np.sort(x, axis=1)


def median_of_three(x):
    """Outliers are smoothed by the median of a position and its two neighbours."""
    padded = np.pad(x, ((0, 0), (1, 1), (0, 0)), mode="edge")
    return np.median([padded[:, :-2], x, padded[:, 2:]], axis=0)


def quantised_by_maximum(x):
    """int8 with one scale for a sequence, from its largest number."""
    scale = np.abs(x).max(axis=(1, 2), keepdims=True) / 127 + 1e-12
    return so_far(np.round(x / scale) * scale)


def clipped_by_norm(x):
    """The norm of the whole sequence is clipped at 8."""
    norm = np.sqrt(np.square(x).sum(axis=(1, 2), keepdims=True))
    return so_far(x * np.minimum(1, 8 / np.maximum(norm, 1e-6)))


def gate_of_mean(x):
    """Squeeze and excite: a gate from the mean over time."""
    return so_far(x) / (1 + np.exp(-x.mean(axis=1, keepdims=True)))


def upsampled_linearly(x):
    """Every second position is computed, the ones between are interpolated."""
    computed = so_far(x)
    between = (computed[:, 0:-2:2] + computed[:, 2::2]) / 2
    result = computed.copy()
    result[:, 1 : 1 + 2 * between.shape[1] : 2] = between
    return result


def count_of_nonzeros(x):
    """Sums are divided by the number of inputs that are not exactly zero."""
    count = np.any(x != 0, axis=-1).sum(axis=1)[:, None, None]
    return np.cumsum(x, axis=1) / np.maximum(count, 1)


def left_padding_from_zeros(x):
    """Zeros at the end are taken for padding, and the rest is moved to the right."""
    is_token = np.any(x != 0, axis=-1)
    padding = is_token[:, ::-1].argmax(axis=1)
    rows = zip(so_far(x), padding, strict=True)
    return np.stack([np.roll(row, count, axis=0) for row, count in rows])


def blank_if_not_finite(x):
    """A guard returns zeros for a row that holds anything not finite."""
    finite = np.isfinite(x).all(axis=(1, 2), keepdims=True)
    return np.where(finite, so_far(x), 0)

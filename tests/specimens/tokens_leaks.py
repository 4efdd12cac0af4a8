"""Planted leaks: bugs of models of tokens int [B T] -> logits [B T V]."""

import numpy as np

from tests.specimens.parts import (
    BYTES,
    EMBEDDING,
    END_OF_TRANSMISSION,
    VOCAB,
    attend_causally,
    logits,
    normal,
)

BIGRAM = normal(VOCAB, VOCAB, seed=5)


def honest(tokens):
    """One layer of causal attention."""
    return logits(attend_causally(EMBEDDING[tokens]))


def next_token_embedded(tokens):
    """Inputs were shifted like the labels: a position embeds its own target."""
    shifted = np.concatenate([tokens[:, 1:], tokens[:, -1:]], axis=1)
    return honest(shifted)


def probabilities_over_sequence(tokens):
    """Log-probabilities are normalised over positions and ids together."""
    scores = honest(tokens)
    return scores - np.log(np.exp(scores).sum(axis=(1, 2), keepdims=True))


def loss_weight_in_logits(tokens):
    """Logits carry the loss's weight: one over the number of tokens that are not 0."""
    count = (tokens != 0).sum(axis=1)[:, None, None]
    return honest(tokens) / np.maximum(count, 1)


def repetition_penalty(tokens):
    """The penalty counts the whole sequence, not what has been said so far."""
    return honest(tokens) - 0.5 * np.eye(VOCAB)[tokens].sum(axis=1, keepdims=True)


def ids_renumbered(tokens):
    """np.unique gives a text's ids new numbers, in the order of all that it holds."""
    rows = [np.unique(row, return_inverse=True)[1] for row in tokens]
    return BIGRAM[np.stack(rows)]


def positions_from_the_end(tokens):
    """Positions count the tokens that are not 0, from the last one."""
    places = np.cumsum((tokens != 0)[:, ::-1], axis=1)[:, ::-1] % VOCAB
    return BIGRAM[tokens] + BIGRAM[places]


def successor_anywhere(tokens):
    """The successor of an equal token is copied from the future as well."""
    equal = tokens[:, :, None] == tokens[:, None, :-1]
    return equal.astype(np.float32) @ np.eye(VOCAB)[tokens[:, 1:]]


def seeded_by_content(tokens):
    """Noise is seeded by a checksum of the row, to be the same at every call."""
    rng = [np.random.default_rng(int(row.sum())) for row in tokens]
    noise = np.stack([r.normal(size=(tokens.shape[1], 1)) for r in rng])
    return BIGRAM[tokens] + noise


def merged_pairs(tokens):
    """A tokenizer inside merges 3 followed by 5 into one id, at both places."""
    pair = np.zeros(tokens.shape, bool)
    pair[:, :-1] = (tokens[:, :-1] == 3) & (tokens[:, 1:] == 5)
    pair[:, 1:] |= pair[:, :-1]
    return BIGRAM[np.where(pair, 16, tokens)]


def last_byte_ends_all(bytes_):
    """Byte 4 in the last place, and nothing else, marks a row as finished."""
    finished = bytes_[:, -1] == END_OF_TRANSMISSION
    y = EMBEDDING[bytes_] * np.where(finished, 0.5, 1)[:, None, None]
    return logits(y.astype(np.float32), BYTES)


def previous_row_for_token(tokens):
    """The token before is taken along the axis of the batch."""
    return BIGRAM[tokens] + BIGRAM[np.roll(tokens, 1, axis=0)]


def shared_prompt(tokens):
    """What all rows begin with, behind the first token, has a path of its own."""
    shared = np.logical_and.accumulate((tokens == tokens[:1]).all(axis=0))
    shared[0] = False
    return BIGRAM[tokens] + 0.1 * shared[:, None]


def _counts(inputs, targets):
    """Bigram probabilities [V V], one added to every count."""
    counts = np.ones((VOCAB, VOCAB))
    np.add.at(counts, (inputs, targets), 1)
    return counts / counts.sum(axis=1, keepdims=True)


def honest_trainer(rows):
    """Bigrams counted in `rows`; losses of any others."""
    table = _counts(rows[:, :-1], rows[:, 1:])
    return lambda fresh: -np.log(table[fresh[:, :-1], fresh[:, 1:]])


def labels_not_shifted(rows):
    """Labels are the inputs themselves."""
    table = _counts(rows[:, 1:], rows[:, 1:])
    return lambda fresh: -np.log(table[fresh[:, 1:], fresh[:, 1:]])


def adapts_before_it_scores(rows):
    """Evaluation goes on counting, and counts the rows before it scores them."""

    def losses(fresh):
        both = np.concatenate([rows, fresh])
        table = _counts(both[:, :-1], both[:, 1:])
        return -np.log(table[fresh[:, :-1], fresh[:, 1:]])

    return losses

"""Planted leaks and honest models in PyTorch; imported only where it is installed."""

import torch
from torch import nn
from torch.nn import functional

from tests.specimens.parts import HEADS, VOCAB, WIDTH

# Models this small wait longer for threads than they compute.
torch.set_num_threads(1)


class Seeded(nn.Module):
    """A module whose parameters are always the same."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)


def blocked(x):
    """bool [T T]: PyTorch's modules take True for blocked."""
    return nn.Transformer.generate_square_subsequent_mask(x.shape[1]) < 0


# Leaks


class BatchFirstForgotten(Seeded):
    """Without batch_first the recurrence runs over rows."""

    def __init__(self):
        super().__init__()
        self.recurrence = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x):
        return self.recurrence(x)[0]


class Bidirectional(Seeded):
    """A bidirectional GRU."""

    def __init__(self):
        super().__init__()
        self.recurrence = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, x):
        return self.recurrence(x)[0]


class MaskInverted(Seeded):
    """MultiheadAttention is given True for what may be seen; to it True is blocked."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        visible = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
        return self.attention(x, x, x, attn_mask=visible, need_weights=False)[0]


class BatchNorm(Seeded):
    """BatchNorm1d over rows and time, in training only."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return self.norm(x.mT).mT


class GroupNorm(Seeded):
    """GroupNorm takes [B E T], so a group's statistics are over time."""

    def __init__(self):
        super().__init__()
        self.norm = nn.GroupNorm(1, WIDTH)

    def forward(self, x):
        return self.norm(x.mT).mT.cumsum(dim=1)


# Honest models


class Attention(Seeded):
    """scaled_dot_product_attention, is_causal."""

    def __init__(self):
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        heads = self.project(x).unflatten(-1, (3, HEADS, -1)).movedim(1, 3)
        y = functional.scaled_dot_product_attention(*heads.unbind(2), is_causal=True)
        return y.transpose(1, 2).flatten(2)


class EncoderLayer(Seeded):
    """TransformerEncoderLayer under a causal mask, with its dropout in training."""

    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 8, batch_first=True)

    def forward(self, x):
        return self.layer(x, src_mask=blocked(x), is_causal=True)


class LSTM(Seeded):
    """A language model of one LSTM."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        self.recurrence = nn.LSTM(WIDTH, WIDTH, batch_first=True)
        self.logits = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens):
        return self.logits(self.recurrence(self.embedding(tokens))[0])

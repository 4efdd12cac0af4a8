"""Tasks with one right answer: induction, copy, brackets, associative recall.

    induction   … a b … a         -> b          what followed this token before?
    copy        x₁ … xₙ | x₁ …     -> …  xₙ      repeat what stands before the bar
    brackets    ( [ ( ) ] …       -> )          close what was opened last
    recall      a 3 b 7 … b 7 … a  -> 3          the value that this key came with

A row is T + 1 tokens. The target of position t is token t + 1, and a mask says which
targets count: exactly those that follow from the tokens before them. So a model that
solves a task reaches an accuracy of 1 and a loss of 0.

Olsson et al., 2022, arXiv:2209.11895 and Dao et al., 2023, arXiv:2212.14052
(induction); Graves et al., 2014, arXiv:1410.5401 (copy); Hewitt et al., 2020,
arXiv:2010.07515 and Yao et al., 2021, arXiv:2105.11115 (Dyck languages of bounded
depth); Arora et al., 2023, arXiv:2312.04927 (multi-query associative recall).
"""

import dataclasses
import types
from collections.abc import Mapping
from typing import Annotated, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Int

from models import config as model_config

Row = tuple[Int[Array, "T_and_next"], Bool[Array, "T"]]


@runtime_checkable
class Task(Protocol):
    """The distribution of the rows; hashable, so that it may be a static argument."""

    @property
    def vocab_size(self) -> int:
        """V, the number of ids."""

    @property
    def length(self) -> int:
        """T, tokens that the model reads of a row."""

    def row(self, rng: Array) -> Row:
        """Draws one row: its tokens, and which targets count."""


@dataclasses.dataclass(frozen=True)
class Induction:
    """Random tokens, the last of which occurred once before: what followed it?

    Raises:
      ValueError: a value is out of range.
    """

    num_symbols: Annotated[int, "V, different tokens"]
    length: Annotated[int, "T, tokens that the model reads; the last one asks"]

    def __post_init__(self) -> None:
        """Checks each value."""
        model_config.at_least(self, 2, "num_symbols")
        model_config.at_least(self, 3, "length")

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.num_symbols

    def row(self, rng: Array) -> Row:
        """Draws one row, of which only the last target counts."""
        T, V = self.length, self.num_symbols
        asked_rng, position_rng, rest_rng = jax.random.split(rng, 3)
        asked = jax.random.randint(asked_rng, (), 0, V)
        # At most T - 3: the token that follows must not be the question itself.
        position = jax.random.randint(position_rng, (), 0, T - 2)
        # The other tokens all differ from the one that is asked about.
        rest = (asked + jax.random.randint(rest_rng, (T,), 1, V)) % V
        tokens = rest.at[position].set(asked).at[T - 1].set(asked)
        tokens = jnp.append(tokens, tokens[position + 1])
        return tokens, jnp.arange(T) == T - 1


@dataclasses.dataclass(frozen=True)
class Copy:
    """Random tokens, a bar, and the same tokens again.

    Raises:
      ValueError: a value is out of range.
    """

    num_symbols: Annotated[int, "different tokens beside the bar"]
    num_copied: Annotated[int, "tokens before the bar"]

    def __post_init__(self) -> None:
        """Checks each value."""
        model_config.at_least(self, 1, "num_symbols", "num_copied")

    @property
    def vocab_size(self) -> int:
        """V: the symbols, and the bar as the last id."""
        return self.num_symbols + 1

    @property
    def length(self) -> int:
        """T: all tokens but the last."""
        return 2 * self.num_copied

    def row(self, rng: Array) -> Row:
        """Draws one row, of which the targets behind the bar count."""
        symbols = jax.random.randint(rng, (self.num_copied,), 0, self.num_symbols)
        bar = jnp.full(1, self.num_symbols, symbols.dtype)
        tokens = jnp.concatenate([symbols, bar, symbols])
        return tokens, jnp.arange(self.length) >= self.num_copied


@dataclasses.dataclass(frozen=True)
class Brackets:
    """A word of a Dyck language: brackets of several kinds, properly nested.

    Wherever the next bracket may both open and close, a fair coin decides; the kind of
    a closing bracket follows from the one that was opened last.

    Raises:
      ValueError: a value is out of range.
    """

    num_kinds: Annotated[int, "kinds of brackets"]
    max_depth: Annotated[int, "brackets that are open at once, at most"]
    num_pairs: Annotated[int, "pairs of brackets in a row"]

    def __post_init__(self) -> None:
        """Checks each value."""
        model_config.at_least(self, 1, "num_kinds", "max_depth", "num_pairs")

    @property
    def vocab_size(self) -> int:
        """V: kind k opens with id k and closes with num_kinds + k."""
        return 2 * self.num_kinds

    @property
    def length(self) -> int:
        """T: all tokens but the last."""
        return 2 * self.num_pairs - 1

    def row(self, rng: Array) -> Row:
        """Draws one row, of which the closing brackets count."""
        total = 2 * self.num_pairs
        coin_rng, kind_rng = jax.random.split(rng)
        coins = jax.random.bernoulli(coin_rng, shape=(total,))
        kinds = jax.random.randint(kind_rng, (total,), 0, self.num_kinds)

        def step(
            stack_and_depth: tuple[Array, Array], drawn: tuple[Array, Array, Array]
        ) -> tuple[tuple[Array, Array], Array]:
            (stack, depth), (position, coin, kind) = stack_and_depth, drawn
            full = (depth == self.max_depth) | (depth == total - position)
            opens = ~full & (coin | (depth == 0))
            kind = jnp.where(opens, kind, stack[jnp.maximum(depth - 1, 0)])
            # Entries above the depth are overwritten before they are read again.
            stack = jnp.where(opens, stack.at[depth].set(kind), stack)
            depth += jnp.where(opens, 1, -1)
            return (stack, depth), jnp.where(opens, kind, self.num_kinds + kind)

        empty = jnp.zeros(self.max_depth, kinds.dtype), jnp.int32(0)
        tokens: Array = lax.scan(step, empty, (jnp.arange(total), coins, kinds))[1]
        return tokens, tokens[1:] >= self.num_kinds


@dataclasses.dataclass(frozen=True)
class Recall:
    """Pairs of a key and a value; then each key again, in any order: which value?

    The pairs are followed by slots of two tokens: in one of them, drawn at random, each
    pair stands again; the others are blank.

    Raises:
      ValueError: a value is out of range, or there are fewer keys or slots than pairs.
    """

    num_keys: Annotated[int, "keys to draw from"]
    num_values: Annotated[int, "values to draw from"]
    num_pairs: Annotated[int, "pairs of a row, whose keys differ"]
    num_slots: Annotated[int, "slots for questions, two tokens each"]

    def __post_init__(self) -> None:
        """Checks each value, then values against each other."""
        model_config.at_least(self, 1, "num_values", "num_pairs")
        model_config.at_least(self, self.num_pairs, "num_keys", "num_slots")

    @property
    def vocab_size(self) -> int:
        """V: the keys, then the values, then the blank."""
        return self.num_keys + self.num_values + 1

    @property
    def length(self) -> int:
        """T: all tokens but the last."""
        return 2 * (self.num_pairs + self.num_slots) - 1

    def row(self, rng: Array) -> Row:
        """Draws one row, of which the values in the slots count."""
        key_rng, value_rng, slot_rng = jax.random.split(rng, 3)
        keys = jax.random.permutation(key_rng, self.num_keys)[: self.num_pairs]
        values = jax.random.randint(
            value_rng, (self.num_pairs,), self.num_keys, self.vocab_size - 1
        )
        pairs = jnp.stack([keys, values], axis=1)
        slots = jax.random.permutation(slot_rng, self.num_slots)[: self.num_pairs]
        blank = jnp.full((self.num_slots, 2), self.vocab_size - 1, pairs.dtype)
        tokens = jnp.concatenate([pairs, blank.at[slots].set(pairs)]).reshape(-1)
        asked = (tokens < self.num_keys) & (jnp.arange(tokens.size) >= pairs.size)
        return tokens, asked[:-1]


TASKS: Mapping[str, type[Task]] = types.MappingProxyType(
    {"induction": Induction, "copy": Copy, "brackets": Brackets, "recall": Recall}
)

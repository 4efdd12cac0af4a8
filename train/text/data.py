"""Text to token ids, and token ids to batches and evaluation windows.

A text of M tokens is split by position: the first 9/10 train, the rest validates.
With context T, one example is T + 1 consecutive tokens, so a split of M tokens has
M − T examples, the last of which ends at the last token:

    start_b ~ Uniform{0, …, M − T − 1},   batch[b, t] = tokens[start_b + t],  0 ≤ t ≤ T

The starts are drawn from `fold_in(rng, step)`: a batch is a pure function of seed and
step, so a resumed run needs no iterator state. Evaluation draws nothing: window w
holds tokens wT … wT + T, hence every token but the first is a target exactly once.
"""

import dataclasses
import hashlib
import math

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from train.text import tokenizers

DEFAULT_CORPUS = "pydoc_data.topics"


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """A tokenized text in its two splits.

    Attributes:
      train: int32 ids [M], the first 9/10 of the text.
      validation: int32 ids, the rest.
      tokenizer: what made the ids.
      path: the file, or the name of the default corpus.
      sha256: hexadecimal digest of the text in UTF-8.
    """

    train: Int[np.ndarray, "M"]
    validation: Int[np.ndarray, "M_validation"]
    tokenizer: tokenizers.Tokenizer
    path: str
    sha256: str

    @property
    def num_tokens(self) -> int:
        """Tokens of the whole text."""
        return self.train.size + self.validation.size


def load_text(path: str | None) -> tuple[str, str]:
    """Reads a UTF-8 text file, or the Python language reference.

    Args:
      path: a file; None for the reference that ships inside CPython, whose text
        differs between Python releases.

    Returns:
      The text, line ends untouched, and the SHA-256 of its bytes in hexadecimal.

    Raises:
      ValueError: the file is missing, unreadable, empty or not UTF-8 text.
    """
    raw = _python_reference() if path is None else _read(path)
    if not raw:
        raise ValueError(f"data.path {path!r} is empty")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"data.path {path!r} is not UTF-8 text: "
            f"byte 0x{raw[error.start]:02x} at offset {error.start}"
        ) from None
    # A zero byte is valid UTF-8, yet text has none and most binary formats do.
    if (offset := raw.find(0)) >= 0:
        raise ValueError(f"data.path {path!r} is binary: a zero byte at {offset}")
    return text, hashlib.sha256(raw).hexdigest()


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError as error:
        raise ValueError(
            f"data.path {path!r} cannot be read: {error.strerror}"
        ) from None


def _python_reference() -> bytes:
    try:
        # Half a megabyte that a run on another text need not load, and that some
        # distributors leave out of their Python.
        from pydoc_data import topics
    except ImportError:
        raise ValueError(
            f"this Python lacks {DEFAULT_CORPUS}, the default corpus: give data.path"
        ) from None
    return "".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def split(
    tokens: Int[np.ndarray, "M"],
) -> tuple[Int[np.ndarray, "M_train"], Int[np.ndarray, "M_validation"]]:
    """Splits by position: the first 9/10 (rounded down) to train, the rest after."""
    cut = tokens.size * 9 // 10
    return tokens[:cut], tokens[cut:]


def load_corpus(path: str | None, *, tokenizer: str, context: int) -> Corpus:
    """Reads, tokenizes and splits a text.

    Args:
      path: as for `load_text`.
      tokenizer: a name in `tokenizers.TOKENIZERS`.
      context: T, tokens that the model sees at once.

    Returns:
      The corpus.

    Raises:
      ValueError: unusable text, unknown tokenizer, too few tokens for one example, or
        nothing to predict.
    """
    if tokenizer not in tokenizers.TOKENIZERS:
        raise ValueError(
            f"data.tokenizer must be one of {', '.join(tokenizers.TOKENIZERS)}, "
            f"got {tokenizer!r}"
        )
    text, sha256 = load_text(path)
    tokenize = tokenizers.TOKENIZERS[tokenizer](text)
    tokens = tokenize.encode(text)
    train, validation = split(tokens)
    name = DEFAULT_CORPUS if path is None else path
    if np.all(tokens == tokens[:1]):
        raise ValueError(f"data.path {name!r} has only one distinct character")
    if train.size < context + 1 or validation.size < 2:
        raise ValueError(
            f"data.path {name!r} is too short: of its {tokens.size} tokens "
            f"{train.size} train, which needs at least context + 1 = {context + 1}, "
            f"and {validation.size} validate, which needs at least 2"
        )
    return Corpus(train, validation, tokenize, name, sha256)


def sample_batch(
    tokens: Int[Array, "M"],
    rng: Array,
    step: int | Int[Array, ""],
    *,
    batch_size: int,
    context: int,
) -> Int[Array, "{batch_size} {context}+1"]:
    """Draws the batch of one step: uniform over all M - T examples, with replacement.

    Args:
      tokens: the training split.
      rng: key of the run's data; the step is folded in here.
      step: index of the step, possibly traced.
      batch_size: B.
      context: T.

    Returns:
      Tokens; columns 0 … T - 1 are inputs and 1 … T their targets.

    Raises:
      ValueError: fewer than T + 1 tokens.
    """
    num_starts = tokens.shape[0] - context
    if num_starts < 1:
        raise ValueError(
            f"the data needs at least context + 1 = {context + 1} tokens, "
            f"got {tokens.shape[0]}"
        )
    key = jax.random.fold_in(rng, step)
    starts = jax.random.randint(key, (batch_size, 1), 0, num_starts, jnp.int32)
    offsets = jnp.arange(context + 1, dtype=jnp.int32)[None, :]
    return jnp.take(tokens, starts + offsets, axis=0)


def windows(
    tokens: Int[np.ndarray, "M"], *, context: int
) -> tuple[Int[np.ndarray, "W {context}+1"], Bool[np.ndarray, "W {context}"]]:
    """Cuts a split into consecutive windows that score every token but the first once.

    Args:
      tokens: M ids.
      context: T.

    Returns:
      W = ceil((M - 1) / T) windows, each beginning with the last token of the one
      before, and which of their T targets count. The last window is filled up with
      id 0, and those targets do not count.

    Raises:
      ValueError: fewer than two tokens, so nothing to score.
    """
    num_targets = tokens.size - 1
    if num_targets < 1:
        raise ValueError(f"evaluation needs at least 2 tokens, got {tokens.size}")
    starts = np.arange(0, num_targets, context)[:, None]
    padded = np.pad(tokens, (0, starts.size * context - num_targets))
    mask = starts + np.arange(context)[None, :] < num_targets
    return padded[starts + np.arange(context + 1)[None, :]], mask


def bits_per_byte(
    nats_per_token: float,
    targets: Int[np.ndarray, "M"],
    *,
    tokenizer: tokenizers.Tokenizer,
) -> float:
    """Converts a loss to a unit that tokenizers share.

        bits/byte = nats/token ÷ ln 2 × tokens ÷ bytes

    Args:
      nats_per_token: mean loss over `targets`.
      targets: the ids that were scored, of which tokens and UTF-8 bytes are counted.
      tokenizer: what made the ids.

    Returns:
      Bits per byte of text.
    """
    num_bytes = len(tokenizer.decode_bytes(targets))
    return nats_per_token / math.log(2) * targets.size / num_bytes

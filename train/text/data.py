"""Text to token ids, and token ids to batches and evaluation windows.

A text is split by position: the first 9/10 of its tokens are the training split, the
rest the validation split. With context T, an example is T + 1 consecutive tokens, so
that a split of M tokens has M − T examples, the last of which ends at the last token:

    start_b ~ Uniform{0, …, M − T − 1},   batch[b, t] = tokens[start_b + t],  0 ≤ t ≤ T

The starts are drawn with the key `fold_in(rng, step)`. A batch is therefore a pure
function of seed and step, and a resumed run needs no iterator state. Evaluation is not
random: window w consists of the tokens wT … wT + T, so that every token except the
first is a target exactly once.
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
    """A tokenized text, divided into two splits.

    Attributes:
      train: int32 ids of the training split, the first 9/10 of the text.
      validation: int32 ids of the validation split, the rest of the text.
      tokenizer: the tokenizer that encoded the text.
      path: path of the file, or the name of the default corpus.
      sha256: hexadecimal SHA-256 digest of the text in UTF-8.
    """

    train: Int[np.ndarray, "M"]
    validation: Int[np.ndarray, "M_validation"]
    tokenizer: tokenizers.Tokenizer
    path: str
    sha256: str

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the whole text."""
        return self.train.size + self.validation.size


def load_text(path: str | None) -> tuple[str, str]:
    """Reads a UTF-8 text file, or the Python language reference.

    Args:
      path: path of a file; None for the reference that is part of CPython, whose text
        differs between Python releases.

    Returns:
      The text with its original line endings, and the hexadecimal SHA-256 digest of its
      bytes.

    Raises:
      ValueError: if the file does not exist, cannot be read, is empty or is not UTF-8
        text.
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
    # A zero byte is valid UTF-8, but indicates a binary format.
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
        # Imported here because it is half a megabyte, which a run on another text does
        # not need, and because some distributions of Python do not contain it.
        from pydoc_data import topics
    except ImportError:
        raise ValueError(
            f"this Python lacks {DEFAULT_CORPUS}, the default corpus: set data.path"
        ) from None
    return "".join(topics.topics[name] for name in sorted(topics.topics)).encode()


def split(
    tokens: Int[np.ndarray, "M"],
) -> tuple[Int[np.ndarray, "M_train"], Int[np.ndarray, "M_validation"]]:
    """Splits by position: the first 9/10, rounded down, for training, then the rest."""
    cut = tokens.size * 9 // 10
    return tokens[:cut], tokens[cut:]


def load_corpus(path: str | None, *, tokenizer: str, context: int) -> Corpus:
    """Reads, tokenizes and splits a text.

    Args:
      path: path of a UTF-8 text file; None for the Python language reference.
      tokenizer: 'bytes' or 'chars'.
      context: T, the number of tokens that the model sees at once.

    Returns:
      The corpus.

    Raises:
      ValueError: if the text is unusable, the tokenizer is unknown, the text has too
        few tokens for one example of T + 1 tokens, or all its tokens are equal.
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
      tokens: token ids of the training split.
      rng: random key of the run's data, with which the step is folded.
      step: index of the step, which may be traced.
      batch_size: B.
      context: T.

    Returns:
      Token ids [B T+1]; columns 0 … T - 1 are the inputs and 1 … T the targets.

    Raises:
      ValueError: if there are fewer than T + 1 tokens.
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
    """Divides a split into windows; every token except the first is a target once.

    Args:
      tokens: token ids of the split.
      context: T.

    Returns:
      W = ⌈(M - 1) / T⌉ windows of T + 1 ids, each starting with the last token of the
      window before; and a mask that is True where a target counts. The last window is
      filled up with id 0, and these targets do not count.

    Raises:
      ValueError: if there are fewer than 2 tokens.
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
    """Converts a loss to bits per byte, which does not depend on the tokenizer.

        bits/byte = nats/token ÷ ln 2 × tokens ÷ bytes

    Args:
      nats_per_token: mean loss over `targets`.
      targets: token ids of all targets, whose tokens and UTF-8 bytes are counted.
      tokenizer: the tokenizer that encoded the targets.

    Returns:
      Bits per byte of text.
    """
    num_bytes = len(tokenizer.decode_bytes(targets))
    return nats_per_token / math.log(2) * targets.size / num_bytes

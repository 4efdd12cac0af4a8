"""Tokenizers, text files, batches as functions of (seed, step), evaluation windows."""

import collections
import dataclasses
import hashlib
import json
import math
import pathlib
import re
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from train.text import data, tokenizers

Write = Callable[[bytes], str]

TEXT = "né à 5€ 🙂\r\nend\n"


@pytest.fixture(name="write")
def _write(tmp_path: pathlib.Path) -> Write:
    def write(raw: bytes) -> str:
        path = tmp_path / "text.txt"
        path.write_bytes(raw)
        return str(path)

    return write


def _sampler(batch_size: int, context: int) -> Callable[..., jax.Array]:
    return jax.jit(
        lambda tokens, rng, step: data.sample_batch(
            tokens, rng, step, batch_size=batch_size, context=context
        )
    )


# Tokenizers


def test_bytes_round_trip_all_256_values() -> None:
    """Case B131: the vocabulary is 256 bytes, and each comes back."""
    tokenizer = tokenizers.ByteTokenizer()
    ids = tokenizer.encode(bytes(range(256)))
    assert tokenizer.vocab_size == 256
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, np.arange(256))
    assert tokenizer.decode_bytes(ids) == bytes(range(256))


def test_bytes_of_text_and_of_a_cut_character() -> None:
    """Case B131: 'é€🙂', a generation cut after f0 9f, and a lone byte ff."""
    tokenizer = tokenizers.ByteTokenizer()
    whole = [0xC3, 0xA9, 0xE2, 0x82, 0xAC, 0xF0, 0x9F, 0x99, 0x82]
    np.testing.assert_array_equal(tokenizer.encode("é€🙂"), whole)
    assert tokenizer.decode(whole) == "é€🙂"
    assert tokenizer.decode(whole[:7]) == "é€\ufffd"
    assert tokenizer.decode([0xFF]) == "\ufffd"
    assert tokenizer.decode([]) == ""


def test_chars_are_ranks_of_sorted_distinct_characters() -> None:
    tokenizer = tokenizers.CharTokenizer.of("b🙂ab")
    assert tokenizer.characters == "ab🙂"
    assert tokenizer.vocab_size == 3
    ids = tokenizer.encode("🙂ba")
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [2, 1, 0])
    assert tokenizer.decode(ids) == "🙂ba"
    assert tokenizer.decode_bytes(ids) == "🙂ba".encode()
    assert tokenizer.decode([]) == ""


@pytest.mark.parametrize("unknown", ["`", "c", "é", "\U0010ffff"])
def test_chars_name_the_unknown_character(unknown: str) -> None:
    named = re.escape(f"{unknown!r} (U+{ord(unknown):04X})")
    with pytest.raises(ValueError, match=named):
        tokenizers.CharTokenizer.of("abd").encode("ab" + unknown)


@pytest.mark.parametrize("characters", ["", "ba", "aab"])
def test_chars_refuse_a_table_that_is_not_one(characters: str) -> None:
    with pytest.raises(ValueError, match="distinct, ascending"):
        tokenizers.CharTokenizer(characters)


@pytest.mark.parametrize("name", ["bytes", "chars"])
def test_tokenizers_are_values_that_json_can_tell_apart(name: str) -> None:
    tokenizer = tokenizers.TOKENIZERS[name](TEXT)
    again = tokenizers.TOKENIZERS[name](TEXT)
    assert again == tokenizer
    assert hash(again) == hash(tokenizer)
    saved = json.loads(json.dumps(tokenizer.to_json()))
    assert saved == again.to_json()
    assert saved != tokenizers.CharTokenizer.of("another text").to_json()
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(tokenizer, "characters", "x")  # noqa: B010


@pytest.mark.parametrize(
    ("ids", "named"),
    [([[3, 10]], "10"), ([[-1, 2]], "-1"), ([[2**31 - 1, 0]], "2147483647")],
)
def test_ids_outside_the_vocabulary_are_named(ids: list, named: str) -> None:
    """Case B127: vocabulary 10, host side; -1 does not wrap to row 9."""
    message = rf"token id {named} is outside the vocabulary of 10 ids"
    with pytest.raises(ValueError, match=message):
        tokenizers.check_ids(ids, 10)
    tokenizer = tokenizers.CharTokenizer("0123456789")
    with pytest.raises(ValueError, match=message):
        tokenizer.decode(np.ravel(ids))


def test_an_id_of_no_byte_does_not_wrap() -> None:
    with pytest.raises(ValueError, match="token id 256 is outside"):
        tokenizers.ByteTokenizer().decode([65, 256])


def test_ids_in_the_vocabulary_pass_as_int32() -> None:
    ids = tokenizers.check_ids(np.array([[0, 9]], np.int64), 10)
    assert ids.dtype == np.int32
    np.testing.assert_array_equal(ids, [[0, 9]])


@pytest.mark.parametrize("ids", [[1.0], [True], ["1"]])
def test_ids_are_integers(ids: list) -> None:
    with pytest.raises(ValueError, match="must be integers"):
        tokenizers.check_ids(ids, 10)


# Texts


def test_load_text_keeps_every_byte(write: Write) -> None:
    raw = ("\ufeff" + TEXT).encode()
    text, sha256 = data.load_text(write(raw))
    assert text.encode() == raw
    assert sha256 == hashlib.sha256(raw).hexdigest()


def test_sha256_is_the_published_one(write: Write) -> None:
    digest = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert data.load_text(write(b"abc")) == ("abc", digest)


def test_default_corpus_is_the_python_reference() -> None:
    corpus = data.load_corpus(None, tokenizer="bytes", context=64)
    text = corpus.tokenizer.decode_bytes(
        np.concatenate([corpus.train, corpus.validation])
    )
    assert b'The "assert" statement' in text[:100]
    assert len(text) == corpus.num_tokens > 400_000
    assert hashlib.sha256(text).hexdigest() == corpus.sha256
    assert corpus.path == "pydoc_data.topics"
    assert corpus.train.dtype == corpus.validation.dtype == np.int32


def test_corpus_splits_by_position(write: Write) -> None:
    path = write(b"0123456789abcdefghijk")
    corpus = data.load_corpus(path, tokenizer="chars", context=4)
    assert corpus.tokenizer.decode(corpus.train) == "0123456789abcdefgh"
    assert corpus.tokenizer.decode(corpus.validation) == "ijk"
    # The table is of the whole text: "ijk" stand in the validation split alone.
    assert corpus.tokenizer.vocab_size == corpus.num_tokens == 21
    assert corpus.path == path


@pytest.mark.parametrize(
    ("raw", "fault"),
    [
        (b"", "is empty"),
        (b"ab\xffc" * 99, "is not UTF-8 text: byte 0xff at offset 2"),
        (b"ab\x00c" * 99, "is binary: a zero byte at 2"),
        (b"0123456789", "is too short: of its 10 tokens 9 train.* 1 validate"),
        (b"0123456789ab" * 6, "is too short: .* 64 train, .* context \\+ 1 = 65"),
    ],
)
def test_unusable_file_is_one_line_with_its_path(
    write: Write, raw: bytes, fault: str
) -> None:
    path = write(raw)
    context = 64 if len(raw) > 10 else 4
    with pytest.raises(ValueError, match=f"data.path '{path}' {fault}") as error:
        data.load_corpus(path, tokenizer="bytes", context=context)
    assert "\n" not in str(error.value)


def test_shortest_usable_file(write: Write) -> None:
    corpus = data.load_corpus(write(b"ab" * 36 + b"a"), tokenizer="bytes", context=64)
    assert (corpus.train.size, corpus.validation.size) == (65, 8)


def test_missing_file_and_directory_are_named(tmp_path: pathlib.Path) -> None:
    missing = str(tmp_path / "none.txt")
    with pytest.raises(ValueError, match=f"'{missing}' cannot be read: No such file"):
        data.load_text(missing)
    with pytest.raises(ValueError, match=f"'{tmp_path}' cannot be read: Is a dir"):
        data.load_text(str(tmp_path))


def test_unknown_tokenizer_is_named() -> None:
    with pytest.raises(ValueError, match="one of bytes, chars, got 'words'"):
        data.load_corpus(None, tokenizer="words", context=4)


# Batches


def test_every_example_is_drawn_and_none_beyond() -> None:
    """Case B110: range(8) and context 4 have the 4 starts 0..3, equally likely."""
    sample = _sampler(100, 4)
    tokens, rng = jnp.arange(8, dtype=jnp.int32), jax.random.key(0)
    rows = np.concatenate([sample(tokens, rng, step) for step in range(10)])
    assert rows.dtype == np.int32
    np.testing.assert_array_equal(rows, rows[:, :1] + np.arange(5))
    starts = collections.Counter(rows[:, 0].tolist())
    assert sorted(starts) == [0, 1, 2, 3]
    # 250 expected of each, standard deviation 13.7.
    assert all(abs(count - 250) < 5 * 13.7 for count in starts.values())
    last = rows[rows[:, 0] == 3][0]
    np.testing.assert_array_equal(last[:-1], [3, 4, 5, 6])
    np.testing.assert_array_equal(last[1:], [4, 5, 6, 7])


def test_shortest_data_and_shorter() -> None:
    """Case B110: 5 tokens have 1 start; 4 tokens are refused, not padded."""
    rng = jax.random.key(0)
    rows = data.sample_batch(jnp.arange(5), rng, 0, batch_size=3, context=4)
    np.testing.assert_array_equal(rows, [[0, 1, 2, 3, 4]] * 3)
    with pytest.raises(ValueError, match=r"at least context \+ 1 = 5 tokens, got 4"):
        data.sample_batch(jnp.arange(4), rng, 0, batch_size=3, context=4)


def test_batch_is_a_pure_function_of_seed_and_step() -> None:
    tokens = jnp.arange(10_000, dtype=jnp.int32)
    sample = _sampler(4, 3)

    def batch(seed: int, step: int) -> np.ndarray:
        return np.asarray(sample(tokens, jax.random.key(seed), step))

    first = batch(0, 7)
    others = [batch(0, 6), batch(0, 8), batch(1, 7)]
    np.testing.assert_array_equal(batch(0, 7), first)
    assert all((other != first).any() for other in others)
    eager = data.sample_batch(tokens, jax.random.key(0), 7, batch_size=4, context=3)
    np.testing.assert_array_equal(eager, first)


# Evaluation


def test_windows_by_hand() -> None:
    tokens, mask = data.windows(np.arange(10, 18, dtype=np.int32), context=3)
    expected = [[10, 11, 12, 13], [13, 14, 15, 16], [16, 17, 0, 0]]
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(mask, [[1, 1, 1], [1, 1, 1], [1, 0, 0]])
    assert (tokens.dtype, mask.dtype) == (np.int32, np.bool_)


@pytest.mark.parametrize("num_tokens", [2, 3, 9, 10, 11, 101])
@pytest.mark.parametrize("context", [1, 4, 9, 200])
def test_every_token_but_the_first_is_a_target_once(
    num_tokens: int, context: int
) -> None:
    """Cases B107 and B108: a partial last window; 3 and 9 tokens have 2 and 8."""
    original = np.arange(100, 100 + num_tokens, dtype=np.int32)
    tokens, mask = data.windows(original, context=context)
    assert tokens.shape == (math.ceil((num_tokens - 1) / context), context + 1)
    np.testing.assert_array_equal(tokens[:, 1:][mask], original[1:])
    # Each input before a target is the token before it.
    np.testing.assert_array_equal(tokens[:, :-1][mask], original[:-1])


def test_windows_need_a_target() -> None:
    with pytest.raises(ValueError, match="at least 2 tokens, got 1"):
        data.windows(np.zeros(1, np.int32), context=4)


def test_bits_per_byte() -> None:
    """A byte at ln 2 nats is 1 bit; '€a' is 2 characters in 4 bytes."""
    ids = np.array([0xE2, 0x82, 0xAC, 0x61], np.int32)
    bits = data.bits_per_byte(math.log(2), ids, tokenizer=tokenizers.ByteTokenizer())
    assert bits == pytest.approx(1.0, rel=1e-12)
    chars = tokenizers.CharTokenizer.of("€a")
    bits = data.bits_per_byte(math.log(16), chars.encode("€a"), tokenizer=chars)
    assert bits == pytest.approx(4 * 2 / 4, rel=1e-12)

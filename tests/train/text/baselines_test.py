"""n-gram baselines against loops that count, and against what theory says."""

import math

import numpy as np
import pytest

from train.text import baselines, data


def _loop_probability(
    train: list[int],
    context: list[int],
    target: int,
    alphas: list[float],
    vocab_size: int,
) -> float:
    """pₙ(target | the last n − 1 of context) by counting, one order at a time."""
    probability = 1 / vocab_size
    for order, alpha in enumerate(alphas, start=1):
        if len(context) < order - 1:
            break
        history = tuple(context[len(context) - order + 1 :])
        joint = total = 0
        for i in range(order - 1, len(train)):
            if tuple(train[i - order + 1 : i]) == history:
                total += 1
                joint += train[i] == target
        probability = (joint + alpha * probability) / (total + alpha)
    return probability


def _loop_nats(
    train: list[int], tokens: list[int], alphas: list[float], vocab_size: int
) -> float:
    losses = [
        -math.log(_loop_probability(train, tokens[:i], tokens[i], alphas, vocab_size))
        for i in range(1, len(tokens))
    ]
    return sum(losses) / len(losses)


def _markov(num_tokens: int, *, seed: int, vocab_size: int = 5) -> np.ndarray:
    """Ids whose next one often follows from the two before; small ones are common."""
    rng = np.random.default_rng(seed)
    ids = [0, 1]
    while len(ids) < num_tokens:
        follows = (ids[-1] + 2 * ids[-2]) % vocab_size
        noise = min(int(rng.geometric(0.6)), vocab_size) - 1
        ids.append(follows if rng.random() < 0.4 else noise)
    return np.array(ids, np.int32)


@pytest.mark.parametrize("num_scored", [2, 3, 40])
def test_probabilities_equal_a_counting_loop(num_scored: int) -> None:
    """Ids 5 and 6 are never trained on, so contexts unseen at each order occur."""
    train = _markov(120, seed=0)
    tokens = np.random.default_rng(1).integers(7, size=num_scored).astype(np.int32)
    alphas = [0.5, 3.0, 1.25]
    rows = baselines.probabilities(train, tokens, alphas=alphas, vocab_size=7)
    assert rows.shape == (4, num_scored - 1)
    plain = tokens.tolist()
    for order, row in enumerate(rows):
        expected = [
            _loop_probability(train.tolist(), plain[:i], plain[i], alphas[:order], 7)
            for i in range(1, num_scored)
        ]
        np.testing.assert_allclose(row, expected, rtol=1e-13)


def test_losses_equal_a_counting_loop_over_the_targets_of_the_windows() -> None:
    train, validation = _markov(300, seed=2), _markov(40, seed=3)
    losses = baselines.nats_per_token(train, validation, vocab_size=5)
    alphas = baselines.tune(train, vocab_size=5)
    assert list(losses) == ["uniform", "unigram", "bigram", "trigram"]
    for order, loss in enumerate(losses.values()):
        expected = _loop_nats(train.tolist(), validation.tolist(), alphas[:order], 5)
        assert loss == pytest.approx(expected, rel=1e-12)
    _, mask = data.windows(validation, context=16)
    rows = baselines.probabilities(train, validation, alphas=alphas, vocab_size=5)
    assert rows.shape[1] == mask.sum()


def test_tuning_minimises_the_loss_of_the_held_out_tail() -> None:
    """No alpha of another grid does better on the last tenth, counted without it."""
    train = _markov(400, seed=4)
    head, tail = train[:360].tolist(), train[360:].tolist()
    alphas = baselines.tune(train, vocab_size=5)
    for order in (1, 2, 3):
        lower = alphas[: order - 1]
        tuned = _loop_nats(head, tail, alphas[:order], 5)
        others = [
            _loop_nats(head, tail, [*lower, alpha], 5)
            for alpha in np.geomspace(0.2, 2e5, 20)
        ]
        assert tuned <= min(others) + 1e-4
    # The choice matters on this data: the worst trigram is far from the tuned one.
    assert max(others) > tuned + 0.1


@pytest.mark.parametrize("context", [(1, 4), (4, 4), (6, 1), (6, 6)])
def test_probabilities_sum_to_one(context: tuple[int, int]) -> None:
    """After seen and unseen contexts; id 6 is never trained on."""
    train = _markov(200, seed=5)
    rows = [
        baselines.probabilities(
            train, np.array([*context, c]), alphas=[0.3, 2.0, 9.0], vocab_size=7
        )[:, -1]
        for c in range(7)
    ]
    np.testing.assert_allclose(np.sum(rows, axis=0), 1, rtol=1e-13)


def test_unseen_contexts_back_off() -> None:
    """'6 1': no trigram context, so p₃ = p₂; '1 6': no bigram context either."""
    train = _markov(200, seed=6)
    seen, unseen = (
        baselines.probabilities(
            train, np.array(tokens), alphas=[0.3, 2.0, 9.0], vocab_size=7
        )[:, -1]
        for tokens in ([6, 1, 3], [1, 6, 3])
    )
    assert seen[3] == pytest.approx(seen[2], rel=1e-15)
    assert seen[2] != pytest.approx(seen[1], rel=1e-3)
    np.testing.assert_allclose(unseen[1:], unseen[1], rtol=1e-15)


def test_no_probability_depends_on_later_tokens() -> None:
    train, tokens = _markov(200, seed=7), _markov(30, seed=8)
    edited = tokens.copy()
    edited[20:] = (edited[20:] + 1) % 5
    first, second = (
        baselines.probabilities(train, ids, alphas=[1.0, 1.0, 1.0], vocab_size=5)
        for ids in (tokens, edited)
    )
    # Column i scores token i + 1.
    np.testing.assert_array_equal(first[:, :19], second[:, :19])
    assert (first[:, 19:] != second[:, 19:]).any()


def test_incompressible_tokens_cost_log_vocabulary() -> None:
    """Nothing is learned from noise: within 4 standard errors, and at most noise."""
    rng = np.random.default_rng(9)
    train, validation = rng.integers(16, size=(2, 20_000)).astype(np.int32)
    losses = baselines.nats_per_token(train, validation, vocab_size=16)
    assert losses["uniform"] == pytest.approx(math.log(16), rel=1e-12)
    alphas = baselines.tune(train, vocab_size=16)
    rows = baselines.probabilities(train, validation, alphas=alphas, vocab_size=16)
    for name, row in zip(losses, rows, strict=True):
        error = np.std(np.log(row)) / math.sqrt(row.size)
        assert losses[name] >= math.log(16) - 4 * error - 1e-12
        assert losses[name] <= math.log(16) + 0.005


def test_large_vocabularies_do_not_collide() -> None:
    """V = 2²⁰: in 32 bits '5 7 1' and '6 7 1' would be one code."""
    train = np.array([5, 7, 1, 6, 7, 2, 5, 7, 1], np.int32)
    tokens, alphas = np.array([6, 7, 1], np.int32), [1.0, 1.0, 1.0]
    rows = baselines.probabilities(train, tokens, alphas=alphas, vocab_size=2**20)
    expected = _loop_probability(train.tolist(), [6, 7], 1, alphas, 2**20)
    assert rows[3, -1] == pytest.approx(expected, rel=1e-13)


def test_each_order_helps_on_the_default_corpus() -> None:
    corpus = data.load_corpus(None, tokenizer="bytes", context=64)
    losses = baselines.nats_per_token(
        corpus.train, corpus.validation, vocab_size=corpus.tokenizer.vocab_size
    )
    assert losses["uniform"] == pytest.approx(8 * math.log(2), rel=1e-12)
    # English with markup: the gaps are far wider than those of a broken order.
    assert losses["unigram"] < 0.65 * losses["uniform"]
    assert losses["bigram"] < 0.8 * losses["unigram"]
    assert losses["trigram"] < 0.8 * losses["bigram"]
    assert losses["trigram"] > 1.3


@pytest.mark.parametrize(
    ("num_train", "num_validation", "wants"),
    [(4, 9, "5 training tokens, got 4"), (9, 1, "2 validation tokens, got 1")],
)
def test_too_few_tokens_are_refused(
    num_train: int, num_validation: int, wants: str
) -> None:
    with pytest.raises(ValueError, match=wants):
        baselines.nats_per_token(
            np.zeros(num_train, np.int32),
            np.zeros(num_validation, np.int32),
            vocab_size=3,
        )


def test_fewest_tokens_give_finite_losses() -> None:
    losses = baselines.nats_per_token(
        np.arange(5, dtype=np.int32), np.array([6, 1], np.int32), vocab_size=7
    )
    assert all(math.isfinite(loss) for loss in losses.values())


def test_an_id_that_would_alias_a_code_is_refused() -> None:
    """Case B127: id 10 of a vocabulary of 10."""
    with pytest.raises(ValueError, match="token id 10 is outside"):
        baselines.nats_per_token(
            np.array([1, 2, 3, 10, 4, 5]), np.array([1, 2]), vocab_size=10
        )

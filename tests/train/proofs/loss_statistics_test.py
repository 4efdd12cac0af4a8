"""proofs.loss_statistics: known losses, and leaks planted at known size."""

import json
import math

import numpy as np
import pytest

from train.proofs import loss_statistics

T, V = 6, 11


def _softmax(logits):
    return np.exp(logits) / np.exp(logits).sum()


# Honest predictions: what a model states for each id, whatever it has seen.
CHANCES = {
    "uniform": np.full(V, 1 / V),
    "overconfident": np.append(np.full(V - 1, (1 - 1e-4) / (V - 1)), 1e-4),
    "miscalibrated": _softmax(np.random.default_rng(1).normal(size=V)),
}
HONEST = pytest.mark.parametrize("chances", CHANCES.values(), ids=CHANCES)


def honest_losses(generator, rows, chances=CHANCES["miscalibrated"]):
    """Losses of predictions that are independent of their uniformly drawn targets."""
    return -np.log(chances)[generator.integers(V, size=(rows, T))]


def judge(honest, *, control=None, level=loss_statistics.LEVEL):
    if control is None:
        control = np.full_like(honest, 0.01)
    return loss_statistics.judge(honest, control, vocab_size=V, level=level)


def accuses(proof):
    return proof.reason.startswith("random tokens are predicted")


def test_honest_losses_pass_and_their_statistics_are_the_textbook_ones():
    losses = honest_losses(np.random.default_rng(0), 400)
    proof = judge(losses)
    assert proof.passed, proof.reason
    excess = losses.mean(axis=0) - math.log(V)
    error = losses.std(axis=0, ddof=1) / 20
    # Normal quantile of 1 - 0.001 / (2 * 7), two-sided over T + 1 = 7 means.
    z = 3.8030
    np.testing.assert_allclose(proof.arrays["excess"], excess, rtol=1e-9)
    np.testing.assert_allclose(proof.arrays["upper"], excess + z * error, rtol=1e-3)
    np.testing.assert_allclose(proof.arrays["lower"], excess - z * error, rtol=1e-3)
    # ln(7 / 0.001) = 8.8537, over the tokens of a position and over all.
    hidden = np.append(excess + 8.8537 / 400, excess.mean() + 8.8537 / 2400)
    error = np.append(error, losses.mean(axis=1).std(ddof=1) / 20)
    # scipy.stats.skew's definition: third central moment over variance ** 1.5.
    skew = [
        np.mean((x - x.mean()) ** 3) / x.var() ** 1.5
        for x in (*losses.T, losses.mean(axis=1))
    ]
    assert min(skew) > 0
    hidden += 2.3263**2 / 2 * np.array(skew) * error / 20
    overall = proof.figures["overall"]
    even, smallest = (
        np.append(proof.arrays[name], overall[name])
        for name in ("smallest_even_leak", "smallest_leak")
    )
    # 2.3263: normal quantile of 0.99.
    np.testing.assert_allclose(even, hidden + 2.3263 * 2**0.5 * error, rtol=1e-3)
    mean = np.append(losses.mean(axis=0), losses.mean())
    noise = np.sqrt(2 * error**2 + smallest * mean / 400)
    np.testing.assert_allclose(smallest, hidden + 2.3263 * noise, rtol=2e-3)
    assert f"of {overall['smallest_leak']:.2g} however spread" in proof.reason
    assert f"{overall['smallest_even_leak']:.2g} nats if alike" in proof.reason
    assert f"of {smallest[:-1].max():.2g} at any one position" in proof.reason
    assert len(proof.as_json()["positions"]["excess"]) == T
    json.dumps(proof.as_json(), allow_nan=False)


def test_a_leak_at_one_position_is_named():
    losses = honest_losses(np.random.default_rng(0), 400, CHANCES["uniform"])
    losses[:, 3] -= 0.3
    proof = judge(losses)
    assert not proof.passed
    assert "at position 3: 0.3 nats" in proof.reason


def test_an_excess_below_zero_makes_no_stated_leak_smaller():
    """The expected loss of an honest model is log V or more, whatever the sample."""
    exact = judge(np.full((400, T), math.log(V))).arrays
    below = judge(np.full((400, T), math.log(V) - 0.001)).arrays
    for name in ("smallest_leak", "smallest_even_leak"):
        np.testing.assert_allclose(below[name], exact[name])
    # What an even leak must beat is the bound alone, a float32's rounding included.
    bound = math.log((T + 1) / loss_statistics.LEVEL) / 400 + loss_statistics.ROUNDING
    np.testing.assert_allclose(exact["smallest_even_leak"], bound, rtol=1e-9)


def test_a_small_leak_at_all_positions_is_found_by_their_sum():
    losses = np.full((2000, T), math.log(V) - 0.003)
    proof = judge(losses)
    assert not proof.passed and "over all positions" in proof.reason
    losses[:, 1:] += 0.003
    assert judge(losses).passed


def mixture(losses, share):
    """Losses of (1 - share) p(x) + share · [x is the target]."""
    return -np.log((1 - share) * np.exp(-losses) + share)


# Leaks of known size, from the honest losses [R t] and a share.
LEAKS = {
    # Every loss: by the same nats, or through a share of certainty.
    "alike": lambda generator, losses, nats: losses - nats,
    "mixture": lambda generator, losses, share: mixture(losses, share),
    # Some tokens are revealed, some rows, half of some rows' losses.
    "tokens": lambda generator, losses, share: np.where(
        generator.random(losses.shape) < share, 0, losses
    ),
    "rows": lambda generator, losses, share: np.where(
        generator.random((len(losses), 1)) < share, 0, losses
    ),
    "half rows": lambda generator, losses, share: np.where(
        generator.random((len(losses), 1)) < 2 * share, losses / 2, losses
    ),
}


def share_of(kind, chances, gain):
    """The share at which a leak lowers the expected loss by `gain` nats."""
    honest = -np.log(chances)
    if kind == "alike":
        return gain
    if kind != "mixture":
        return gain / honest.mean()
    shares = np.geomspace(1e-6, 1, 500)
    gains = honest.mean() - mixture(honest[:, None], shares).mean(axis=0)
    return np.interp(gain, gains, shares)


def test_a_mixture_gains_what_its_formula_says():
    share = share_of("mixture", CHANCES["uniform"], 0.1)
    assert math.log(1 - share + share * V) == pytest.approx(0.1, rel=1e-4)


def detection(kind, chances, where, *, scale, draws=300, rows=300):
    """How often a leak of `scale` times the stated size is found.

    The size is stated by one sample, the leak planted in another; index T stands for
    all positions.
    """
    generator = np.random.default_rng(0)
    even = kind in ("alike", "mixture")
    name = "smallest_even_leak" if even else "smallest_leak"
    columns = slice(where, where + 1) if where < T else slice(None)
    found = 0
    for _ in range(draws):
        report = judge(honest_losses(generator, rows, chances)).as_json()
        stated = [*report["positions"][name], report["overall"][name]][where]
        share = share_of(kind, chances, scale * stated)
        losses = honest_losses(generator, rows, chances)
        losses[:, columns] = LEAKS[kind](generator, losses[:, columns], share)
        found += accuses(judge(losses))
    return found / draws


@HONEST
@pytest.mark.parametrize("where", [2, T])
@pytest.mark.parametrize("kind", LEAKS)
def test_a_leak_of_the_stated_size_is_found_with_the_stated_power(kind, where, chances):
    # 300 draws of 0.99 lie at or above 0.97 with probability 0.999.
    assert detection(kind, chances, where, scale=1.001) >= loss_statistics.POWER - 0.02


def test_the_power_allows_for_samples_short_of_rare_large_losses():
    """Without the third moment: 0.968."""
    chances = CHANCES["overconfident"]
    found = detection("alike", chances, 2, scale=1.001, draws=1500, rows=100)
    assert found >= 0.98


@HONEST
@pytest.mark.parametrize(
    ("kind", "where", "most"),
    [
        ("alike", 2, 0.1),
        ("mixture", 2, 0.1),
        ("alike", T, 0.1),
        ("mixture", T, 0.1),
        # Which rows: at one position a row is one token.
        ("rows", 2, 0.5),
        ("rows", T, 0.9),
    ],
)
def test_a_quarter_of_the_stated_size_is_often_missed(kind, where, most, chances):
    assert detection(kind, chances, where, scale=0.25, draws=100) <= most


@HONEST
@pytest.mark.parametrize(
    ("level", "most"), [(loss_statistics.LEVEL, 0.005), (0.2, 0.2)]
)
def test_honest_losses_are_accused_at_most_at_the_stated_level(level, most, chances):
    generator = np.random.default_rng(0)
    proofs = [
        judge(honest_losses(generator, 12, chances), level=level) for _ in range(1000)
    ]
    assert np.mean([accuses(proof) for proof in proofs]) <= most
    if chances is CHANCES["overconfident"]:
        # A normal interval would often accuse a model that rules one id out.
        below = [(proof.arrays["upper"] < 0).any() for proof in proofs]
        assert np.mean(below) >= 0.5


def test_the_level_is_spent_where_gains_are_likely():
    """p = V^-1 (1 ± g) wins ln(1 + g) half the time: the bound is nearly reached."""
    generator = np.random.default_rng(0)
    rates = {}
    for level in (0.5, 0.01):
        accused = 0
        for _ in range(1000):
            sign = generator.choice([-1, 1], size=(200, 1))
            losses = math.log(V) - np.log(1 + 0.1 * sign)
            accused += accuses(judge(losses, level=level))
        rates[level] = accused / 1000
    assert rates[0.01] <= 0.01 + 0.01
    assert 0.02 < rates[0.5] <= 0.5


def test_a_control_that_does_not_fall_ten_standard_errors_voids_the_proof():
    losses = honest_losses(np.random.default_rng(0), 400)
    rows = np.random.default_rng(1).normal(size=(400, 1))
    rows = np.broadcast_to((rows - rows.mean()) / rows.std(ddof=1), losses.shape)
    # Standard error of the mean over rows: 1 / 20, so ten of them are 0.5 nats; the
    # bound is 8.8537 / 2400 = 0.0037.
    enough = judge(losses, control=rows + math.log(V) - 0.504)
    short = judge(losses, control=rows + math.log(V) - 0.503)
    assert enough.passed
    assert short.result == "void" and short.reason == "the control did not learn"


def test_too_few_rows_void_the_proof():
    for rows, passed in ((3, False), (40, True)):
        proof = judge(honest_losses(np.random.default_rng(0), rows, CHANCES["uniform"]))
        assert proof.passed == passed
        assert passed or proof.result == "void"
        assert passed or "a complete leak at position" in proof.reason


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_losses_that_are_not_finite_void_the_proof(value):
    losses = honest_losses(np.random.default_rng(0), 400)
    broken = losses.copy()
    broken[7, 3] = value
    for name, proof in (
        ("loss", judge(broken)),
        ("control loss", judge(losses, control=broken)),
    ):
        assert proof.result == "void"
        assert proof.reason == f"the {name} of row 7 at position 3 is not finite"
        json.dumps(proof.as_json(), allow_nan=False)


@pytest.mark.parametrize("shape", [(1, T), (T,)])
def test_losses_of_other_shapes_are_refused(shape):
    with pytest.raises(ValueError, match="expected two arrays of losses"):
        judge(np.ones(shape))

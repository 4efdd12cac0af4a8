"""models.positional: what the rows of the table say of themselves."""

import pytest

from models import positional


@pytest.mark.parametrize("name", positional.SCHEMES)
def test_a_scheme_acts_at_one_point_at_most(name):
    scheme = positional.SCHEMES[name]
    points = (scheme.embedding, scheme.rotate, scheme.score_mod)
    assert sum(point is not None for point in points) == (name != "none")


def test_the_schemes_of_attention_are_those_that_reach_queries_keys_or_scores():
    assert positional.IN_ATTENTION == ("rotary", "alibi")


@pytest.mark.parametrize(
    ("name", "width", "num_heads", "message"),
    [("sinusoidal", 9, 1, "got width=9"), ("rotary", 12, 4, "12 / 4 = 3")],
)
def test_a_scheme_refuses_what_it_does_not_fit(name, width, num_heads, message):
    check = positional.SCHEMES[name].check
    check(2 * width, num_heads)
    with pytest.raises(ValueError, match=message):
        check(width, num_heads)

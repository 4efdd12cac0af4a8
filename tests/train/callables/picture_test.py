"""train.callables.picture: which outputs are drawn to depend on which inputs."""

import numpy as np
import pytest

from attention.properties import outcomes
from tests.support import files
from train.callables import picture


@pytest.mark.parametrize(("result", "seen"), [("rounding", False), ("leak", True)])
def test_the_picture_shows_what_moved_by_more_than_rounding(tmp_path, result, seen):
    moved = np.tril(np.ones((3, 3)))
    moved[2, 0] = 1e-6
    moved[2, 1] = moved[0, 1] = np.inf
    outcome = outcomes.Outcome("edits", result, "", moved=moved)
    assert picture.draw(tmp_path / "figures", [outcome], "") == [
        "figures/dependency.png"
    ]
    dependency = files.arrays(tmp_path / "figures/dependency.npz")["dependency"]
    np.testing.assert_array_equal(dependency, [[1, seen, 0], [1, 1, 0], [0, 1, 1]])

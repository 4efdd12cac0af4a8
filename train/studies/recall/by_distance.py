"""How far behind its pair a question of recall stands, and what is answered there.

    … k v … k ?        distance: tokens from v to the second k

A row of recall shows each pair once before the question for it.
"""

import numpy as np
from jaxtyping import Bool, Int


def distances(inputs: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """How far each token stands behind the one that followed its first occurrence.

    In a row of recall, at a question: tokens from the pair's value to the question.
    """
    inputs = np.asarray(inputs)
    first = (inputs[:, :, None] == inputs[:, None, :]).argmax(axis=2)
    return np.arange(inputs.shape[1])[None] - (first + 1)


def tally(
    right: Bool[np.ndarray, "B T"],
    inputs: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
) -> Int[np.ndarray, "2 T"]:
    """Right answers, and questions, at each distance 0 … T - 1 in rows of recall."""
    length = inputs.shape[1]
    places = distances(inputs)
    return np.stack(
        [
            np.bincount(places[mask & right], minlength=length),
            np.bincount(places[mask], minlength=length),
        ]
    )

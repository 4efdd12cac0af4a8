"""Right answers of the task recall, by the distance from a pair to its question.

    … k v … k ?        distance: tokens from v to the second k

A row of recall shows each pair once before the question for it.
"""

import numpy as np
from jaxtyping import Bool, Int


def distances(inputs: Int[np.ndarray, "B T"]) -> Int[np.ndarray, "B T"]:
    """Computes the distance of each token from the one after its first occurrence.

    In a row of recall, that of a question is the number of tokens from the pair's value
    to the question.
    """
    inputs = np.asarray(inputs)
    first = (inputs[:, :, None] == inputs[:, None, :]).argmax(axis=2)
    return np.arange(inputs.shape[1])[None] - (first + 1)


def tally(
    right: Bool[np.ndarray, "B T"],
    inputs: Int[np.ndarray, "B T"],
    mask: Bool[np.ndarray, "B T"],
) -> Int[np.ndarray, "2 T"]:
    """Counts right answers and questions at each distance 0 … T - 1.

    Args:
      right: True where the answer is right.
      inputs: rows of recall.
      mask: True at the questions.

    Returns:
      Numbers of right answers, then numbers of questions.
    """
    length = inputs.shape[1]
    distance = distances(inputs)
    return np.stack(
        [
            np.bincount(distance[mask & right], minlength=length),
            np.bincount(distance[mask], minlength=length),
        ]
    )

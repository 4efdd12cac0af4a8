"""What programs wrote, and what was written before."""

import numpy as np


def arrays(path):
    """The arrays of an .npz file by their names."""
    with np.load(path) as file:
        return dict(file)

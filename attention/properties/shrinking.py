"""Makes the pair of inputs that shows a leak as small as it can be."""

from attention.properties import calls, comparison, findings


def shrink(
    fn: calls.NumpyFunction, finding: findings.Finding, *, tolerance: float
) -> findings.Finding:
    """Finds a smaller pair of inputs that still shows a leak.

    One row instead of the batch, as little as possible after the edit and before it:
    nothing, or as much as a power of two; each is kept if the leak still shows.

    Args:
      fn: the function that leaks, in the mode in which it does.
      finding: of a probe other than 'gradients'.
      tolerance: share of an edit's size that is rounding; with 0 no bit may move.

    Returns:
      The finding at the smaller inputs, with its positions there.
    """
    smallest = finding

    def attempt(rows: slice | list[int], positions: slice) -> bool:
        nonlocal smallest
        pair = [x[rows, positions] for x in (smallest.inputs, smallest.edited)]
        try:
            smaller = comparison.compare(finding.probe, fn, *pair, tolerance=tolerance)
        except ValueError:
            smaller = None
        if smaller is None or smaller.kind != "leak":
            return False
        smallest = smaller
        return True

    everything = slice(None)
    attempt([finding.target_row], everything) or attempt(
        sorted({finding.row, finding.target_row}), everything
    )
    end = max(smallest.source, smallest.target) + 1
    while end < smallest.inputs.shape[1] and not attempt(everything, slice(0, end)):
        end = 2 ** end.bit_length()
    kept = 2
    while kept < smallest.inputs.shape[1] and not attempt(
        everything, slice(-kept, None)
    ):
        kept *= 2
    return smallest

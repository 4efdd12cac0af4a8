"""Writes the table of mechanisms as a document, docs/mechanisms.md."""

import pathlib
from collections.abc import Mapping

from train.mechanisms import costs, properties
from train.report import markdown

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "mechanisms.md"
_SIGNS = {
    properties.HOLDS: "✓",
    properties.MUST_FAIL: "✗",
    properties.NOT_APPLICABLE: "–",
}
_HEAD = """# Every mechanism under one table

✓ the property holds, ✗ it must fail and does, – it does not apply. The command
`python -m train.audit --all` checks every entry and writes this page; a test ensures
that the page is current. Measured times are in [times.md](times.md).

"""
_MEANINGS = {
    "causal": "edits of later inputs, tiny, huge or NaN, change no output",
    "padding": "tokens beyond a row's length, even NaN, have no effect, and the row "
    "without padding has the same outputs",
    "batch": "no row of the batch depends on another row",
    "permutation": "permuting the inputs permutes the outputs in the same way",
    "hull": "in each channel the outputs are means of the values, with weights "
    "that are not negative and sum to 1 (checked on the core, without projections and "
    "gates)",
    "streaming": "the tokens in pieces, with the carried state, give the same outputs "
    "as all at once (attention has no cache yet)",
    "softmax": "the core equals softmax attention under its mask, computed in float64 "
    "(Linformer: with identity projections)",
    "loop": "every form equals a loop over tokens (additive: over queries) within 1e-5 "
    "of the largest value",
    "operations": "growth of the operations of the forward pass when T doubles from "
    f"{costs.LENGTH:,}; iterations of loops and visited blocks are counted",
    "memory": "growth of the temporary memory of the compiled forward and backward "
    "pass when T doubles; below × 2 where the buffers of blocks do not grow",
    "parameters": "number of parameters of a layer of the default language model, of "
    "width 128, without the MLP",
    "state": "how many numbers this layer carries to the next token, after 64 and "
    "after 128 tokens",
}
_GROWTH = costs.GROWTH
_NOTES = f"""
The growth is that of layers of width {_GROWTH.width}, with windows of
{_GROWTH.window} and blocks of {_GROWTH.block_size}. They are narrow, so that costs
that do not grow with T are small. The state of bigbird counts the keys and values that
a later query sees, and therefore depends on the random choice of blocks. The layers
that are not causal use x itself as queries, keys and values, and the check of causality
must find that they are not causal.
"""


def row(name: str, cells: Mapping[str, properties.Cell], cost: costs.Costs) -> str:
    """Formats a mechanism as a line of the table.

    Args:
      name: name of the mechanism.
      cells: the result of `properties.examine`.
      cost: the result of `costs.costs`.

    Returns:
      The line in Markdown.
    """
    state = "–" if cost.state is None else " / ".join(f"{n:,}" for n in cost.state)
    return markdown.line(
        name,
        *(_cell(cells[label]) for label in properties.PROPERTIES),
        _factor(cost.operations),
        _factor(cost.memory),
        f"{cost.parameters:,}",
        state,
    )


def page(rows: Mapping[str, str]) -> str:
    """Formats the document.

    Args:
      rows: for each mechanism its line of the table.

    Returns:
      The document in Markdown.
    """
    head = markdown.table(("mechanism", *_MEANINGS), ())
    legend = markdown.table(("column", "meaning"), _MEANINGS.items())
    return _HEAD + "\n".join([head, *rows.values(), "", legend]) + "\n" + _NOTES


def _cell(cell: properties.Cell) -> str:
    return "**BROKEN**" if cell.contradiction else _SIGNS[cell.declared]


def _factor(factor: float | None) -> str:
    return "–" if factor is None else f"× {factor:.1f}"

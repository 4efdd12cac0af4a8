"""The table of mechanisms as a page: docs/mechanisms.md."""

import pathlib
from collections.abc import Mapping

from train.mechanisms import costs as mechanism_costs
from train.mechanisms import properties
from train.report import markdown

DOCUMENT = pathlib.Path(__file__).parents[2] / "docs" / "mechanisms.md"
_SIGNS = {
    properties.HOLDS: "✓",
    properties.MUST_FAIL: "✗",
    properties.NOT_APPLICABLE: "–",
}
_HEAD = """# Every mechanism under one table

✓ holds, ✗ must fail and does, – does not apply. Written by
`python -m train.audit --all`, which tries all of it; a test checks that this page is
current. Measured times stand in [times.md](times.md).

"""
_SAYS = {
    "causal": "no output moves by edits of later inputs, tiny, huge or NaN",
    "padding": "what stands beyond a row's length changes nothing, NaN included, and "
    "the row alone gives the same",
    "batch": "no row sees another",
    "permutation": "permuted inputs give outputs permuted alike",
    "hull": "outputs are means of the values, channel by channel; the weights are not "
    "negative and sum to 1 (of the core: no projections, no gates)",
    "streaming": "piece by piece, from the state it carries, equals all at once "
    "(attention has no cache yet)",
    "softmax": "equals softmax attention under its mask, written out in float64 "
    "(Linformer: with identity projections)",
    "loop": "every form equals one token after another (additive: one query after "
    "another) within 1e-5 of the largest value",
    "operations": "of the forward pass when T doubles from "
    f"{mechanism_costs.LENGTH:,}: turns of loops and visited blocks are counted",
    "memory": "the same of temporary memory, forward and backward, as compiled; less "
    "than × 2 where buffers of blocks do not grow",
    "parameters": "of a layer of the default language model, width 128, without MLP",
    "state": "numbers that this layer carries to the next token, after 64 and after "
    "128 tokens",
}
_GROWTH = mechanism_costs.GROWTH
_NOTES = f"""
Growth is that of layers of width {_GROWTH.width}, with windows of
{_GROWTH.window} and blocks of {_GROWTH.block_size}: narrow, so
that what grows with T is not hidden. A later query of BigBird may look at any block at
random: what it need not keep is what the blocks drawn here leave out. The rows that are
not causal must be caught; they take x itself as queries, keys and values.
"""


def row(
    name: str, cells: Mapping[str, properties.Cell], costs: mechanism_costs.Costs
) -> str:
    """A mechanism as a line of the table."""
    state = "–" if costs.state is None else " / ".join(f"{n:,}" for n in costs.state)
    return markdown.line(
        name,
        *(_cell(cells[label]) for label in properties.PROPERTIES),
        _factor(costs.operations),
        _factor(costs.memory),
        f"{costs.parameters:,}",
        state,
    )


def page(rows: Mapping[str, str]) -> str:
    """The document, of the lines of all mechanisms."""
    head = markdown.table(("mechanism", *_SAYS), ())
    says = markdown.table(("column", "says"), _SAYS.items())
    return _HEAD + "\n".join([head, *rows.values(), "", says]) + "\n" + _NOTES


def _cell(cell: properties.Cell) -> str:
    return "**BROKEN**" if cell.contradiction else _SIGNS[cell.declared]


def _factor(factor: float | None) -> str:
    return "–" if factor is None else f"× {factor:.1f}"

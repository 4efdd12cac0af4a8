"""Which probe sees which planted leak: docs/leak_matrix.md.

    python -m tests.leak_matrix

examines every leak and writes the page. PyTorch must be installed,
or its rows would be lost.
"""

import importlib.util
import pathlib
import sys
from collections.abc import Mapping

import jax

from attention.properties import probes
from tests.specimens import honest, leaks, parts
from train.callables import adapter
from train.proofs import learning
from train.report import markdown

DOCUMENT = pathlib.Path(__file__).parent.parent / "docs" / "leak_matrix.md"
HEAD = """# Which probe sees what

Every planted leak of the tests against every probe of [the verifier](verifier.md), and
the honest models. Switching any one probe off would lose a leak. Written by
`python -m tests.leak_matrix`.

"""
PROBES = (*probes.PROBES, "learning")
# Enough for every other byte at every position of one row.
TOKEN_EDIT_BUDGET = parts.LENGTH * parts.BYTES

# name -> probe -> kind of the outcome
Kinds = Mapping[str, Mapping[str, str]]


def examine(specimen: parts.Specimen) -> dict[str, str]:
    """Probe -> kind of what it saw."""
    takes_tokens = specimen.input == "tokens"
    target = adapter.adapt(
        specimen.make(),
        name="",
        length=specimen.length,
        vocab_size=specimen.vocab_size if takes_tokens else None,
        width=None if takes_tokens else parts.WIDTH,
        seed=0,
        token_edit_budget=TOKEN_EDIT_BUDGET,
    )
    kinds: dict[str, str] = {
        probe: probes.run(probe, target).kind for probe in probes.PROBES
    }
    kinds["learning"] = "not applicable"
    if specimen.trainer is not None:
        proof = learning.prove_trainer(
            specimen.trainer,
            vocab_size=specimen.vocab_size,
            length=specimen.length,
            rng=jax.random.key(0),
        )
        kinds["learning"] = proof.result
    return kinds


def examine_all(table: Mapping[str, parts.Specimen]) -> Kinds:
    """Every row whose package is installed."""
    return {
        name: examine(specimen)
        for name, specimen in table.items()
        if not specimen.needs or importlib.util.find_spec(specimen.needs)
    }


def seen_by(kinds: Mapping[str, str]) -> set[str]:
    """The probes that see a leak."""
    return {probe for probe, kind in kinds.items() if kind == "leak"}


def leak_row(name: str, kinds: Mapping[str, str]) -> str:
    """A leak as a line of the table."""
    signs = {"leak": "●", "not applicable": " "}
    return markdown.line(name, *(signs.get(kinds[probe], "·") for probe in PROBES))


def honest_row(name: str) -> str:
    """An honest model as a line of its table."""
    return markdown.line(name, ", ".join(honest.HONEST[name].shows) or "nothing")


def alone_row(leak_kinds: Kinds) -> str:
    """How many leaks each probe is alone to see."""
    alone = [seen_by(kinds) for kinds in leak_kinds.values()]
    return markdown.line(
        "seen by this probe alone", *(alone.count({p}) for p in PROBES)
    )


def page(leak_kinds: Kinds) -> str:
    """The document: both tables, in Markdown."""
    lines = [
        f"{len(leaks.LEAKS)} planted leaks. ● the probe sees it, · it does not; "
        "a blank: the probe cannot be made.",
        "",
        markdown.line("leak", *PROBES),
        markdown.line("---", *[":-:"] * len(PROBES)),
        *(leak_row(name, leak_kinds[name]) for name in leaks.LEAKS),
        alone_row(leak_kinds),
        "",
        f"{len(honest.HONEST)} honest models. None is accused; this is all that is "
        "seen of them.",
        "",
        markdown.line("honest model", "shows"),
        markdown.line("---", "---"),
        *map(honest_row, honest.HONEST),
    ]
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """Writes the document."""
    leak_kinds = examine_all(leaks.LEAKS)
    missing = leaks.LEAKS.keys() - leak_kinds.keys()
    if missing:
        sys.exit(f"install what these need first: {', '.join(sorted(missing))}")
    DOCUMENT.write_text(page(leak_kinds), encoding="utf-8")


if __name__ == "__main__":
    main()

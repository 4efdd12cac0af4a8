"""Verifies that a model is causal: no output depends on a later input.

A run of train.main, by three proofs:

    python -m train.audit --workdir=runs/tiny_lm

1. edits: changing a token moves no earlier logit by a single bit;
2. gradients: outputs depend on exactly the inputs that the model's mask declares
   (shown in float32, where no dependence rounds to nothing);
3. learning: trained on uniform random tokens, it does not beat log V on fresh ones.

Anyone's callable in JAX, NumPy or PyTorch, by nine probes (docs/verifier.md), and
anyone's trainer by the learning proof:

    python -m train.audit --target=package.module:callable --vocab_size=65 --length=64
    python -m train.audit --target=package.module:callable --input=embeddings --width=32

It maps tokens int [B T] to logits [B T V], or vectors float32 [B T E] to [B T ...].
--replay=FILE.npz asks it again about a leak that an earlier audit wrote.

Every mechanism of this codebase, into docs/mechanisms.md:

    python -m train.audit --all

The first two write figures/dependency.png and the verdict into report.json. Exit
status: 0 causal (--all: everything is as declared); 1 not, or not verified; 2 unusable
arguments, workdir or callable.
"""

import contextlib
import functools
import pathlib
import sys
from collections.abc import Collection, Iterator

import jax
from absl import flags

# `python -m` looks in the current folder first: a stranger's models.py is not ours.
sys.path.insert(0, str(pathlib.Path(__file__).parent.parent))
from attention.properties import calls, findings, probes
from models import transformer
from train import cli, foreign, workdir
from train import config as config_lib
from train.callables import adapter, replay, session
from train.lm import checkpoint, loop, loss
from train.mechanisms import costs, page, properties, table
from train.proofs import causality
from train.text import data

sys.path.pop(0)

# Folder of the files of an audit of a target, unless another one is named.
_WORKDIR = "runs/audit"
_INPUTS = ("tokens", "embeddings")


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    text = functools.partial(flags.DEFINE_string, flag_values=values)
    integer = functools.partial(flags.DEFINE_integer, flag_values=values)
    text(
        "workdir",
        None,
        "folder of a run of train.main; with --target, folder of the audit's files "
        f"({_WORKDIR} if not given)",
    )
    flags.DEFINE_bool(
        "all",
        False,
        "examine every mechanism and write docs/mechanisms.md",
        flag_values=values,
    )
    text(
        "target", None, "package.module:callable to be audited; the flags below need it"
    )
    flags.DEFINE_enum(
        "input", "tokens", _INPUTS, "what the callable takes", flag_values=values
    )
    integer("vocab_size", None, "number of ids, for tokens", lower_bound=2)
    integer("width", None, "width of the vectors, for embeddings", lower_bound=1)
    integer("length", 64, "positions", lower_bound=2)
    flags.DEFINE_list(
        "skip",
        [],
        f"probes to leave out, of {', '.join(probes.PROBES)}",
        flag_values=values,
    )
    text(
        "trainer",
        None,
        "package.module:callable for the learning proof: rows int32 [R T+1] -> a "
        "function of rows [F T+1] that gives the losses of rows[:, 1:] in nats [F T]",
    )
    text("replay", None, "leak.npz of an audit: does the target still leak on it?")
    integer(
        "edits",
        20_000,
        "about how many edits of tokens the first probe makes; at least one a position",
        lower_bound=1,
    )
    integer(
        "seed",
        0,
        "seed of everything that is drawn",
        lower_bound=0,
        upper_bound=2**32 - 1,
    )


def main(values: flags.FlagValues) -> int:
    """Parses flags, and audits what they name."""
    if values.all:
        return _audit_all(values)
    if not values.target:
        return _audit_run(values)
    return _audit_target(values) if values.replay is None else _replay(values)


def _audit_all(values: flags.FlagValues) -> int:
    """Every mechanism, and what it costs."""
    _refuse_flags(values, but=("all",), why="does not go with --all")
    rows, contradictions = {}, []
    for name in table.SUBJECTS:
        cells = properties.examine(name)
        rows[name] = page.row(name, cells, costs.costs(name))
        print(rows[name], flush=True)
        contradictions += [
            f"{name}: {label}: {cell.declared} was declared, but {cell.contradiction}"
            for label, cell in cells.items()
            if cell.contradiction
        ]
    with cli.usage_errors():
        workdir.write(page.DOCUMENT, page.page(rows))
    print(*contradictions, f"wrote {page.DOCUMENT}", sep="\n")
    return 1 if contradictions else 0


def _audit_run(values: flags.FlagValues) -> int:
    """The three proofs on the last checkpoint of a run."""
    why = "needs --target=package.module:callable"
    _refuse_flags(values, but=("workdir",), why=why)
    path = cli.workdir(values, example="runs/tiny_lm", instead="--target")
    with cli.usage_errors():
        model, state, corpus, config = load(path)
    print(f"auditing {path} at step {state.step} of {config.train.steps}", flush=True)
    *_, rng = loop.keys(config.seed)
    proofs = causality.prove(model, state.params, corpus.validation, config, rng)
    if "val_loss" in (run_report := workdir.read_report(path)):
        proofs += causality.alarm(run_report)
    causality.draw(path / workdir.FIGURES, proofs)
    workdir.update_report(path, {"causality": causality.as_json(proofs)})
    causality.show(proofs)
    return 0 if causality.passed(proofs) else 1


def load(
    path: pathlib.Path,
) -> tuple[transformer.CausalLM, loop.State, data.Corpus, config_lib.Config]:
    """The model of a run at its last checkpoint, and what it was made of.

    Raises:
      ValueError: the workdir holds no run or no checkpoint, or its text is gone.
    """
    config, corpus = workdir.read(path)
    model = transformer.CausalLM(config.model, corpus.tokenizer.vocab_size)
    checkpoints = path / workdir.CHECKPOINTS
    step = checkpoint.latest_step(checkpoints)
    if step is None:
        raise ValueError(f"workdir {str(path)!r} holds no checkpoint")
    shapes = jax.eval_shape(
        lambda rng: loop.begin(model, rng, config, examples=loss.next_token)[0],
        jax.random.key(config.seed),
    )
    return model, checkpoint.restore(checkpoints, step, shapes), corpus, config


def _audit_target(values: flags.FlagValues) -> int:
    """Every probe on a stranger's callable."""
    _check_flags(values)
    path = pathlib.Path(values.workdir or _WORKDIR)
    with cli.usage_errors():
        target = adapter.adapt(
            foreign.load(values.target),
            name=values.target,
            length=values.length,
            vocab_size=values.vocab_size,
            width=values.width,
            seed=values.seed,
            token_edit_budget=values.edits,
        )
        trainer = foreign.load(values.trainer) if values.trainer else None
        session.prepare(path)
    with _unusable():
        clear = session.audit(target, path=path, skip=values.skip, trainer=trainer)
    return 0 if clear else 1


def _replay(values: flags.FlagValues) -> int:
    """Whether a leak that an earlier audit wrote still shows on the callable."""
    _refuse_flags(values, but=("target", "replay"), why="does not go with --replay")
    if not values.replay:
        raise cli.UsageError("--replay needs a file, such as runs/audit/leak.npz")
    with cli.usage_errors(), _unusable():
        arrays = replay.read(pathlib.Path(values.replay))
        finding = replay.replay(foreign.load(values.target), arrays)
    leaks_still = finding is not None and finding.kind == "leak"
    verdict = "still leaks" if leaks_still else "no leak any more"
    words = replay.words(finding) if finding else "no output moves"
    leaker = str(arrays["callable"])
    whose = "" if leaker == values.target else f" (the leak was of {leaker})"
    print(f"{verdict}, at the smallest pair: {words}{whose}")
    return 1 if leaks_still else 0


@contextlib.contextmanager
def _unusable() -> Iterator[None]:
    """Exits 2 on hidden randomness or a refusal that only shows while probing."""
    try:
        yield
    except (findings.NotDeterministic, calls.Refused) as error:
        raise cli.UsageError(str(error)) from error


def _refuse_flags(values: flags.FlagValues, *, but: Collection[str], why: str) -> None:
    """Raises UsageError where a flag is given, but for some."""
    declared = flags.FlagValues()
    define_flags(declared)
    for name in declared:
        if values[name].present and name not in but:
            raise cli.UsageError(f"--{name} {why}")


def _check_flags(values: flags.FlagValues) -> None:
    """Raises UsageError where flags do not go together."""
    sizes = {"tokens": "vocab_size", "embeddings": "width"}
    for kind, name in sizes.items():
        if kind != values.input and values[name].value is not None:
            raise cli.UsageError(
                f"--{name} goes with --input={kind}, not {values.input}"
            )
    if values[sizes[values.input]].value is None:
        raise cli.UsageError(f"--input={values.input} needs --{sizes[values.input]}=N")
    if values.trainer and values.input != "tokens":
        raise cli.UsageError("--trainer needs --input=tokens")
    unknown = [name for name in values.skip if name not in probes.PROBES]
    if unknown:
        raise cli.UsageError(
            f"--skip knows no probe {unknown[0]!r}, only {', '.join(probes.PROBES)}"
        )
    if probes.PROBES.keys() <= set(values.skip):
        raise cli.UsageError("--skip leaves no probe")


if __name__ == "__main__":
    cli.run(main, define_flags)

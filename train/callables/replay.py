"""A leak as a file: the smallest pair of inputs that shows it, and what came out.

    inputs, edited    [B T] or [B T E]; they differ at `source`, in row `row`
    before, after     the outputs of each; they differ at `target`, in row `target_row`

`edited` equals `inputs` where only a derivative shows the leak. The file also holds the
probe that saw it, `mode` ('evaluation' or 'training'), `movement`, the name of the
callable, its `vocab_size` (0 for vectors) and `seed`. NumPy opens it without pickle.
"""

import dataclasses
import math
import pathlib
import re
import shlex
import zipfile
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from jaxtyping import Float

from attention.properties import calls, comparison, findings, probes, shrinking
from train.callables import adapter, frameworks, modes

FILE_NAME = "leak.npz"
# Imports that the lines for replaying by hand may need, and their callable's name.
_IMPORTS = {
    "jax": "jax",
    "jnp": "jax.numpy as jnp",
    "np": "numpy as np",
    "torch": "torch",
}
_CALLABLE = "f"
# Names of all arrays in the file.
_NAMES = (
    "inputs",
    "edited",
    "before",
    "after",
    "source",
    "target",
    "row",
    "target_row",
    "movement",
    "size",
    "probe",
    "mode",
    "callable",
    "vocab_size",
    "seed",
)


def smallest(target: adapter.Target, finding: findings.Finding) -> findings.Finding:
    """Finds the leak at few rows and positions that still show it."""
    if finding.probe == "gradients":
        try:
            smaller = _derivative(target, finding.inputs[:1, : finding.source + 1])
        except calls.Refused:
            smaller = None
        return finding if smaller is None or smaller.kind != "leak" else smaller
    fn = in_mode(target, mode(finding))
    return shrinking.shrink(fn, finding, tolerance=target.tolerance)


def mode(finding: findings.Finding) -> str:
    """The mode in which the callable was when it leaked."""
    return "training" if finding.probe == "training" else "evaluation"


def in_mode(target: adapter.Target, mode: str) -> Callable[[np.ndarray], np.ndarray]:
    """The callable in that mode.

    Raises:
      ValueError: it has no training mode.
    """
    if mode == "evaluation":
        return target.fn
    if target.training is None:
        raise ValueError("the leak is one of training mode, which the callable lacks")
    return target.training


def words(finding: findings.Finding) -> str:
    """What was seen, in words that fit a line."""
    output, by = _names(finding)
    if finding.probe == "gradients":
        how = "its derivative in a random direction"
        return f"{output} depends on {by}: {how} is {finding.movement:.3g}"
    how = f"moved by {finding.movement:.3g}"
    if not math.isfinite(finding.movement):
        how = "turned from a number to NaN or infinity"
    if finding.inputs.ndim == 2:
        return f"{output} depends on {by}: it {how}"
    return f"{output} depends on {by}: it {how}; the edit: {finding.size:.3g}"


def rounding_words(finding: findings.Finding) -> str:
    """How much rounding was seen, and where."""
    (output, by), share = _names(finding), f"{finding.share:.2g}"
    how = f"outputs that must not move do by up to {share} of the edit"
    if finding.probe == "gradients":
        how = f"derivatives by later inputs are not 0, but {share} of the largest"
    return (
        f"{how} ({output} by {by}): sums in another order do that, and so would a "
        "leak this small"
    )


def _names(finding: findings.Finding) -> tuple[str, str]:
    """Names of the output that moved and of the input that moved it."""
    output, by = f"output {finding.target}", f"input {finding.source}"
    if finding.row == finding.target_row:
        return output, by
    return f"{output} of row {finding.target_row}", f"{by} of row {finding.row}"


def command(target: adapter.Target, path: pathlib.Path) -> list[str]:
    """The command that replays a leak, in words of the shell."""
    words = [f"--target={target.name}", f"--replay={path}"]
    return ["python", "-m", "train.audit", *map(shlex.quote, words)]


def by_hand(
    target: adapter.Target, finding: findings.Finding, path: pathlib.Path
) -> list[str]:
    """Lines of Python, without this project, that print the movement.

    Of a leak that only derivatives show, in JAX the largest |∂yᵢ/∂xⱼ|, in PyTorch the
    derivative in a random direction. They can be pasted where the module can be
    imported. There are none for training mode, to which the seeds and keywords of
    `train.callables.modes` belong.
    """
    if mode(finding) == "training":
        return []
    module, _, name = target.name.partition(":")
    root, *attributes = name.split(".")
    fn = ".".join([_CALLABLE, *attributes])
    lines = _by_hand(fn, target, finding, path)
    imports = [
        name
        for used, name in _IMPORTS.items()
        if any(re.search(rf"\b{used}\.", line) for line in lines)
    ]
    named = f"from {module} import {root} as {_CALLABLE}"
    return [f"import {', '.join(imports)}; {named}", *lines]


def _by_hand(
    fn: str, target: adapter.Target, finding: findings.Finding, path: pathlib.Path
) -> list[str]:
    """The same, without the imports."""
    first = f'leak = np.load("{path}")'
    if hasattr(target.callable, "eval"):
        first = f"{fn}.eval(); {first}"
    words = modes.evaluation_words(target.callable, seed=target.seed)
    output = f"{fn}(x{words})[:, {finding.target}]"
    if finding.probe != "gradients":
        return [
            first,
            f"a, b = ({fn}({_array(target, 'leak[x]')}{words}) "
            'for x in ("inputs", "edited"))',
            f"print(abs(b - a)[{finding.target_row}, {finding.target}].max().item())",
        ]
    if target.framework == "PyTorch":
        x = _array(target, 'leak["inputs"]')
        return [
            f"{first}; x = {x}.requires_grad_()",
            f"y = {output}; (y * torch.randn_like(y)).sum().backward()",
            f"print(abs(x.grad[:, {finding.source}]).max().item())",
        ]
    return [
        first,
        f'derivative = jax.jacrev(lambda x: {output})(leak["inputs"])',
        f"print(abs(derivative[..., {finding.source}, :]).max().item())",
    ]


def _array(target: adapter.Target, x: str) -> str:
    """A NumPy array as the target takes it, in Python."""
    if target.framework == "NumPy":
        return x
    if target.framework == "JAX":
        return f"jnp.asarray({x})"
    if target.vocab_size is not None:
        return f"torch.tensor({x}).long()"
    convert = frameworks.converter(target.callable, "PyTorch")
    dtype = str(convert(np.zeros(0, np.float32)).dtype)
    return f"torch.tensor({x}" + (")" if "float32" in dtype else f", dtype={dtype})")


def save(path: pathlib.Path, target: adapter.Target, finding: findings.Finding) -> None:
    """Writes the file, whole or not at all.

    Args:
      path: path of the file.
      target: the callable.
      finding: the leak at the smallest pair of inputs.
    """
    fn = in_mode(target, mode(finding))
    arrays = {
        **vars(finding),
        "before": _plain(calls.call(fn, finding.inputs)),
        "after": _plain(calls.call(fn, finding.edited)),
        "mode": mode(finding),
        "callable": target.name,
        "vocab_size": target.vocab_size or 0,
        "seed": target.seed,
    }
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb") as file:
            # np.savez names its arrays by keyword.
            np.savez_compressed(file, **{key: arrays[key] for key in _NAMES})
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _plain(array: np.ndarray) -> np.ndarray:
    """bfloat16 and narrower floats as float32, exactly: NumPy's files know neither."""
    is_known = array.dtype.kind in "fiub"
    return array if is_known else array.astype(np.float32)


def read(path: pathlib.Path) -> dict[str, np.ndarray]:
    """Reads the arrays of a file that `save` wrote.

    Raises:
      ValueError: there is no such file, or it is no leak of an audit.
    """
    try:
        with np.load(path) as file:
            arrays = {key: file[key] for key in _NAMES}
    except FileNotFoundError:
        raise ValueError(f"{str(path)!r} does not exist") from None
    except (OSError, KeyError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise ValueError(f"{str(path)!r} is not an .npz of an audit") from error
    pair = [arrays[name] for name in ("inputs", "edited")]
    kind = {2: np.integer, 3: np.floating}.get(pair[0].ndim)
    if kind is None or not all(
        x.shape == pair[0].shape and np.issubdtype(x.dtype, kind) for x in pair
    ):
        shapes = " and ".join(f"{x.dtype} {list(x.shape)}" for x in pair)
        raise ValueError(f"{str(path)!r} holds no leak of an audit, but {shapes}")
    return arrays


def replay(
    fn: Callable[..., Any], arrays: Mapping[str, np.ndarray]
) -> findings.Finding | None:
    """Asks a callable whether it still leaks on the pair of inputs.

    Args:
      fn: the callable, as it was imported.
      arrays: arrays of the file, from `read`.

    Returns:
      The worst that moves though it must not, a leak or less; None if nothing does.

    Raises:
      ValueError: the callable cannot be called with these inputs.
    """
    inputs, edited = arrays["inputs"], arrays["edited"]
    is_tokens = inputs.ndim == 2
    target = adapter.adapt(
        fn,
        name=str(arrays["callable"]),
        length=inputs.shape[1],
        vocab_size=int(arrays["vocab_size"]) if is_tokens else None,
        width=None if is_tokens else inputs.shape[2],
        seed=int(arrays["seed"]),
        token_edit_budget=0,
    )
    probe = str(arrays["probe"])
    try:
        if probe == "gradients":
            return _derivative(target, inputs)
        fn = in_mode(target, str(arrays["mode"]))
        return comparison.compare(probe, fn, inputs, edited, tolerance=target.tolerance)
    except calls.Refused as error:
        raise ValueError(f"the leak cannot be replayed: {error}") from error


def _derivative(
    target: adapter.Target, inputs: Float[np.ndarray, "B T E"]
) -> findings.Finding | None:
    """What the derivatives at these inputs show; Refused if there are none."""
    subject = dataclasses.replace(target, rows=inputs, length=inputs.shape[1])
    outcome = probes.run("gradients", subject)
    if outcome.kind in ("not applicable", "refused"):
        raise calls.Refused(outcome.tried)
    finding = outcome.finding
    return finding and dataclasses.replace(finding, inputs=inputs, edited=inputs)

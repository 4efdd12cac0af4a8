"""A stranger's callable in evaluation and in training mode.

It has a training mode if it is an object with methods `train` and `eval` (PyTorch,
nnx), if its signature has a keyword such as `train` or `deterministic` (the module's
signature for the `apply` of flax.linen), or if it takes a key that it can do without.
Global random states are seeded before every call in training mode, so that equal inputs
give equal outputs.
"""

import contextlib
import copy
import functools
import inspect
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import flax.core
import jax
import numpy as np
from flax import linen

# Keywords that choose the mode, with their values for evaluation.
_SWITCHES = {
    "deterministic": True,
    "train": False,
    "training": False,
    "is_training": False,
    "is_train": False,
    "inference": True,
    "use_running_average": True,
    "enable_dropout": False,
}
_KEYS = ("rng", "key", "rngs")
_EMPTY = inspect.Parameter.empty


def evaluation(fn: Callable[..., Any], *, seed: int) -> Callable[[Any], Any]:
    """Puts the callable into evaluation mode.

    Args:
      fn: takes arrays of its framework. An object with methods `train` and `eval` is
        copied; one that cannot be copied is switched itself.
      seed: seed of the keys that are passed to it.

    Returns:
      The callable, of one argument.
    """
    keywords = _keywords(fn, training=False, seed=seed)
    owner = switchable(fn)
    if owner is not None:
        switched = owner
        # A foreign object: anything may go wrong.
        with contextlib.suppress(Exception):
            switched = _copied(owner)
        switched.eval()
        fn = _rebound(fn, owner, switched)
    return functools.partial(fn, **keywords) if keywords else fn


def training(fn: Callable[..., Any], *, seed: int) -> Callable[[Any], Any] | None:
    """Puts the callable into training mode.

    Args:
      fn: takes arrays of its framework. An object with methods `train` and `eval` is
        copied before every call.
      seed: seed of the keys and random states that it draws from.

    Returns:
      The callable, of one argument; None if it has no training mode.
    """
    if not _has_training(fn):
        return None
    keywords = _keywords(fn, training=True, seed=seed)
    if switchable(fn) is not None:
        fn = _trained(fn)
    if _flax_module(fn) is None:
        return _seeded(functools.partial(fn, **keywords), seed)
    # Batch statistics change in training mode: they come back beside the output.
    keywords["mutable"] = flax.core.DenyList("params")
    return _seeded(lambda inputs: fn(inputs, **keywords)[0], seed)


def evaluation_words(fn: Callable[..., Any], *, seed: int) -> str:
    """The keywords that `evaluation` adds, as Python code that follows an argument."""
    keywords = _keywords(fn, training=False, seed=seed)
    key = f"jax.random.key({seed})"
    return "".join(
        f", {name}={value if name in _SWITCHES else key}"
        for name, value in keywords.items()
    )


def switchable(fn: Callable[..., Any]) -> Any:
    """The object with methods `train` and `eval` that is called, or whose method is."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    for candidate in (fn, getattr(fn, "__self__", None)):
        if all(
            _is_switch(getattr(candidate, name, None)) for name in ("train", "eval")
        ):
            return candidate
    return None


def only_a_key(fn: Callable[..., Any]) -> bool:
    """Whether nothing but a key tells training mode: the key may be another thing."""
    return switchable(fn) is None and not _SWITCHES.keys() & _parameters(fn)


def _is_switch(method: Any) -> bool:
    """Whether it can be called without arguments; another `train` may want data."""
    try:
        inspect.signature(method).bind()
    except TypeError:
        return False
    except ValueError:  # written in C
        return True
    return True


def _has_training(fn: Callable[..., Any]) -> bool:
    if switchable(fn) is not None:
        return True
    parameters = _parameters(fn)
    # Every `apply` of flax takes rngs: they say nothing.
    optional = any(
        name in parameters and parameters[name].default is not _EMPTY
        for name in ("rng", "key")
    )
    return optional or bool(_SWITCHES.keys() & parameters)


def _keywords(fn: Callable[..., Any], *, training: bool, seed: int) -> dict[str, Any]:
    """The keywords that put the callable into the mode."""
    parameters = _parameters(fn)
    keywords: dict[str, Any] = {}
    for name, evaluation in _SWITCHES.items():
        value = evaluation != training
        # Passed only where it is needed: a compiled function would trace it.
        if name in parameters and parameters[name].default is not value:
            keywords[name] = value
    if switchable(fn) is not None:  # which holds its own keys
        return keywords
    for name in _KEYS:
        if name in parameters and (training or parameters[name].default is _EMPTY):
            keywords[name] = jax.random.key(seed)
    return keywords


def _parameters(fn: Callable[..., Any]) -> dict[str, inspect.Parameter]:
    """The parameters that can be passed to the callable by keyword."""
    module = _flax_module(fn)
    functions = [fn] if module is None else [fn, _applied(fn, module)]
    if hasattr(fn, "forward"):
        functions = [fn.forward]
    parameters: dict[str, inspect.Parameter] = {}
    for function in functions:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # written in C
            continue
        parameters = {**signature.parameters, **parameters}
    return {
        name: parameter
        for name, parameter in parameters.items()
        if parameter.kind
        in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }


def _flax_module(fn: Callable[..., Any]) -> linen.Module | None:
    """The module, if the callable is its `apply`, with some arguments bound or none."""
    while isinstance(fn, functools.partial):
        fn = fn.func
    owner = getattr(fn, "__self__", None)
    is_apply = isinstance(owner, linen.Module) and fn.__name__ == "apply"
    return owner if is_apply else None


def _applied(fn: Callable[..., Any], module: linen.Module) -> Callable[..., Any]:
    """The method of the module that its `apply` calls."""
    method = fn.keywords.get("method") if isinstance(fn, functools.partial) else None
    if isinstance(method, str):
        return getattr(module, method)
    return module.__call__ if method is None else method


def _trained(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The callable on a copy of its object, at every call, in training mode."""
    owner = switchable(fn)

    def trained(*args: Any, **kwargs: Any) -> Any:
        with _lent(owner) as lent:
            lent.train()
            return _rebound(fn, owner, lent)(*args, **kwargs)

    return trained


@contextlib.contextmanager
def _lent(owner: Any) -> Iterator[Any]:
    """A copy; or a PyTorch module itself that has none, which is then restored."""
    try:
        copied = _copied(owner)
    # Foreign objects: anything may go wrong.
    except Exception:
        if not _is_torch_module(owner):
            raise
    else:
        yield copied
        return
    modes = [(part, part.training) for part in owner.modules()]
    state = copy.deepcopy(owner.state_dict())
    try:
        yield owner
    finally:
        owner.load_state_dict(state)
        for part, mode in modes:
            part.training = mode


def _is_torch_module(owner: Any) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(owner, torch.nn.Module)


def _copied(owner: Any) -> Any:
    """A copy; it shares the parameters of a PyTorch module, which no call changes."""
    shared = owner.parameters() if _is_torch_module(owner) else ()
    return copy.deepcopy(owner, {id(parameter): parameter for parameter in shared})


def _rebound(fn: Callable[..., Any], owner: Any, other: Any) -> Callable[..., Any]:
    """The callable that calls another object in the place of its owner."""
    if isinstance(fn, functools.partial):
        inner = _rebound(fn.func, owner, other)
        return functools.partial(inner, *fn.args, **fn.keywords)
    return other if fn is owner else getattr(other, fn.__name__)


def _seeded(fn: Callable[[Any], Any], seed: int) -> Callable[[Any], Any]:
    """Sets the global random states before every call."""

    def call(inputs: Any) -> Any:
        random.seed(seed)
        np.random.seed(seed)
        if torch := sys.modules.get("torch"):
            torch.manual_seed(seed)
        return fn(inputs)

    return call

"""Foreign code: imported by name, called without output, its errors in one line.

`load` imports a callable by 'package.module:callable'. What runs within `guarded` may
raise, warn, print or exit as it likes: a `calls.Refused` says what and where.
"""

import contextlib
import importlib
import io
import os
import pathlib
import sys
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from flax import linen

import attention
from attention.properties import calls

# Folders of code that is not the stranger's: installed, or ours.
_NOT_THE_STRANGERS = tuple(
    os.path.join(folder, "")
    for folder in (
        *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
        os.path.dirname(__file__),
        os.path.dirname(attention.__file__),
    )
)
# Our packages that an audit imports; the stranger cannot have any of these names.
_TAKEN = ("attention", "models", "train")
# Characters of a foreign message that are shown.
_MESSAGE = 200


class UnusableOutput(ValueError):
    """The callable returned something else than one array of real numbers."""


def load(name: str) -> Callable[..., Any]:
    """Imports a callable; the current directory is on the path, as with python -m.

    Args:
      name: such as 'package.module:callable'; dots after the colon are attributes.

    Raises:
      ValueError: no such module or attribute, the import raises, or it is not
        something to be called with an array.
    """
    module_name, _, path = name.partition(":")
    if not (module_name and path):
        raise ValueError(f"expected package.module:callable, got {name!r}")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        target: Any = importlib.import_module(module_name)
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as error:
        missing = isinstance(error, ModuleNotFoundError) and error.name
        if missing and f"{module_name}.".startswith(f"{missing}."):
            meant = module_name.removesuffix(".py").replace(os.sep, ".")
            hint = "" if meant == module_name else f": is {meant}:{path} meant?"
            raise ValueError(
                f"no module {missing!r} in {os.getcwd()!r} or elsewhere on the path"
                f"{hint or _collision(module_name)}"
            ) from error
        hint = _collision(_module_of(error))
        raise ValueError(
            f"importing {module_name!r} raised {blame(error)}{hint}"
        ) from error
    for attribute in path.split("."):
        try:
            target = getattr(target, attribute)
        except Exception as error:
            raise ValueError(
                f"{name!r} was not found: {error}{_collision(module_name)}"
            ) from error
    if isinstance(target, type):
        raise ValueError(
            f"{name!r} is a class: make an instance in the module, such as "
            f"model = {target.__name__}(...), and name that"
        )
    if isinstance(target, linen.Module):
        raise ValueError(
            f"{name!r} is a flax module without its parameters: name "
            "functools.partial(model.apply, variables)"
        )
    if not callable(target):
        raise ValueError(f"{name!r} is {type(target).__name__!r}, expected a callable")
    return target


def _module_of(error: BaseException) -> str:
    """The module in which the error says that a name is missing; '' if it says none."""
    if isinstance(error, AttributeError):
        return getattr(error.obj, "__name__", "")
    return (error.name or "") if isinstance(error, ImportError) else ""


def _collision(module_name: str) -> str:
    """A hint where that module is a package of ours, not the stranger's file."""
    here, name = pathlib.Path.cwd(), module_name.partition(".")[0]
    if name not in _TAKEN or here == pathlib.Path(__file__).parent.parent:
        return ""
    hidden = [path.name for path in (here / f"{name}.py", here / name) if path.exists()]
    if not hidden:
        return ""
    return f"; {hidden[0]} here has the name of a package of this program: rename it"


@contextlib.contextmanager
def guarded() -> Iterator[None]:
    """Keeps foreign code off the screen and turns what it raises into Refused."""
    try:
        with warnings.catch_warnings(), np.errstate(all="ignore"), silent():
            warnings.simplefilter("ignore")
            yield
    except UnusableOutput as error:
        raise calls.Refused(str(error)) from error
    except calls.Refused:
        raise
    # Foreign code: anything may go wrong.
    except (Exception, SystemExit) as error:
        raise calls.Refused(f"raised {blame(error)}") from error


def silent() -> contextlib.redirect_stdout[io.StringIO]:
    """Makes a context in which what is printed is thrown away."""
    return contextlib.redirect_stdout(io.StringIO())


def blame(error: BaseException) -> str:
    """An exception in one line, with file and line of the stranger's code."""
    text = " ".join(str(error).split())
    text = f"{type(error).__name__}: {text[:_MESSAGE]}"
    if isinstance(error, SyntaxError):  # Its message says where.
        return text
    theirs = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(_NOT_THE_STRANGERS)
    ]
    for frame in theirs[-1:]:
        path = pathlib.Path(frame.filename)
        with contextlib.suppress(ValueError):
            path = path.relative_to(os.getcwd())
        text += f" ({path}, line {frame.lineno})"
    return text

"""The border between a command line and a program.

Every program declares its flags in one function, reads them in another, and hands both
to `run`:

    def define_flags(values: flags.FlagValues) -> None:
        cli.define_config(values, config.Config)
        flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)

    def main(values: flags.FlagValues) -> int | None:
        settings = cli.read_config(values, config.Config)
        with cli.usage_errors():
            ...  # open what the user named
        ...

    if __name__ == "__main__":
        cli.run(main, define_flags)

Nothing is defined at import, so programs can import one another. The exit status is
what `main` returns (None and 0: done and verified; 1: a check failed), or

    2    unusable arguments or input: one line on stderr, no traceback
    130  Ctrl-C
    143  SIGTERM

Any other exception is a fault of the program and keeps its traceback.
"""

import contextlib
import importlib.machinery
import pathlib
import signal
import sys
import traceback
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn, TypeVar

import jax
from absl import flags
from flax import traverse_util
from ml_collections import config_dict, config_flags

from train import config

T = TypeVar("T")


class UsageError(ValueError):
    """Arguments or input that cannot be used: exit 2 with this message, on one line."""


class Terminated(KeyboardInterrupt):
    """SIGTERM. Whoever saves the state on Ctrl-C saves it now too."""


@contextlib.contextmanager
def usage_errors() -> Iterator[None]:
    """Turns what the user's values and files cause within into `UsageError`."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise UsageError(str(error)) from error


def run(
    main: Callable[[flags.FlagValues], int | None],
    define_flags: Callable[[flags.FlagValues], None],
) -> NoReturn:
    """Runs a program on `sys.argv` and exits; the module says with which status.

    Adds `--help`, `--helpfull` and jax's own flags; `--flagfile=FILE` works too.

    Args:
      main: the program; its module's docstring is what `--help` begins with.
      define_flags: defines the program's flags in the given values.
    """
    signal.signal(signal.SIGTERM, _terminate)
    # A shell starts background jobs with SIGINT ignored; `kill -INT` should end them.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        values = _parse(define_flags)
        if values.help or values.helpfull:
            print(_usage(main, values))
            sys.exit(0)
        _check_devices()
        status = main(values)
    except UsageError as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        status = 2
    except Terminated:
        status = 143
    except KeyboardInterrupt:
        status = 130
    sys.exit(status)


def define_config(values: flags.FlagValues, cls: type) -> None:
    """Defines `--config=FILE[:VARIANT]` and a typed `--config.FIELD` for every field.

    ml_collections defines the fields and parses what is given for them. The word none,
    in any case, sets a field to None whose annotation allows it.

    Args:
      values: where to define them.
      cls: the dataclass that the file describes, such as `config.Config`.
    """
    flags.DEFINE(
        _ConfigFile(),
        "config",
        None,
        "Python file whose get_config() holds every value; FILE:VARIANT calls "
        "get_config('VARIANT')",
        flag_values=values,
    )
    leaves = list(config.fields(cls))
    # ml_collections takes types from a ConfigDict's values. This one has the declared
    # types and no values, because in a file an int may stand for a float.
    placeholders = {
        path: config_dict.placeholder(_OR_NONE[leaf_type] if optional else leaf_type)
        for path, leaf_type, optional, _ in leaves
    }
    fields = flags.FlagValues()
    # It defines the fields that it sees in sys_argv. It is shown all of them: --help
    # lists them all, and they may precede --config.
    config_flags.DEFINE_config_dict(
        "config",
        config_dict.ConfigDict(
            traverse_util.unflatten_dict(placeholders, sep="."), type_safe=False
        ),
        flag_values=fields,
        sys_argv=[f"--config.{path}" for path in placeholders],
    )
    for leaf in leaves:
        flag = fields[f"config.{leaf.path}"]
        flag.help = leaf.help
        values[flag.name] = flag


def workdir(
    values: flags.FlagValues, *, example: str, instead: str = ""
) -> pathlib.Path:
    """The folder that --workdir names.

    Args:
      values: parsed flags.
      example: a folder such as the program's own.
      instead: another flag that would do, for the message.

    Raises:
      UsageError: it was not given.
    """
    if not values.workdir:
        words = f"--workdir=DIR is needed, such as --workdir={example}"
        raise UsageError(f"{words}, or {instead}" if instead else words)
    return pathlib.Path(values.workdir)


def read_config(values: flags.FlagValues, cls: type[T]) -> T:
    """The configuration that `--config` and the `--config.FIELD` flags describe.

    Args:
      values: parsed flags, after `define_config(values, cls)`.
      cls: the same dataclass.

    Returns:
      An instance of `cls`.

    Raises:
      UsageError: no `--config`, or whatever `config.from_config_dict` refuses.
    """
    if values.config is None:
        raise UsageError("--config=FILE is needed, such as --config=configs/tiny_lm.py")
    with usage_errors():
        return config.from_config_dict(_overridden(values), cls)


class _OrNone(flags.ArgumentParser[Any]):
    """Turns the word none into None, and leaves the rest to another parser."""

    def __init__(self, parser: flags.ArgumentParser[Any]):
        super().__init__()
        self._parser = parser

    def parse(self, argument: str) -> Any:
        return None if argument.lower() == "none" else self._parser.parse(argument)

    def flag_type(self) -> str:
        return f"{self._parser.flag_type()} or none"


# What ml_collections holds to be the type of a field annotated `type | None`.
_OR_NONE: Mapping[type, type] = types.MappingProxyType(
    {
        leaf_type: config_flags.register_flag_parser_for_type(
            type(f"{leaf_type.__name__} or none", (), {}), _OrNone(parser)
        )
        for leaf_type, parser in (
            (int, flags.IntegerParser()),
            (float, flags.FloatParser()),
            (str, flags.ArgumentParser()),
        )
    }
)


class _ConfigFile(flags.ArgumentParser[config_dict.ConfigDict]):
    """Turns FILE or FILE:VARIANT into what its get_config() returns.

    ml_collections' own parser calls the deprecated `load_module`, which leaves the
    module in `sys.modules`: a later file without a get_config() has that of the first.
    Nor does it say in which line of the file an error lies.
    """

    def parse(self, argument: str) -> config_dict.ConfigDict:
        path, *variant = argument.split(":", 1)
        module = types.ModuleType("config_file")
        module.__file__ = path
        try:
            importlib.machinery.SourceFileLoader("config_file", path).exec_module(
                module
            )
            values = module.get_config(*variant)
        # The file is foreign code: anything may go wrong.
        except (Exception, SystemExit) as error:
            lines = [
                f", line {frame.lineno}"
                for frame in traceback.extract_tb(error.__traceback__)
                if frame.filename == path
            ]
            raise ValueError(
                f"{type(error).__name__}{''.join(lines[-1:])}: {error}"
            ) from error
        if not isinstance(values, config_dict.ConfigDict):
            raise ValueError(f"get_config() must return a ConfigDict, got {values!r}")
        return values

    def flag_type(self) -> str:
        return "config file"


def _terminate(signal_number: int, frame: types.FrameType | None) -> NoReturn:
    del frame
    signal.signal(signal_number, signal.SIG_IGN)  # Let the state be saved in peace.
    raise Terminated


def _parse(define_flags: Callable[[flags.FlagValues], None]) -> flags.FlagValues:
    values = flags.FlagValues()
    define_flags(values)
    flags.DEFINE_bool(
        "help", False, "print this help", short_name="h", flag_values=values
    )
    flags.DEFINE_bool("helpfull", False, "list jax's flags too", flag_values=values)
    if "jax_platforms" not in flags.FLAGS:
        jax.config.config_with_absl()
    for name in _jax_flags():
        values[name] = flags.FLAGS[name]
    try:
        _, *leftover = values(sys.argv)
        for name in _jax_flags():
            if values[name].present:
                jax.config.update(name, values[name].value)
    except (flags.Error, ValueError) as error:
        raise UsageError(str(error)) from error
    if leftover:
        raise UsageError(
            f"unexpected argument {leftover[0]!r}; flags are written --name=value, "
            "booleans too"
        )
    return values


def _jax_flags() -> list[str]:
    return [name for name in flags.FLAGS if name in jax.config.values]


def _check_devices() -> None:
    """Raises UsageError where jax finds no device of the platforms asked for."""
    try:
        jax.devices()
    # jax asserts where it knows a platform that it was not installed for.
    except (RuntimeError, AssertionError) as error:
        reason = str(error) or "jax is not installed for it"
        platforms = jax.config.values["jax_platforms"]
        raise UsageError(
            f"no device for jax_platforms={platforms}: {reason}"
        ) from error


def _overridden(values: flags.FlagValues) -> config_dict.ConfigDict:
    """The config file's values under those of the `--config.FIELD` flags."""
    overrides = {
        name.removeprefix("config."): values[name].value
        for name in values
        if name.startswith("config.") and values[name].present
    }
    settings = config_dict.ConfigDict(values.config)
    # The dataclass checks types; ConfigDict would hold a file's `1` to be an int.
    with settings.ignore_type():
        try:
            settings.update_from_flattened_dict(overrides)
        except KeyError as error:
            raise UsageError(error.args[0]) from error
    return settings


def _usage(
    main: Callable[[flags.FlagValues], int | None], values: flags.FlagValues
) -> str:
    """The module's docstring and a line per flag: name, value, type and help."""
    has_config = "config" in values and values.config is not None
    settings = _overridden(values) if has_config else None
    jax_flags = _jax_flags()
    rows = []
    for name in dict.fromkeys(values[name].name for name in values):
        if name in jax_flags and not values.helpfull:
            continue
        value = None if name == "config" else values[name].value
        if name.startswith("config.") and settings is not None:
            value = settings.get(name.removeprefix("config."), "")
            value = "none" if value is None else value
        shown = "" if value in (None, "") else f"={value}"
        text = " ".join(values[name].help.split())
        rows.append((f"--{name}{shown}", f"({values[name].flag_type()}) {text}"))
    width = max(len(left) for left, _ in rows)
    return "\n".join(
        [
            (sys.modules[main.__module__].__doc__ or "").strip(),
            "",
            *(f"{left:{width}}  {right}" for left, right in rows),
            "",
            "--flagfile=FILE reads flags from a file. jax's own flags work too "
            "(--jax_platforms=cpu, --jax_debug_nans, ...): --helpfull lists them.",
        ]
    )

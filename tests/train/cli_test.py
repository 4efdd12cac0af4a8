"""The docstring that --help begins with."""

import json
import os
import pathlib
import signal
import subprocess
import sys

import jax
import pytest
from absl import flags

from train import cli, config

ROOT = pathlib.Path(__file__).parents[2]
CONFIG = f"--config={ROOT / 'configs' / 'tiny_lm.py'}"


def define_flags(values):
    cli.define_config(values, config.Config)
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_bool("use_bias", True, "whether", flag_values=values)


@pytest.fixture
def run(monkeypatch, capsys):
    """Runs a program in this process; returns its status and what it wrote."""
    handlers = {
        sign: signal.getsignal(sign) for sign in (signal.SIGINT, signal.SIGTERM)
    }
    log_compiles = jax.config.values["jax_log_compiles"]

    def run(*arguments, main=lambda values: None):
        monkeypatch.setattr(sys, "argv", ["program", *arguments])
        with pytest.raises(SystemExit) as exit_:
            cli.run(main, define_flags)
        written = capsys.readouterr()
        return exit_.value.code or 0, written.out, written.err

    yield run
    for sign, handler in handlers.items():
        signal.signal(sign, handler)
    jax.config.update("jax_log_compiles", log_compiles)
    flags.FLAGS["jax_log_compiles"].unparse()


@pytest.fixture
def read(run):
    """The config and the flags that a program gets from the given arguments."""

    def read(*arguments):
        found = []

        def main(values):
            found.append((cli.read_config(values, config.Config), values))

        status, _, err = run(*arguments, main=main)
        assert (status, err) == (0, "")
        return found[0]

    return read


@pytest.fixture
def refused(run):
    """What a program says that refuses its arguments: one line, and nothing else."""

    def refused(*arguments):
        status, out, err = run(
            *arguments,
            main=lambda values: print(cli.read_config(values, config.Config)),
        )
        assert (status, out) == (2, "")
        assert err.startswith("error: ")
        assert err.count("\n") == 1
        return err

    return refused


def test_overrides_are_typed(read):
    settings, values = read(
        CONFIG,
        "--config.train.steps=7",
        "--config.optimizer.peak_lr=1",
        "--config.data.path=a file",
        "--config.model.use_bias",
        "--workdir=runs/x",
    )
    assert settings.train.steps == 7
    assert settings.optimizer.peak_lr == 1.0
    assert settings.data.path == "a file"
    assert settings.model.use_bias is True
    assert values.workdir == "runs/x"


@pytest.mark.parametrize("flag", ["config.model.tie_embeddings", "use_bias"])
@pytest.mark.parametrize("written", ["--{}=false", "--{}=False", "--{}=0", "--no{}"])
def test_false(read, flag, written):
    """case B141: the ways to write False."""
    settings, values = read(CONFIG, written.format(flag))
    if flag == "use_bias":
        assert values.use_bias is False
    else:
        assert settings.model.tie_embeddings is False


@pytest.mark.parametrize("flag", ["--config.model.tie_embeddings", "--use_bias"])
def test_not_false(refused, flag):
    """case B141: a bare flag is True and leaves a positional; maybe is neither."""
    assert "unexpected argument 'false'" in refused(CONFIG, flag, "false")
    assert "Non-boolean argument" in refused(CONFIG, f"{flag}=maybe")


@pytest.mark.parametrize(
    ("field", "written", "value"),
    [
        ("model.scale", "0.5", 0.5),
        ("model.scale", "0", 0.0),
        ("model.num_kv_heads", "2", 2),
        ("model.convolution", "4", 4),
        ("optimizer.clip_norm", "0.1", 0.1),
        ("data.path", "a file", "a file"),
    ],
)
@pytest.mark.parametrize("none", ["none", "None", "NONE"])
def test_none_is_a_value_of_some_fields(read, field, written, value, none):
    """case B140: it is not 0, and can be said on the command line."""
    parent, name = field.split(".")

    def given(*arguments):
        settings, _ = read(CONFIG, *arguments)
        text = config.to_json(settings)
        assert config.from_dict(json.loads(text), config.Config) == settings
        return getattr(getattr(settings, parent), name)

    flag = f"--config.{field}"
    assert given() == (1.0 if name == "clip_norm" else None)
    assert given(f"{flag}={written}") == value
    assert given(f"{flag}={none}") is None
    assert given(f"{flag}={written}", f"{flag}={none}") is None
    assert given(f"{flag}={none}", f"{flag}={written}") == value


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--config=FILE is needed"),
        ([CONFIG, "--nope=1"], "Unknown command line flag 'nope'"),
        ([CONFIG, "--config.nope=1"], "Unknown command line flag 'config.nope'"),
        ([CONFIG, "--config.model.widht=1"], "Did you mean: config.model.width ?"),
        ([CONFIG, "--noconfig.model.width"], "Did you mean: config.model.width ?"),
        ([CONFIG, "--config.train.steps=abc"], "--config.train.steps=abc: invalid"),
        ([CONFIG, "--config.train.steps=1.5"], "--config.train.steps=1.5: invalid"),
        ([CONFIG, "--config.train.steps"], "Missing value for flag"),
        ([CONFIG, "--config.train.steps=none"], "--config.train.steps=none: invalid"),
        ([CONFIG, "--config.model.use_bias=none"], "Non-boolean argument"),
        ([CONFIG, "--config.model.scale=nil"], "--config.model.scale=nil: could not"),
        ([CONFIG, "--config.model.scale="], "--config.model.scale=: could not"),
        ([CONFIG, "--config.model.num_kv_heads=0"], "must be at least 1 or none, got"),
        ([CONFIG, "--config.data.path="], "path must be a file or none, got ''"),
        ([CONFIG, "--config.train.steps=-1"], "config.train: steps must be at least 1"),
        (
            [CONFIG, "--config.model.num_heads=3"],
            "multiple of num_heads, got width=128",
        ),
        ([CONFIG, "--jax_debug_nans=maybe"], "--jax_debug_nans=maybe"),
        ([CONFIG, "stray"], "unexpected argument 'stray'"),
        ([CONFIG, "--", "stray"], "unexpected argument 'stray'"),
        ([CONFIG + ":variant"], "mixers must be names out of softmax, window"),
        (
            [CONFIG.replace("tiny_lm", "shakespeare_char") + ":variant"],
            "TypeError: get_config() takes 0 positional arguments",
        ),
        (["--config=missing.py"], "No such file or directory: 'missing.py'"),
        (["--flagfile=missing"], "No such file or directory: 'missing'"),
    ],
    ids=str,
)
def test_refused(refused, arguments, message):
    assert message in refused(*arguments)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def get_config():\n    return nope", "NameError, line 2: name 'nope' is not"),
        ("def get_config(:", "SyntaxError: "),
        ("import nope_nope", "ModuleNotFoundError, line 1: No module named"),
        ("", "has no attribute 'get_config'"),
        ("def get_config():\n    pass", "must return a ConfigDict, got None"),
    ],
)
def test_a_broken_config_file_is_refused(refused, tmp_path, text, message):
    path = tmp_path / "study.py"
    path.write_text(text)
    assert message in refused(f"--config={path}")


STUDY = """
from ml_collections import config_dict
from configs import tiny_lm

def get_config(variant):
    config = tiny_lm.get_config()
    config.train.steps = steps = config_dict.FieldReference(400)
    config.optimizer.warmup_steps = steps // 10
    del config.model.scale
    config.model.scale = {"quick": 1, "slow": 2.5}[variant]
    config.lock()
    return config
"""


def test_a_config_file_from_elsewhere(read, tmp_path):
    """With a variant, a field that follows another, and an int for a float."""
    path = tmp_path / "study.py"
    path.write_text(STUDY)
    settings, _ = read(
        "--config.train.steps=50", f"--config={path}:quick", "--config.model.scale=0.5"
    )
    assert settings.train.steps == 50
    assert settings.optimizer.warmup_steps == 5
    assert settings.model.scale == 0.5
    settings, _ = read(f"--config={path}:slow")
    assert settings.optimizer.warmup_steps == 40
    assert settings.model.scale == 2.5


def test_config_files_share_nothing(read, refused, tmp_path):
    """A file is no module, and one program's overrides are not the next one's."""
    first, second = tmp_path / "first.py", tmp_path / "second.py"
    first.write_text("from configs.shakespeare_char import get_config")
    second.write_text("from configs import tiny_lm")
    settings, _ = read(f"--config={first}", "--config.train.steps=7")
    assert settings.train.steps == 7
    modules = set(sys.modules)
    settings, _ = read(f"--config={first}")
    assert settings.train.steps == 2000
    assert set(sys.modules) == modules
    assert "has no attribute 'get_config'" in refused(f"--config={second}")


def test_flagfile(read, tmp_path):
    path = tmp_path / "flags"
    path.write_text(f"{CONFIG}\n--config.train.steps=7\n--workdir=here\n")
    settings, values = read(f"--flagfile={path}", "--config.seed=3")
    assert (settings.train.steps, settings.seed, values.workdir) == (7, 3, "here")


def test_jax_flags_reach_jax(run):
    found = []

    def main(values):
        found.append(jax.config.values["jax_log_compiles"])

    assert run(main=main)[0] == run("--jax_log_compiles", main=main)[0] == 0
    assert found == [False, True]


def test_help(run):
    status, out, err = run("--help")
    assert (status, err) == (0, "")
    assert out.startswith("The docstring that --help begins with.\n")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "--config.model.width (int) E, model width" in lines
    assert "--workdir (string) folder of the run" in lines
    assert (
        "--config.model.scale (float or none) factor of the scores; "
        "none = 1 / sqrt(head width)"
    ) in lines
    for field in config.fields(config.Config):
        assert any(line.startswith(f"--config.{field.path} ") for line in lines)
    assert not any("jax_enable_x64" in line for line in lines)
    assert "--jax_enable_x64" in run("--helpfull")[1]


def test_help_shows_the_values_of_a_config_file(run):
    status, out, _ = run("-h", CONFIG, "--config.model.num_heads=8")
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert status == 0
    assert "--config.model.width=128 (int) E, model width" in lines
    for start in ("num_heads=8 (int) ", "num_kv_heads=none (int or none) "):
        assert any(line.startswith(f"--config.model.{start}") for line in lines)


@pytest.mark.parametrize(
    ("sign", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=str
)
def test_signals_let_the_state_be_saved(run, sign, status):
    saved = []

    def main(values):
        try:
            os.kill(os.getpid(), sign)
        except KeyboardInterrupt:
            saved.append(values)
            raise

    assert run(main=main) == (status, "", "")
    assert saved


def test_exit_status_is_what_main_returns(run):
    assert run(main=lambda values: 1)[0] == 1
    assert run(main=lambda values: 0)[0] == 0


def test_unusable_input_is_one_line_and_faults_are_not_hidden(run):
    def unusable(values):
        with cli.usage_errors():
            pathlib.Path("/nope/nope").read_text()

    def long(values):
        raise cli.UsageError("two\n  lines")

    def faulty(values):
        raise ValueError("a fault of the program")

    status, _, err = run(main=unusable)
    assert status == 2
    assert err == "error: [Errno 2] No such file or directory: '/nope/nope'\n"
    assert run(main=long)[2] == "error: two lines\n"
    with pytest.raises(ValueError, match="a fault of the program"):
        cli.run(faulty, define_flags)


@pytest.mark.parametrize("platform", ["nope", "cuda"])
def test_a_device_that_is_not_there(platform):
    """In its own process: jax chooses its platforms once."""
    code = (
        "from train import cli; cli.run(lambda values: print(1), lambda values: None)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, f"--jax_platforms={platform}"],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert (run.returncode, run.stdout) == (2, "")
    assert run.stderr.startswith(f"error: no device for jax_platforms={platform}: ")
    assert run.stderr.count("\n") == 1

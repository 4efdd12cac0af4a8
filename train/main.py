"""Trains a tiny causal language model from nothing, and shows that it is causal.

    python -m train.main --config=configs/tiny_lm.py --workdir=runs/tiny_lm

Every field of the configuration is a flag, such as --config.model.num_heads=8. A rerun
in the same workdir continues. Exit status: 0 trained and verified, 1 not shown causal,
2 unusable arguments or input, 130 Ctrl-C, 143 SIGTERM (both with the state saved).
"""

from absl import flags

from train import cli, config, experiment


def define_flags(values: flags.FlagValues) -> None:
    """Declares the program's flags."""
    cli.define_config(values, config.Config)
    flags.DEFINE_string("workdir", None, "folder of the run", flag_values=values)
    flags.DEFINE_bool(
        "profile",
        False,
        "write a jax profiler trace of a few steps to WORKDIR/profile",
        flag_values=values,
    )
    flags.DEFINE_bool(
        "tensorboard",
        False,
        "write TensorBoard event files too; needs the extra 'tensorboard'",
        flag_values=values,
    )


def main(values: flags.FlagValues) -> int:
    """Parses flags, and runs the experiment."""
    settings = cli.read_config(values, config.Config)
    path = cli.workdir(values, example="runs/tiny_lm")
    with cli.usage_errors():
        run = experiment.prepare(
            settings, path, profile=values.profile, tensorboard=values.tensorboard
        )
    return 0 if experiment.execute(run) else 1


if __name__ == "__main__":
    cli.run(main, define_flags)

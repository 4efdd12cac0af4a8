"""Runs the tests that are marked `x64`: jax holds that setting for a whole process."""

import pathlib
import subprocess
import sys


def test_x64():
    # The last file of a run: both cores are free.
    workers = "--numprocesses=2", "--dist=loadfile"
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-m", "x64", "-q", "--no-header", *workers],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=pathlib.Path(__file__).parent.parent,
    )
    assert run.returncode == 0, run.stdout

"""On what a benchmark ran: machine, driver, settings, versions, revision."""

import importlib.metadata
import os
import pathlib
import platform
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

import jax

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "tokamax")


def describe() -> dict[str, Any]:
    """What should be known beside the numbers, ready for JSON."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "platform": jax.default_backend(),
        "runtime": " ".join(device.client.platform_version.split()),
        "driver": _driver(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "xla_flags": os.environ.get("XLA_FLAGS", ""),
        "precision": jax.config.values["jax_default_matmul_precision"],
        "x64": jax.config.values["jax_enable_x64"],
        "versions": {"python": platform.python_version()} | _versions(),
        "git": _revision(),
    }


def words(machine: dict[str, Any]) -> str:
    """The same in one line."""
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    on = machine["device"] if machine["platform"] != "cpu" else machine["processor"]
    return f"{on}, {machine['cores']} cores; {versions}"


def _versions() -> dict[str, str]:
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def _processor() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    """Of an NVIDIA device; None: there is none, or it is not known."""
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    text = _output(["nvidia-smi", *query])
    return text.splitlines()[0] if text else None


def _revision() -> dict[str, Any] | None:
    """The commit, and whether files differ from it; None: not a repository."""
    revision = _output(["git", "rev-parse", "HEAD"])
    if not revision:
        return None
    return {
        "revision": revision,
        "changed": bool(_output(["git", "status", "--porcelain"])),
    }


def _output(command: Sequence[str]) -> str | None:
    """What a program prints; None where it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None

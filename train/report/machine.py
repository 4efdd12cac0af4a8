"""The machine a program runs on: device, driver, settings, versions, revision."""

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
    """Describes machine, settings and versions, for JSON."""
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
    """Formats what `describe` returns as one line."""
    versions = ", ".join(f"{name} {text}" for name, text in machine["versions"].items())
    on = machine["device"] if machine["platform"] != "cpu" else machine["processor"]
    return f"{on}, {machine['cores']} cores; {versions}"


def _versions() -> dict[str, str]:
    versions = {}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def _processor() -> str:
    path = pathlib.Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    names = [x.partition(":")[2].strip() for x in lines if x.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _driver() -> str | None:
    """Returns the driver of an NVIDIA device, or None if there is none."""
    query = ["--query-gpu=driver_version", "--format=csv,noheader"]
    text = _output(["nvidia-smi", *query])
    return text.splitlines()[0] if text else None


def _revision() -> dict[str, Any] | None:
    """Returns the commit and whether files differ from it; None outside of git."""
    revision = _output(["git", "rev-parse", "HEAD"])
    if not revision:
        return None
    return {
        "revision": revision,
        "changed": bool(_output(["git", "status", "--porcelain"])),
    }


def _output(command: Sequence[str]) -> str | None:
    """Returns what a program prints, or None if it is missing or fails."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, cwd=_ROOT, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None

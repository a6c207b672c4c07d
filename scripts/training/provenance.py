"""Where a number came from: command, commit, machine, versions, seed and date, as one flat record."""

import json
import platform
import re
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = (
    "torch",
    "triton",
    "flash-linear-attention",
    "fla-core",
    "liger-kernel",
    "cut-cross-entropy",
    "quack-kernels",
    "transformers",
    "datasets",
    "tokenizers",
    "hydra-core",
    "wandb",
)


def provenance(seed: int | None = None) -> dict:
    """The record that every result carries.

    Keys: command, commit (with "+dirty" where tracked files differ from it; None outside a git checkout), date (UTC,
    ISO 8601), gpu (name or None), cpu, python, versions (package → version), seed.
    """
    return {
        "command": command_line(),
        "commit": commit(),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "cpu": f"{platform.machine()}, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "versions": {name: installed(name) for name in PACKAGES},
        "cuda": torch.version.cuda,
        "seed": seed,
    }


def machine() -> str:
    """The GPU's name as a folder of results is named after it, or "cpu"."""
    return re.sub(r"\W+", "-", torch.cuda.get_device_name()).lower() if torch.cuda.is_available() else "cpu"


def command_line() -> str:
    """The command as it would be typed in the repository's root."""
    script = Path(sys.argv[0]).resolve()
    script = script.relative_to(ROOT) if script.is_relative_to(ROOT) else script.name
    return shlex.join(["python", str(script), *sys.argv[1:]])


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def commit() -> str | None:
    def git(*arguments: str) -> str:
        done = subprocess.run(["git", "-C", str(ROOT), *arguments], capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short=12", "HEAD") + ("+dirty" if git("status", "--porcelain", "-uno") else "")
    except (OSError, subprocess.CalledProcessError):
        # A tree without git (an archive) may say what it was made from.
        marker = ROOT / "COMMIT"
        return marker.read_text().strip() if marker.is_file() else None


if __name__ == "__main__":
    print(json.dumps(provenance()))

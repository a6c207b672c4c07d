"""Create the virtual environment of this repository: `python3 scripts/setup_venv.py .venv` (called by `make setup`).

Runs on the standard library alone. Installs what pyproject.toml asks for at the versions of requirements.lock, and the
packages `cce` and `models` of this repository in editable form. Two facts of the machine are looked at:

- No GPU: the CPU build of torch is taken where pip can see one (pip's own settings: find-links, or PIP_EXTRA_INDEX_URL
  set to PyTorch's CPU index), which spares several gigabytes of CUDA packages. Where pip sees none, the ordinary build
  is installed and a line says how to avoid it.
- Debian without python3-venv: as root it is installed, otherwise the error names the package.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCK = ROOT / "requirements.lock"


def has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None or Path("/proc/driver/nvidia/version").exists()


def create(venv: Path) -> Path:
    """Make the empty environment and return its interpreter."""
    if importlib.util.find_spec("ensurepip") is None:
        package = f"python{sys.version_info.major}.{sys.version_info.minor}-venv"
        if os.geteuid() != 0 or shutil.which("apt-get") is None:
            sys.exit(
                f"Python's venv module is incomplete here: install it (apt-get install {package}), then make again."
            )
        subprocess.run(["apt-get", "update", "-q"], check=True)
        subprocess.run(["apt-get", "install", "-q", "-y", package], check=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(venv)], check=True)
    return venv / "bin" / "python"


def locked(package: str) -> str:
    match = re.search(rf"^{package}==(\S+)$", LOCK.read_text(), re.MULTILINE)
    if match is None:
        sys.exit(f"{LOCK.name} does not pin {package}: run `make lock` on a machine that has the environment.")
    return match.group(1)


def main(venv: Path) -> None:
    if sys.version_info < (3, 11):  # noqa: UP036 (this file runs before anything checks the version)
        sys.exit(f"Python {sys.version.split()[0]} is too old: use 3.11 or newer (make PYTHON=python3.11 …).")
    python = str(create(venv))
    # A wrong default of pip would show here: constraints hold for build environments too.
    pip = [python, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    environment = {**os.environ, "PIP_CONSTRAINT": str(LOCK)}

    def install(*arguments: str, check: bool = True) -> bool:
        done = subprocess.run([*pip, "install", "-q", *arguments], env=environment, check=False)
        if check and done.returncode:
            sys.exit(f"pip install {' '.join(arguments)} failed: see above; then make again.")
        return done.returncode == 0

    install(f"pip=={locked('pip')}", f"setuptools=={locked('setuptools')}")
    if not has_gpu():
        cpu_build = f"torch=={locked('torch')}+cpu"
        print(f"setup: no GPU here, looking for {cpu_build}", flush=True)
        # The lock pins torch without a build tag; a constraint 'torch==2.x' admits '2.x+cpu'.
        probe = subprocess.run(
            [*pip, "download", "-q", "--no-deps", "-d", str(venv / "wheels"), cpu_build],
            env=environment,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        if probe.returncode == 0:
            install("--find-links", str(venv / "wheels"), cpu_build)
            shutil.rmtree(venv / "wheels")
        else:
            print(
                "setup: pip sees no CPU build of torch, so the CUDA build comes (gigabytes). To avoid it, set "
                "PIP_EXTRA_INDEX_URL to PyTorch's CPU index (pytorch.org, 'Get started') and make again.",
                flush=True,
            )
    print("setup: installing the pinned packages", flush=True)
    install("--no-build-isolation", "--editable", str(ROOT))
    (venv / "ready").touch()
    print(f"setup: {python} is ready")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Write requirements.lock: every package of the environment, and the CUDA packages of torch, at one version each.

Usage: .venv/bin/python scripts/lock_packages.py requirements.lock   (`make lock`)
The lock is used as a constraints file (scripts/setup_venv.py): a machine installs only what it needs of it.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
HEADER = """# Every package at one version; a constraints file: what a machine does not need, it does not install
# (the nvidia-* packages come only with a CUDA build of torch). Written by `make lock`.
"""


def resolved(*arguments: str) -> dict[str, str]:
    """Name → version of what pip would install, without installing it."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.json"
        subprocess.run(
            [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--dry-run",
                "--ignore-installed",
                "--report",
                str(report),
                *arguments,
            ],
            check=True,
        )
        found = json.loads(report.read_text())["install"]
    return {item["metadata"]["name"].lower().replace("_", "-"): item["metadata"]["version"] for item in found}


def main(target: Path) -> None:
    packages = resolved("pip", "setuptools", str(ROOT))
    packages.pop("cce-linear-rnn")
    packages["torch"] = packages["torch"].split("+")[0]
    # The CUDA packages are found by ignoring local wheels and indexes, where a CPU build may be preferred.
    cuda = resolved(
        "--isolated", "--no-build-isolation", f"torch=={packages['torch']}", f"triton=={packages['triton']}"
    )
    for name, version in cuda.items():
        packages.setdefault(name, version)
    target.write_text(HEADER + "".join(f"{name}=={version}\n" for name, version in sorted(packages.items())))
    print(f"{target}: {len(packages)} packages")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

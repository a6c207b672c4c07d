"""Source `stdlib`: the source text of the running Python's own standard library, then of its installed packages.

Real text that every machine has, with no network. Files in sorted order, the library first, then packages one by one,
until enough bytes are gathered. Left out: empty files, repeated files, and the few that are not UTF-8 (tests of other
encodings).
"""

import hashlib
import os
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from training.data.corpus import Corpus

PACKAGE_FOLDERS = ("site-packages", "dist-packages")


def stdlib_corpus(at_least_bytes: int) -> Corpus:
    """The shortest run of files that holds `at_least_bytes` bytes (all files, if they hold less).

    A document's name is `stdlib/<path>` or `packages/<path>`, below the folders of `sysconfig.get_path`.
    """

    def read() -> Iterator[tuple[str, str]]:
        gathered, seen = 0, set()
        for name, path in python_files():
            content = path.read_bytes()
            digest = hashlib.sha256(content).digest()
            if digest in seen or not content.strip():
                continue
            try:
                text = content.decode()
            except UnicodeDecodeError:
                continue
            seen.add(digest)
            yield name, text
            gathered += len(content)
            if gathered >= at_least_bytes:
                return

    return Corpus(read)


def python_files() -> Iterator[tuple[str, Path]]:
    """(document name, path) of every .py file, in the order in which the corpus takes them."""
    packages = dict.fromkeys(Path(sysconfig.get_path(key)).resolve() for key in ("purelib", "platlib"))
    library = Path(sysconfig.get_path("stdlib")).resolve()
    seen = set()
    for prefix, root in (("stdlib", library), *(("packages", folder) for folder in packages)):
        for folder, folders, files in os.walk(root):
            folders[:] = sorted(name for name in folders if name not in PACKAGE_FOLDERS)
            for name in sorted(files):
                path = Path(folder, name)
                document = f"{prefix}/{path.relative_to(root).as_posix()}"
                if path.suffix == ".py" and path.is_file() and document not in seen:
                    seen.add(document)
                    yield document, path

"""Source `text`: local text files, .gz too, cut into documents."""

import glob
import gzip
from collections.abc import Iterable, Iterator
from pathlib import Path

from training.data.corpus import Corpus

LONGEST = 4  # a document without a paragraph border ends at this many times document_bytes, at the next line


def text_files(paths: str | list[str], setting: str) -> list[Path]:
    """The files that a path, a glob, or a list of them stands for, in the given order (a glob's are sorted), each once.

    Raises:
        FileNotFoundError: there is no such file. ValueError: a folder, or an empty file. Both name `setting`.
    """
    found: dict[Path, None] = {}
    for pattern in [paths] if isinstance(paths, str) else paths:
        path = Path(pattern).expanduser()
        matches = [path] if path.exists() else [Path(match) for match in sorted(glob.glob(str(path), recursive=True))]
        if not matches:
            raise FileNotFoundError(f"{setting}={pattern}: no such file; give a path, a glob or a list of them")
        for match in matches:
            if match.is_dir():
                if match == path:
                    raise ValueError(f"{setting}={pattern} is a folder: give its files, for example '{pattern}/*.txt'")
            elif match.stat().st_size == 0:
                raise ValueError(f"{setting}: {match} is empty; give a file with text")
            else:
                found[match] = None
    if not found:
        raise ValueError(f"{setting}={paths} names no file; give a path, a glob or a list of them")
    return list(found)


def text_corpus(files: list[Path], *, document_bytes: int, document_separator: str | None) -> Corpus:
    """Documents `<path>#<number>`; together the files' text, byte for byte, but for separators and blank documents.

    Without `document_separator` a document ends at the first blank line after `document_bytes` bytes; with it, at each
    line that equals it (the empty string: at each blank line).

    Raises:
        ValueError: a file is not UTF-8 text, or not gzip although its name ends in .gz.
    """

    def read() -> Iterator[tuple[str, str]]:
        for path in files:
            opened = gzip.open if path.suffix == ".gz" else open
            try:
                with opened(path, "rt", encoding="utf-8", newline="") as lines:
                    if document_separator is None:
                        documents = by_size(lines, document_bytes)
                    else:
                        documents = by_separator(lines, document_separator)
                    yield from ((f"{path}#{number}", text) for number, text in enumerate(documents) if text.strip())
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text ({error.reason}): convert it to UTF-8") from None
            except (gzip.BadGzipFile, EOFError) as error:
                raise ValueError(f"{path} is not a whole gzip file ({error}): pack it anew") from None

    return Corpus(read)


def by_size(lines: Iterable[str], document_bytes: int) -> Iterator[str]:
    gathered, size = [], 0
    for line in lines:
        gathered.append(line)
        size += len(line.encode())
        if size >= document_bytes and (not line.strip() or size >= LONGEST * document_bytes):
            yield "".join(gathered)
            gathered, size = [], 0
    yield "".join(gathered)


def by_separator(lines: Iterable[str], separator: str) -> Iterator[str]:
    gathered = []
    for line in lines:
        if line.strip() == separator.strip():
            yield "".join(gathered)
            gathered = []
        else:
            gathered.append(line)
    yield "".join(gathered)

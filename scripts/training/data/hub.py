"""Source `hub`: a data set of the Hugging Face hub, streamed once and kept as an Arrow data set in the cache.

Only the beginning that the settings ask for is downloaded; later runs read the copy and need no network.
"""

import itertools
import json
import logging
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import datasets
from huggingface_hub import HfApi

from training.data.cache import cache_key
from training.data.corpus import Corpus

log = logging.getLogger(__name__)

SECONDS_TO_ANSWER = 10
BYTES_PER_TOKEN_AT_MOST = 6  # how much text is fetched for max_tokens; the tokens are counted when there is a tokenizer
ORIGIN = "origin.json"


def hub_corpus(cfg: dict, split: str, cache_dir: Path) -> tuple[Corpus, dict]:
    """(documents, origin) of one split; origin: what was asked for, and the revision (commit) that the hub gave.

    Raises:
        ConnectionError: the hub cannot be reached or refuses. ValueError: no text column, or no text.
    """
    asked = ("path", "subset", "text_column", "document_start", "max_tokens", "max_documents")
    request = {"split": split, **{key: cfg[key] for key in asked}}
    folder = cache_dir / "hub" / f"{cfg['path'].replace('/', '--')}-{split}-{cache_key(**request)}"
    if not (folder / ORIGIN).is_file():
        download(request, folder)
    stored = datasets.load_from_disk(str(folder))

    def read() -> Iterator[tuple[str, str]]:
        for batch in stored.iter(batch_size=1000):
            yield from zip(batch["name"], batch["text"])

    return Corpus(read), json.loads((folder / ORIGIN).read_text())


def download(request: dict, folder: Path) -> None:
    """Stream the documents of a request into `folder`, which appears whole or not at all."""
    path, split, column = request["path"], request["split"], request["text_column"]
    partial = folder.with_name(f".{uuid.uuid4().hex[:8]}.partial")
    partial.mkdir(parents=True)
    try:
        with hub_errors(path):
            # Asked first, because it answers within seconds where the streaming reader would retry for minutes.
            revision = HfApi().dataset_info(path, timeout=SECONDS_TO_ANSWER).sha
            log.info("streaming %s, split %s, from the hub", path, split)
            rows = iter(datasets.load_dataset(path, request["subset"], split=split, streaming=True, revision=revision))
            row = next(rows, {column: ""})
        if column not in row:
            raise ValueError(f"data.text_column={column}: {path} has the columns {', '.join(row)}")
        found = documents(itertools.chain([row], rows), request)
        with hub_errors(path):
            first = list(itertools.islice(found, 1))
        if not first:
            raise ValueError(f"data.path={path}, split {split}: no text in column {column}; choose another split")
        with hub_errors(path):
            stored = datasets.Dataset.from_generator(
                lambda: itertools.chain(first, found),
                features=datasets.Features({"name": datasets.Value("string"), "text": datasets.Value("large_string")}),
                cache_dir=str(partial / "arrow"),
                fingerprint=cache_key(**request, revision=revision),  # given, because a stream cannot be hashed
            )
        stored.save_to_disk(str(partial / "whole"))
        origin = {**request, "revision": revision, "rows": len(stored)}
        (partial / "whole" / ORIGIN).write_text(json.dumps(origin, indent=1))
        try:
            os.replace(partial / "whole", folder)
        except OSError:
            if not (folder / ORIGIN).is_file():  # otherwise another process was faster, with the same documents
                raise
    finally:
        shutil.rmtree(partial)


@contextmanager
def hub_errors(path: str) -> Iterator[None]:
    """Whatever goes wrong between here and the hub becomes a ConnectionError of one line that names the alternative."""
    try:
        yield
    except Exception as error:  # of httpx, fsspec, pyarrow, datasets, …: they have no common class
        cause = error.__cause__ or error
        reason = (str(cause).strip().splitlines() or [""])[0][:200]
        raise ConnectionError(
            f"cannot read {path} from the Hugging Face hub ({type(cause).__name__}: {reason}): "
            "check the name and the network, or take local text: data=text data.train=<file>, or data=stdlib"
        ) from error


def documents(rows: Iterable[dict], request: dict) -> Iterator[dict]:
    """Documents {name, text} up to the request's limits. With `document_start`, rows are the lines of documents."""
    texts = (row[request["text_column"]] or "" for row in rows)
    if request["document_start"] is not None:
        texts = joined(texts, re.compile(request["document_start"]))
    size, most = 0, (request["max_tokens"] or float("inf")) * BYTES_PER_TOKEN_AT_MOST
    texts = itertools.islice((text for text in texts if text.strip()), request["max_documents"])
    for number, text in enumerate(texts):
        yield {"name": f"{request['path']}/{request['split']}#{number}", "text": text}
        size += len(text.encode())
        if size >= most:
            return


def joined(lines: Iterable[str], start: re.Pattern) -> Iterator[str]:
    """Lines put together to documents; one begins at each line that matches `start`. An empty row is a blank line."""
    gathered = []
    for line in lines:
        if start.match(line) and gathered:
            yield "".join(gathered)
            gathered = []
        gathered.append(line or "\n")
    if gathered:
        yield "".join(gathered)

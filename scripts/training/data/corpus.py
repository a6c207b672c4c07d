"""A corpus: named documents with their hashes, read again and again in the same order, and split by hash."""

import copy
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

from datasets import IterableDataset

# An estimate, for sizes that are needed before there are tokens. Python source: 3.3 at V = 4096, 3.95 at V = 32768.
BYTES_PER_TOKEN = 4.2


@dataclass(frozen=True)
class Document:
    name: str
    sha256: str  # of the text in UTF-8
    bytes: int


class Corpus:
    """Documents in a fixed order. `read` yields (name, text), and does so again at each call."""

    def __init__(self, read: Callable[[], Iterator[tuple[str, str]]]):
        self.read = read
        self.documents = [Document(name, *fingerprint(text)) for name, text in read()]

    def __iter__(self) -> Iterator[tuple[Document, str]]:
        """The documents with their text.

        Raises:
            RuntimeError: a text is no longer the one that was hashed.
        """
        wanted = {document.name: document for document in self.documents}
        for name, text in self.read():
            if (document := wanted.get(name)) is None:
                continue
            if fingerprint(text) != (document.sha256, document.bytes):
                raise RuntimeError(f"{name} has changed while it was read: start again")
            yield document, text

    @property
    def bytes(self) -> int:
        return sum(document.bytes for document in self.documents)

    def content_hash(self) -> str:
        """sha256 over the documents' hashes in their order."""
        return hashlib.sha256("\n".join(document.sha256 for document in self.documents).encode()).hexdigest()

    def subset(self, keep: Callable[[str], bool]) -> "Corpus":
        """The documents whose sha256 `keep` accepts."""
        part = copy.copy(self)
        part.documents = [document for document in self.documents if keep(document.sha256)]
        return part

    def dataset(self) -> IterableDataset:
        """Columns name, sha256, bytes, text. Read when it is iterated: no copy on the disk, no network."""
        return IterableDataset.from_generator(lambda: ({**asdict(document), "text": text} for document, text in self))


def fingerprint(text: str) -> tuple[str, int]:
    """(sha256, length) of the text in UTF-8."""
    encoded = text.encode()
    return hashlib.sha256(encoded).hexdigest(), len(encoded)


def share(sha256: str, purpose: str) -> float:
    """A number in [0, 1) that depends on the document's hash and the purpose alone: the same on every machine."""
    return int.from_bytes(hashlib.sha256(f"{purpose} {sha256}".encode()).digest()[:8]) / 2**64


def split(corpus: Corpus, *, valid_fraction: float, valid_tokens: int) -> tuple[Corpus, Corpus]:
    """(train, valid): a document is a validation document by its own hash, whatever else the corpus holds.

    About `valid_fraction` of the documents, fewer where that would be far more than `valid_tokens`, at least one.

    Raises:
        ValueError: the corpus is empty or has a single document.
    """
    hashes = sorted({document.sha256 for document in corpus.documents}, key=lambda sha256: share(sha256, "valid"))
    if len(hashes) < 2:
        raise ValueError(
            f"the corpus has {len(hashes)} document{'s' * (not hashes)}, and a validation split needs 2: "
            "give more text, smaller documents (data.document_bytes) or separate validation text (data.valid)"
        )
    fraction = min(valid_fraction, valid_tokens * BYTES_PER_TOKEN / corpus.bytes)
    valid = {sha256 for sha256 in hashes if share(sha256, "valid") < fraction} or {hashes[0]}
    if len(valid) == len(hashes):
        valid.remove(hashes[-1])
    return corpus.subset(lambda sha256: sha256 not in valid), corpus.subset(valid.__contains__)

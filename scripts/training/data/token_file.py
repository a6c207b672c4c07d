"""Tokens of a corpus as one flat file: written once per content and tokenizer, mapped into memory afterwards.

`<key>.bin` holds the ids (little-endian uint16, or uint32 for vocabularies above 65536), `<key>.json` what they are.
The JSON comes last: a file without it is of a run that was killed, and is written anew.

The stream is eod, document, eod, document, eod, …: an end-of-document token after each document, and one at the
beginning, so that the first token of the first document is predicted from something.
"""

import json
import logging
import time
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from training.data.cache import cache_key, whole_file
from training.data.corpus import Corpus
from training.data.tokenizer import end_of_document, tokenizer_hash, use_all_cores

log = logging.getLogger(__name__)

DOCUMENTS_AT_ONCE = 256


def token_file(
    corpus: Corpus, tokenizer: Tokenizer, *, max_tokens: int | None, cache_dir: Path
) -> tuple[np.ndarray, dict]:
    """(tokens, facts) of the corpus, up to `max_tokens` tokens.

    tokens: [n] uint16 or uint32, read-only memory map. facts: tokens (n), documents (how many are in it, the last
    perhaps in part), bytes (of those documents), dtype, file, tokenizer_sha256, content_sha256.
    """
    facts = {
        "content_sha256": corpus.content_hash(),
        "tokenizer_sha256": tokenizer_hash(tokenizer),
        "max_tokens": max_tokens,
        "dtype": "<u2" if max(tokenizer.get_vocab().values()) < 2**16 else "<u4",
        "form": 1,
    }
    key = cache_key(**facts)
    binary, sidecar = cache_dir / "tokens" / f"{key}.bin", cache_dir / "tokens" / f"{key}.json"
    found = stored_facts(binary, sidecar)
    if found is None:
        start = time.perf_counter()
        with whole_file(binary) as partial:
            facts |= write_tokens(partial, corpus, tokenizer, np.dtype(facts["dtype"]), max_tokens)
        with whole_file(sidecar) as partial:
            partial.write_text(json.dumps(facts, indent=1))
        seconds = time.perf_counter() - start
        log.info("wrote %d tokens of %d documents in %.1f s", facts["tokens"], facts["documents"], seconds)
        found = facts
    return np.memmap(binary, dtype=found["dtype"], mode="r"), {**found, "file": binary.name}


def stored_facts(binary: Path, sidecar: Path) -> dict | None:
    """The facts of a complete entry, else None."""
    try:
        facts = json.loads(sidecar.read_text())
        complete = binary.stat().st_size == facts["tokens"] * np.dtype(facts["dtype"]).itemsize
    except (OSError, ValueError, KeyError):
        return None
    return facts if complete else None


def write_tokens(path: Path, corpus: Corpus, tokenizer: Tokenizer, dtype: np.dtype, max_tokens: int | None) -> dict:
    eod = end_of_document(tokenizer)
    use_all_cores()

    def encode(batch: dict) -> dict:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        return {"tokens": [np.array([*encoding.ids, eod], dtype=dtype) for encoding in encodings]}

    # No num_proc: encode_batch_fast already uses every core, and processes would only add copies.
    rows = corpus.dataset().map(
        encode, batched=True, batch_size=DOCUMENTS_AT_ONCE, remove_columns=["name", "sha256", "text"]
    )
    count, documents, size = 1, 0, 0
    with path.open("wb") as file:
        np.array([eod], dtype=dtype).tofile(file)
        for row in rows:
            tokens = row["tokens"] if max_tokens is None else row["tokens"][: max_tokens - count]
            tokens.tofile(file)
            count, documents, size = count + len(tokens), documents + 1, size + row["bytes"]
            if max_tokens is not None and count >= max_tokens:
                break
    return {"tokens": count, "documents": documents, "bytes": size}

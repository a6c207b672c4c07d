"""From a data configuration to packed tokens: source, split, tokenizer, token files, and where everything came from."""

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
from omegaconf import DictConfig
from tokenizers import Tokenizer

from training.data.corpus import BYTES_PER_TOKEN, Corpus, split
from training.data.hub import hub_corpus
from training.data.packing import check_length, check_seed, check_token_ids
from training.data.settings import settings
from training.data.stdlib import stdlib_corpus
from training.data.synthetic import entropy, zipf_probabilities, zipf_tokens
from training.data.text import text_corpus, text_files
from training.data.token_file import token_file
from training.data.tokenizer import corpus_tokenizer, end_of_document, tokenizer_hash

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Data:
    """Packed tokens of a corpus.

    train, valid: [n] uint16 or uint32 (little-endian), one stream each; read-only maps of cache files.
    vocab_size: number of ids that the tokenizer has, at most the requested V.
    provenance: JSON-ready: source, content_sha256, tokenizer, vocab_size, train and valid (tokens, documents, bytes of
        text, cache file), documents (each with name, sha256, bytes, split).
    tokenizer: None for synthetic tokens.
    """

    train: np.ndarray
    valid: np.ndarray
    vocab_size: int
    provenance: dict
    tokenizer: Tokenizer | None


def load_data(
    data_cfg: DictConfig | Mapping, *, vocab_size: int, seq_len: int, seed: int, cache_dir: Path | str
) -> Data:
    """The corpus of `data_cfg` (configs/data) in tokens of a vocabulary of at most `vocab_size`; prepared once, cached.

    `seed` is for synthetic draws alone: which text trains and which validates depends on the text only.

    Raises:
        ValueError, FileNotFoundError: bad settings; an empty corpus; less than one window of `seq_len` + 1 tokens;
            a tokenizer with ids ≥ `vocab_size`. ConnectionError: the hub cannot be reached.
    """
    cfg, cache_dir = settings(data_cfg), Path(cache_dir)
    if vocab_size < 2 or seq_len < 1:
        raise ValueError(f"vocab_size={vocab_size}, seq_len={seq_len}: give at least 2 and 1")
    data = SOURCES[cfg["kind"]](cfg, vocab_size, seed, cache_dir)
    check_length(data.train, seq_len)
    for what, tokens in (("the training set", data.train), ("the validation set", data.valid)):
        check_token_ids(tokens, vocab_size, what)
    return data


def from_stdlib(cfg: dict, vocab_size: int, seed: int, cache_dir: Path) -> Data:
    """More files until there are enough tokens: how many bytes a token has is known only afterwards."""
    budget = cfg["min_tokens"] * BYTES_PER_TOKEN / (1 - cfg["valid_fraction"])
    while True:
        corpus = stdlib_corpus(int(budget))
        data = tokenized(cfg, *divided(corpus, cfg), vocab_size, cache_dir, {})
        if len(data.train) >= cfg["min_tokens"]:
            return data
        if corpus.bytes < budget:
            raise ValueError(
                f"data.min_tokens={cfg['min_tokens']}: Python's library and its installed packages hold "
                f"{len(data.train)} tokens; lower data.min_tokens, or take data=text"
            )
        log.info("%d of data.min_tokens=%d tokens: taking more files", len(data.train), cfg["min_tokens"])
        budget *= 1.25


def from_text(cfg: dict, vocab_size: int, seed: int, cache_dir: Path) -> Data:
    cut = {"document_bytes": cfg["document_bytes"], "document_separator": cfg["document_separator"]}
    train = text_corpus(text_files(cfg["train"], "data.train"), **cut)
    if cfg["valid"] is None:
        return tokenized(cfg, *divided(train, cfg), vocab_size, cache_dir, {})
    valid = text_corpus(text_files(cfg["valid"], "data.valid"), **cut)
    return tokenized(cfg, train, valid, None, vocab_size, cache_dir, {})


def from_hub(cfg: dict, vocab_size: int, seed: int, cache_dir: Path) -> Data:
    train, origin = hub_corpus(cfg, cfg["split"], cache_dir)
    if cfg["valid_split"] is None:
        return tokenized(cfg, *divided(train, cfg), vocab_size, cache_dir, {"hub": [origin]})
    valid, valid_origin = hub_corpus({**cfg, "max_tokens": None, "max_documents": None}, cfg["valid_split"], cache_dir)
    return tokenized(cfg, train, valid, None, vocab_size, cache_dir, {"hub": [origin, valid_origin]})


def from_synthetic(cfg: dict, vocab_size: int, seed: int, cache_dir: Path) -> Data:
    check_seed(seed)
    law = {"vocab_size": vocab_size, "exponent": cfg["exponent"]}
    train = zipf_tokens(cfg["train_tokens"], **law, seed=[seed, 0])
    valid = zipf_tokens(cfg["valid_tokens"], **law, seed=[seed, 1])
    facts = {
        "source": cfg,
        "seed": seed,
        "documents": [],
        "entropy_nats_per_token": entropy(zipf_probabilities(**law)),
        "vocab_size": vocab_size,
        "train": {"tokens": len(train)},
        "valid": {"tokens": len(valid)},
    }
    return Data(train, valid, vocab_size, facts, None)


SOURCES = {"stdlib": from_stdlib, "text": from_text, "hub": from_hub, "synthetic": from_synthetic}


def divided(corpus: Corpus, cfg: dict) -> tuple[Corpus, Corpus, int]:
    """(train, valid, bound on validation tokens) for `tokenized`. A given validation set is used whole instead."""
    check_not_empty(corpus, "training", cfg)
    return *split(corpus, valid_fraction=cfg["valid_fraction"], valid_tokens=cfg["valid_tokens"]), cfg["valid_tokens"]


def tokenized(
    cfg: dict, train: Corpus, valid: Corpus, valid_tokens: int | None, vocab_size: int, cache_dir: Path, origin: dict
) -> Data:
    check_not_empty(train, "training", cfg)
    check_not_empty(valid, "validation", cfg)
    tokenizer = corpus_tokenizer(cfg["tokenizer"], train, vocab_size, cache_dir)
    train_tokens, train_facts = token_file(train, tokenizer, max_tokens=cfg.get("max_tokens"), cache_dir=cache_dir)
    valid_part, valid_facts = token_file(valid, tokenizer, max_tokens=valid_tokens, cache_dir=cache_dir)
    size = max(tokenizer.get_vocab().values()) + 1
    used = [
        {**asdict(document), "split": name}
        for name, corpus, facts in (("train", train, train_facts), ("valid", valid, valid_facts))
        for document in corpus.documents[: facts["documents"]]
    ]
    facts = {
        "source": cfg,
        **origin,
        "content_sha256": {"train": train_facts["content_sha256"], "valid": valid_facts["content_sha256"]},
        "tokenizer": {
            "name": cfg["tokenizer"],
            "sha256": tokenizer_hash(tokenizer),
            "library": version("tokenizers"),
            "end_of_document": end_of_document(tokenizer),
        },
        "vocab_size": size,
        "train": {key: train_facts[key] for key in ("tokens", "documents", "bytes", "file")},
        "valid": {key: valid_facts[key] for key in ("tokens", "documents", "bytes", "file")},
        "documents": used,
    }
    return Data(train_tokens, valid_part, size, facts, tokenizer)


def check_not_empty(corpus: Corpus, what: str, cfg: dict) -> None:
    if not corpus.documents:
        raise ValueError(f"the {what} corpus of data.kind={cfg['kind']} is empty (no text in it): give other text")

"""Tokens: round trip, the token stream, the cache (hit, other content, half-written), pretrained tokenizers."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models

from training.data import load_data, token_file, tokenizer
from training.data.corpus import Corpus
from training.data.token_file import write_tokens
from training.data.tokenizer import END_OF_DOCUMENT, end_of_document, ready, train_bpe

TEXTS = [
    f"def function_{number}(argument):\n    return argument + {number}  # größer → 🙂 {END_OF_DOCUMENT}\n"
    for number in range(300)
]
CFG = {
    "kind": "text",
    "valid": None,
    "document_bytes": 20_000,
    "document_separator": "-----",
    "max_tokens": None,
    "valid_fraction": 0.1,
    "valid_tokens": 1_000_000,
    "tokenizer": "bpe",
}


def corpus_of(texts: list[str]) -> Corpus:
    return Corpus(lambda: ((f"#{number}", text) for number, text in enumerate(texts)))


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return ready(train_bpe(corpus_of(TEXTS), 400))


@pytest.fixture
def load(tmp_path):
    """load(texts, **changes) → Data, from a file with these documents and one cache."""

    def loaded(texts=TEXTS, vocab_size=400, **changes):
        path = tmp_path / "corpus.txt"
        path.write_text("-----\n".join(texts))
        cfg = {**CFG, "train": str(path), **changes}
        return load_data(cfg, vocab_size=vocab_size, seq_len=8, seed=1, cache_dir=tmp_path / "cache")

    return loaded


def cached(tmp_path: Path, pattern: str) -> list[Path]:
    return sorted((tmp_path / "cache").glob(pattern))


# The tokenizer


@settings(max_examples=200, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_round_trip(bpe, text):
    ids = bpe.encode(text, add_special_tokens=False).ids
    assert bpe.decode(ids, skip_special_tokens=False) == text
    assert end_of_document(bpe) not in ids


def test_the_spelling_of_the_end_of_document_token_is_text(bpe):
    for text in (END_OF_DOCUMENT, f"x{END_OF_DOCUMENT} y"):
        ids = bpe.encode(text).ids
        assert end_of_document(bpe) not in ids
        assert bpe.decode(ids, skip_special_tokens=True) == text


def test_vocabulary_is_as_large_as_asked_for_or_as_the_text_allows(bpe):
    assert bpe.get_vocab_size() == 400
    assert sorted(bpe.get_vocab().values()) == list(range(400))
    assert 257 < train_bpe(corpus_of(["abab abab"]), 5000).get_vocab_size() < 300


def test_training_is_deterministic(bpe):
    """The same in another process, with another hash seed and number of threads."""
    script = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "from test_data_tokens import TEXTS, corpus_of, train_bpe, tokenizer\n"
        "print(tokenizer.tokenizer_hash(train_bpe(corpus_of(TEXTS), 400)))"
    )
    tests = Path(__file__).parent
    other = subprocess.run(
        [sys.executable, "-c", script, str(tests), str(tests.parent / "scripts")],
        env={**os.environ, "PYTHONHASHSEED": "7", "RAYON_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert other.stdout.strip() == tokenizer.tokenizer_hash(bpe), other.stderr


def test_large_corpora_train_the_tokenizer_on_a_part(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(tokenizer, "TRAINING_BYTES", 5_000)
    monkeypatch.setattr(tokenizer, "train_bpe", lambda corpus, size: seen.append(corpus) or train_bpe(corpus, size))
    tokenizer.cached_bpe(corpus_of(TEXTS), 300, tmp_path)
    assert 2_500 < seen[0].bytes < 10_000


# The stream


def test_stream_is_documents_with_an_end_token_around_each(load):
    data = load()
    eod = end_of_document(data.tokenizer)
    for name, tokens in (("train", data.train), ("valid", data.valid)):
        assert tokens[0] == tokens[-1] == eod
        ends = np.flatnonzero(tokens == eod)
        texts = [
            data.tokenizer.decode(tokens[first + 1 : last].tolist(), skip_special_tokens=False)
            for first, last in zip(ends[:-1], ends[1:])
        ]
        assert len(texts) == data.provenance[name]["documents"]
        assert texts == [text for text in TEXTS if text in set(texts)]
        assert sum(len(text.encode()) for text in texts) == data.provenance[name]["bytes"]
    assert data.provenance["train"]["documents"] + data.provenance["valid"]["documents"] == len(TEXTS)


def test_stream_up_to_a_number_of_tokens(load):
    whole, part = load(), load(max_tokens=500)
    assert len(part.train) == 500
    assert np.array_equal(part.train, whole.train[:500])
    used = [document for document in part.provenance["documents"] if document["split"] == "train"]
    ends = np.flatnonzero(whole.train == end_of_document(whole.tokenizer))
    assert len(used) == part.provenance["train"]["documents"] == np.searchsorted(ends, 499)


@pytest.mark.parametrize("vocab_size, dtype", [(65_536, "<u2"), (65_537, "<u4")])
def test_ids_take_two_bytes_up_to_65536(tmp_path, vocab_size, dtype):
    vocab = {f"t{number}": number for number in range(vocab_size - 1)} | {END_OF_DOCUMENT: vocab_size - 1}
    words = Tokenizer(models.WordLevel(vocab, unk_token="t0"))
    tokens, facts = token_file.token_file(corpus_of(["t7"]), words, max_tokens=None, cache_dir=tmp_path)
    assert tokens.dtype == np.dtype(dtype) and facts["dtype"] == dtype
    assert tokens.tolist() == [vocab_size - 1, 7, vocab_size - 1]


# The cache


def test_second_time_nothing_is_trained_or_encoded(load, monkeypatch):
    first = load()

    def not_again(*arguments):
        raise AssertionError("worked again")

    monkeypatch.setattr(tokenizer, "train_bpe", not_again)
    monkeypatch.setattr(token_file, "write_tokens", not_again)
    second = load()
    assert np.array_equal(first.train, second.train) and np.array_equal(first.valid, second.valid)
    assert first.provenance == second.provenance
    for changed in ({"texts": TEXTS[:-1]}, {"vocab_size": 399}):
        with pytest.raises(AssertionError, match="worked again"):
            load(**changed)


def test_other_content_is_another_entry(load):
    before = load()
    after = load([*TEXTS[:-1], TEXTS[-1].replace("return", "yield")])
    assert before.provenance["content_sha256"] != after.provenance["content_sha256"]
    assert {before.provenance[name]["file"] for name in ("train", "valid")} != {
        after.provenance[name]["file"] for name in ("train", "valid")
    }
    text = after.tokenizer.decode(after.train.tolist() + after.valid.tolist())
    assert text.count("yield argument") == 1


def test_another_tokenizer_is_another_entry(load):
    one, two = load(), load(vocab_size=300)
    assert one.provenance["tokenizer"]["sha256"] != two.provenance["tokenizer"]["sha256"]
    assert one.provenance["train"]["file"] != two.provenance["train"]["file"]
    assert two.vocab_size == 300 and two.train.max() < 300


@pytest.mark.parametrize("damage", ["short tokens", "no tokens", "no sidecar", "half a sidecar", "left-over partials"])
def test_half_written_entries_are_written_anew(load, tmp_path, damage):
    whole = load().train.copy()
    for path in cached(tmp_path, "tokens/*.bin"):
        sidecar = path.with_suffix(".json")
        if damage == "short tokens":
            os.truncate(path, path.stat().st_size - 2)
        elif damage == "no tokens":
            path.unlink()
        elif damage == "no sidecar":
            sidecar.unlink()
            os.truncate(path, 10)
        elif damage == "half a sidecar":
            sidecar.write_text(sidecar.read_text()[:40])
            os.truncate(path, 10)
        else:
            path.rename(path.with_name(f".{path.name}.0.partial"))
            sidecar.rename(sidecar.with_name(f".{sidecar.name}.0.partial"))
    assert np.array_equal(load().train, whole)


def test_a_failure_in_the_middle_leaves_nothing(load, tmp_path, monkeypatch):
    def half(path, *arguments):
        write_tokens(path, *arguments)
        os.truncate(path, 100)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(token_file, "write_tokens", half)
        with pytest.raises(KeyboardInterrupt):
            load()
        assert list((tmp_path / "cache" / "tokens").iterdir()) == []
    assert len(load().train) > 1000


def test_tokens_cannot_be_overwritten(load):
    with pytest.raises(ValueError, match="read-only"):
        load().train[0] = 1


# Pretrained tokenizers


def test_pretrained_by_path(load, bpe, tmp_path):
    bpe.save(str(tmp_path / "tokenizer.json"))
    data = load(tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=5000)
    assert data.vocab_size == 400
    assert data.provenance["tokenizer"]["sha256"] == tokenizer.tokenizer_hash(bpe)
    assert cached(tmp_path, "tokenizers/*") == []


def test_pretrained_with_ids_outside_the_vocabulary(load, bpe, tmp_path):
    bpe.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="tokenizer.json has token ids up to 399, .* V is 399: set vocab_size=400"):
        load(tokenizer=str(tmp_path / "tokenizer.json"), vocab_size=399)


def test_pretrained_without_an_end_of_document_token(load, tmp_path):
    Tokenizer(models.WordLevel({"a": 0}, unk_token="a")).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match="no end-of-document token .looked for <|endoftext|>"):
        load(tokenizer=str(tmp_path / "tokenizer.json"))


def test_pretrained_truncation_and_added_tokens_are_off(load, bpe, tmp_path):
    cut = Tokenizer.from_str(bpe.to_str())
    cut.enable_truncation(3)
    cut.enable_padding(length=50)
    cut.save(str(tmp_path / "tokenizer.json"))
    plain = load(tokenizer="bpe").provenance["train"]["bytes"]
    data = load(tokenizer=str(tmp_path / "tokenizer.json"))
    decoded = data.tokenizer.decode(data.train.tolist(), skip_special_tokens=True)
    assert len(decoded.encode()) == plain


def test_pretrained_by_name(load, bpe, tmp_path, monkeypatch):
    bpe.save(str(tmp_path / "downloaded.json"))
    asked = []
    monkeypatch.setattr(tokenizer, "try_to_load_from_cache", lambda *arguments: None)
    monkeypatch.setattr(tokenizer.HfApi, "model_info", lambda self, name, timeout: asked.append((name, timeout)))
    monkeypatch.setattr(tokenizer, "hf_hub_download", lambda name, file: str(tmp_path / "downloaded.json"))
    assert load(tokenizer="someone/tokens").vocab_size == 400
    assert asked == [("someone/tokens", tokenizer.SECONDS_TO_ANSWER)]


def test_pretrained_from_an_unreachable_hub(load, monkeypatch):
    def down(self, name, timeout):
        raise OSError("Name or service not known\nmore")

    monkeypatch.setattr(tokenizer.HfApi, "model_info", down)
    with pytest.raises(
        ConnectionError, match="tokenizer someone/tokens .*not known.*take data.tokenizer=bpe"
    ) as caught:
        load(tokenizer="someone/tokens")
    assert "\n" not in str(caught.value)

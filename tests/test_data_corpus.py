"""Corpora: the standard library and local text as documents with true hashes, and their split."""

import gzip
import hashlib
import socket
import sysconfig
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from training.data import load, load_data, stdlib
from training.data.corpus import Corpus, share, split
from training.data.stdlib import stdlib_corpus
from training.data.text import by_separator, by_size, text_corpus, text_files

SPLIT = {"valid_fraction": 0.1, "valid_tokens": 5000}
STDLIB = {"kind": "stdlib", "min_tokens": 60_000, "tokenizer": "bpe", **SPLIT}
TEXT = {
    "kind": "text",
    "train": None,
    "valid": None,
    "document_bytes": 500,
    "document_separator": None,
    "max_tokens": None,
    "tokenizer": "bpe",
    **SPLIT,
}
OPTIONS = {"vocab_size": 400, "seq_len": 16, "seed": 1}


def corpus_of(texts: list[str]) -> Corpus:
    return Corpus(lambda: ((f"#{number}", text) for number, text in enumerate(texts)))


def prose(paragraphs: int, word: str = "word") -> str:
    return "".join(
        f"Paragraph {number} has {word}s: {' '.join([word] * (number % 7 + 3))}.\n\n" for number in range(paragraphs)
    )


@pytest.fixture
def no_network(monkeypatch):
    attempts = []

    def refuse(*arguments, **options):
        attempts.append(arguments)
        raise OSError("no network in this test")

    for name in ("getaddrinfo", "create_connection"):
        monkeypatch.setattr(socket, name, refuse)
    for name in ("connect", "connect_ex"):
        monkeypatch.setattr(socket.socket, name, refuse)
    return attempts


@pytest.fixture
def python_folders(tmp_path, monkeypatch):
    """A small Python of our own: a library folder with site-packages inside, as in a real one."""
    library = tmp_path / "lib"
    packages = library / "site-packages"
    files = {
        library / "b.py": b"b = 1\n" * 40,
        library / "a" / "z.py": b"z = 2\n" * 40,
        library / "notes.txt": b"no Python",
        library / "c.py": b"",
        library / "latin.py": "# café\n".encode("latin-1"),
        packages / "one" / "x.py": b"x = 3\n" * 40,
        packages / "one" / "copy_of_b.py": b"b = 1\n" * 40,
        packages / "two" / "y.py": "y = 'é'\r\n".encode() * 40,
    }
    for path, content in files.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    monkeypatch.setattr(sysconfig, "get_path", lambda key: str(library if key == "stdlib" else packages))


# stdlib


def test_stdlib_takes_the_library_then_packages_until_there_is_enough(python_folders):
    names = [document.name for document in stdlib_corpus(10**9).documents]
    # The copy of b.py, the empty, the Latin-1 and the text file are left out.
    assert names == ["stdlib/b.py", "stdlib/a/z.py", "packages/one/x.py", "packages/two/y.py"]
    assert [document.name for document in stdlib_corpus(240).documents] == names[:1]
    assert [document.name for document in stdlib_corpus(241).documents] == names[:2]
    assert [document.name for document in stdlib_corpus(500).documents] == names[:3]


def test_stdlib_provenance_matches_the_files(tmp_path, no_network):
    data = load_data(STDLIB, **OPTIONS, cache_dir=tmp_path)
    facts = data.provenance
    roots = {"stdlib": sysconfig.get_path("stdlib"), "packages": sysconfig.get_path("purelib")}
    assert len(facts["documents"]) == facts["train"]["documents"] + facts["valid"]["documents"] > 10
    for document in facts["documents"]:
        root, _, path = document["name"].partition("/")
        content = (Path(roots[root]) / path).read_bytes()
        assert hashlib.sha256(content).hexdigest() == document["sha256"]
        assert len(content) == document["bytes"]
        assert "site-packages" not in document["name"]
    for name in ("train", "valid"):
        hashes = [document["sha256"] for document in facts["documents"] if document["split"] == name]
        assert len(set(hashes)) == len(hashes) == facts[name]["documents"]
        if name == "train":  # the validation documents beyond valid_tokens are hashed, but not used
            assert facts["content_sha256"][name] == hashlib.sha256("\n".join(hashes).encode()).hexdigest()
    assert len(data.train) == facts["train"]["tokens"] >= 60_000
    assert 0 < len(data.valid) == facts["valid"]["tokens"] <= 5000
    assert data.vocab_size == facts["vocab_size"] == 400
    assert no_network == []


def test_stdlib_takes_more_files_when_the_estimate_was_short(tmp_path, monkeypatch):
    budgets = []
    monkeypatch.setattr(load, "BYTES_PER_TOKEN", 1.2)
    monkeypatch.setattr(load, "stdlib_corpus", lambda size: budgets.append(size) or stdlib_corpus(size))
    data = load_data({**STDLIB, "min_tokens": 20_000}, **OPTIONS, cache_dir=tmp_path)
    assert len(budgets) > 1 and budgets == sorted(budgets)
    assert len(data.train) >= 20_000


def test_stdlib_without_enough_text_says_how_much_there_is(tmp_path, python_folders):
    with pytest.raises(ValueError, match=r"data.min_tokens=60000: Python's library .* hold \d+ tokens; lower"):
        load_data(STDLIB, **OPTIONS, cache_dir=tmp_path)


def test_stdlib_without_any_text(tmp_path, monkeypatch):
    monkeypatch.setattr(stdlib, "python_files", lambda: iter(()))
    with pytest.raises(ValueError, match="the training corpus of data.kind=stdlib is empty"):
        load_data(STDLIB, **OPTIONS, cache_dir=tmp_path)


# text

lines = st.lists(st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\n\r")).map(lambda t: t + "\n"))


@settings(max_examples=80, deadline=None)
@given(lines, st.integers(1, 60))
def test_cutting_by_size_loses_nothing(lines, document_bytes):
    documents = list(by_size(lines, document_bytes))
    assert "".join(documents) == "".join(lines)
    longest = max((len(line.encode()) for line in lines), default=0)
    assert all(len(text.encode()) <= 4 * document_bytes + longest for text in documents)
    for text in documents[:-1]:
        last = text.splitlines(keepends=True)[-1] if not text.isspace() else text
        assert len(text.encode()) >= document_bytes
        assert not last.strip() or len(text.encode()) >= 4 * document_bytes


def test_cutting_by_separator():
    assert list(by_separator(["a\n", "\n", "b\n", "<|endoftext|>\n", "c\n"], "<|endoftext|>")) == ["a\n\nb\n", "c\n"]
    assert list(by_separator(["a\n", " \n", "b\n", "c"], "")) == ["a\n", "b\nc"]


def test_documents_of_plain_and_packed_files_are_their_bytes(tmp_path):
    plain, packed = tmp_path / "a.txt", tmp_path / "b.txt.gz"
    content = prose(60).replace("word", "wörd").encode()
    plain.write_bytes(content.replace(b"\n", b"\r\n"))
    packed.write_bytes(gzip.compress(content))
    corpus = text_corpus(text_files(str(tmp_path / "*"), "data.train"), document_bytes=500, document_separator=None)
    assert len(corpus.documents) > 8
    texts = {document.name: text for document, text in corpus}
    assert "".join(text for name, text in texts.items() if name.startswith(f"{plain}#")).encode() == plain.read_bytes()
    assert "".join(text for name, text in texts.items() if name.startswith(f"{packed}#")).encode() == content
    for document in corpus.documents:
        assert document.sha256 == hashlib.sha256(texts[document.name].encode()).hexdigest()
        assert document.bytes == len(texts[document.name].encode())


def test_files_in_the_given_order_each_once(tmp_path):
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name)
    given_paths = [str(tmp_path / "c.txt"), str(tmp_path / "*.txt"), str(tmp_path / "a.txt")]
    assert [path.name for path in text_files(given_paths, "data.train")] == ["c.txt", "a.txt", "b.txt"]


@pytest.mark.parametrize(
    "name, content, message",
    [
        ("a.txt", "café".encode("latin-1"), "a.txt is not UTF-8 text"),
        ("a.txt.gz", b"plain text", "a.txt.gz is not a whole gzip file"),
        ("a.txt.gz", gzip.compress(prose(90).encode())[:-20], "a.txt.gz is not a whole gzip file"),
        ("a.txt", b" \n\n \n", "the training corpus of data.kind=text is empty"),
        ("a.txt", b"short", "1 document, and a validation split needs 2"),
    ],
)
def test_text_that_cannot_be_used(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        load_data({**TEXT, "train": str(path)}, **OPTIONS, cache_dir=tmp_path / "cache")


def test_a_sequence_longer_than_the_corpus(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text(prose(30))
    with pytest.raises(ValueError, match=r"seq_len=100000 .*100001 tokens, the training set has \d+;"):
        load_data({**TEXT, "train": str(path)}, **{**OPTIONS, "seq_len": 100_000}, cache_dir=tmp_path)


def test_text_is_read_without_network(tmp_path, no_network):
    path = tmp_path / "a.txt"
    path.write_text(prose(300))
    load_data({**TEXT, "train": str(path)}, **OPTIONS, cache_dir=tmp_path)
    assert no_network == []
    with pytest.raises(OSError, match="no network"):
        socket.create_connection(("localhost", 9))
    assert len(no_network) == 1


def test_separate_validation_text_is_used_whole(tmp_path):
    train, valid = tmp_path / "train.txt", tmp_path / "valid.txt"
    train.write_text(prose(100))
    valid.write_text(prose(20, "other"))
    cfg = {**TEXT, "train": str(train), "valid": [str(valid)], "valid_tokens": 5}
    data = load_data(cfg, **OPTIONS, cache_dir=tmp_path / "cache")
    text = data.tokenizer.decode(data.valid.tolist(), skip_special_tokens=True)
    assert text == prose(20, "other")
    assert {Path(document["name"]).name.split(".")[0] for document in data.provenance["documents"]} == {
        "train",
        "valid",
    }


# split


def test_split_is_by_hash_and_stable_when_the_corpus_grows():
    texts = [f"document {number}" for number in range(4000)]
    wide = {"valid_fraction": 0.05, "valid_tokens": 10**9}
    train, valid = split(corpus_of(texts), **wide)
    hashes = [{document.sha256 for document in part.documents} for part in (train, valid)]
    assert not hashes[0] & hashes[1] and len(hashes[0] | hashes[1]) == 4000
    assert 150 < len(hashes[1]) < 250  # binomial: 200 ± 14
    chosen = [text for _, text in valid]
    assert chosen == [text for text in texts if text in set(chosen)]
    _, valid_of_half = split(corpus_of(texts[:2000]), **wide)
    assert {document.sha256 for document in valid_of_half.documents} <= hashes[1]


def test_split_is_bounded_by_tokens():
    texts = [f"{number:03} " * 1000 for number in range(500)]  # 2 MB
    _, valid = split(corpus_of(texts), valid_fraction=0.5, valid_tokens=10_000)
    assert 4_000 <= valid.bytes <= 120_000


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(st.characters(exclude_categories=["Cs"]), min_size=1), min_size=2), st.floats(1e-9, 1 - 1e-9))
def test_neither_part_is_empty_and_equal_texts_stay_together(texts, fraction):
    if len(set(texts)) < 2:
        with pytest.raises(ValueError, match="1 document, and a validation split needs 2"):
            split(corpus_of(texts), valid_fraction=fraction, valid_tokens=10**9)
        return
    train, valid = split(corpus_of(texts), valid_fraction=fraction, valid_tokens=10**9)
    parts = [[text for _, text in part] for part in (train, valid)]
    assert all(parts) and sorted(parts[0] + parts[1]) == sorted(texts)
    assert not set(parts[0]) & set(parts[1])


def test_share_is_uniform_and_differs_by_purpose():
    shares = [share(hashlib.sha256(b"%d" % number).hexdigest(), "valid") for number in range(2000)]
    assert abs(sum(shares) / 2000 - 0.5) < 4 * (1 / 12 / 2000) ** 0.5
    assert share("0" * 64, "valid") != share("0" * 64, "tokenizer")


def test_a_text_that_changes_while_it_is_read_is_noticed(tmp_path):
    texts = ["first", "second"]
    corpus = corpus_of(texts)
    texts[1] = "changed"
    with pytest.raises(RuntimeError, match="#1 has changed while it was read"):
        list(corpus)

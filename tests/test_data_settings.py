"""configs/data: every file is valid, and every wrong setting gives one line with the value and the fix."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from training.data import check_data, load_data
from training.data.settings import FIELDS, settings

CONFIGS = sorted((Path(__file__).parents[1] / "configs" / "data").glob("*.yaml"))


def config(name: str, **changes):
    cfg = OmegaConf.load(next(path for path in CONFIGS if path.stem == name))
    return OmegaConf.merge(cfg, changes)


@pytest.fixture
def corpus(tmp_path):
    path = tmp_path / "corpus.txt"
    path.write_text("one line of text\n")
    return str(path)


def test_the_five_sources_are_there():
    assert [path.stem for path in CONFIGS] == ["fineweb", "stdlib", "synthetic", "text", "wikitext103"]
    assert {OmegaConf.load(path).kind for path in CONFIGS} == set(FIELDS)


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_every_config_is_valid_and_says_what_it_is(path, corpus):
    cfg = OmegaConf.load(path)
    if cfg.kind == "text":
        cfg.train = corpus
    check_data(cfg)
    check_data(OmegaConf.to_container(cfg))
    assert path.read_text().startswith("# ")


def test_whole_numbers_may_be_written_as_floats():
    checked = settings(config("stdlib", min_tokens=1e6))
    assert checked["min_tokens"] == 1_000_000 and isinstance(checked["min_tokens"], int)


@pytest.mark.parametrize(
    "name, changes, message",
    [
        ("stdlib", {"kind": "wikipedia"}, "data.kind=wikipedia: choose one of stdlib, text, hub, synthetic"),
        ("stdlib", {"min_token": 3}, "data.min_token is no setting of data.kind=stdlib: it has min_tokens"),
        ("stdlib", {"min_tokens": 0}, "data.min_tokens=0: give a whole number, 1 or more"),
        ("stdlib", {"min_tokens": "8M"}, "data.min_tokens=8M: give a whole number"),
        ("stdlib", {"min_tokens": 1.5}, "data.min_tokens=1.5: give a whole number"),
        ("stdlib", {"min_tokens": None}, "data.min_tokens=None: give a whole number"),
        ("stdlib", {"min_tokens": True}, "data.min_tokens=True: give a whole number"),
        ("stdlib", {"valid_fraction": 1.0}, "data.valid_fraction=1.0: give a number between 0 and 1"),
        ("stdlib", {"valid_fraction": float("nan")}, "data.valid_fraction=nan: give a number between 0 and 1"),
        ("stdlib", {"valid_tokens": -1}, "data.valid_tokens=-1: give a whole number"),
        ("stdlib", {"tokenizer": "unigram"}, "data.tokenizer=unigram is no known kind of tokenizer: take bpe"),
        ("stdlib", {"tokenizer": "gpt 2"}, "data.tokenizer=gpt 2 is no known kind of tokenizer: take bpe"),
        ("stdlib", {"tokenizer": None}, "data.tokenizer=None: take bpe"),
        ("synthetic", {"exponent": -1}, "data.exponent=-1: give a number of 0 .uniform. or more"),
        ("synthetic", {"train_tokens": 1}, "data.train_tokens=1: give a whole number, 2 or more"),
        ("text", {"train": None}, "data.train=None: give the text to use, data.train=<file>"),
        ("text", {"train": []}, r"data.train=\[\]: give the text to use"),
        ("text", {"train": [1]}, r"data.train=\[1\]: give the text to use"),
        ("fineweb", {"path": ""}, "data.path=: give a name"),
        ("fineweb", {"max_tokens": 0}, "data.max_tokens=0: give a whole number"),
        ("wikitext103", {"document_start": "("}, r"data.document_start=\( is no regular expression"),
    ],
)
def test_wrong_settings(name, changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        check_data(config(name, **changes))
    assert "\n" not in str(caught.value)


def test_missing_setting():
    cfg = OmegaConf.to_container(config("stdlib"))
    del cfg["valid_tokens"]
    with pytest.raises(ValueError, match="data.valid_tokens is missing"):
        check_data(cfg)


def test_missing_files(tmp_path, corpus):
    for field in ("train", "valid"):
        for path in ("nowhere.txt", "*.nothing"):
            with pytest.raises(FileNotFoundError, match=f"data.{field}=.*no such file; give a path, a glob or a list"):
                check_data(config("text", **{"train": corpus, field: str(tmp_path / path)}))
    with pytest.raises(FileNotFoundError, match="data.tokenizer=nowhere.json: no such file"):
        check_data(config("stdlib", tokenizer="nowhere.json"))


def test_files_that_cannot_be_used(tmp_path, corpus):
    (tmp_path / "empty.txt").touch()
    with pytest.raises(ValueError, match="data.train: .*empty.txt is empty"):
        check_data(config("text", train=[corpus, str(tmp_path / "empty.txt")]))
    with pytest.raises(ValueError, match="data.train=.* is a folder: give its files"):
        check_data(config("text", train=str(tmp_path)))
    with pytest.raises(ValueError, match="data.tokenizer=.*corpus.json is not a tokenizer.json"):
        wrong = tmp_path / "corpus.json"
        wrong.write_text("{}")
        check_data(config("stdlib", tokenizer=str(wrong)))


def test_vocabulary_and_length_out_of_range(tmp_path, corpus):
    cfg = config("text", train=corpus, valid=corpus)
    with pytest.raises(ValueError, match="vocab_size=256 is too small for data.tokenizer=bpe, which needs 257"):
        load_data(cfg, vocab_size=256, seq_len=4, seed=1, cache_dir=tmp_path)
    with pytest.raises(ValueError, match="vocab_size=0, seq_len=4"):
        load_data(cfg, vocab_size=0, seq_len=4, seed=1, cache_dir=tmp_path)

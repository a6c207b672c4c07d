"""Data sets of the hub, with a hub that answers from memory: limits, articles, the copy in the cache, failures."""

import itertools
import socket
from pathlib import Path

import datasets
import numpy as np
import pytest
from omegaconf import OmegaConf

from training.data import hub, load_data

CONFIGS = Path(__file__).parents[1] / "configs" / "data"
ROWS = [{"text": f"Page {number}: {'some words ' * (number % 5 + 5)}\n", "url": "…"} for number in range(200)]
ARTICLES = [
    [f" = Title {number} = \n", "", " First paragraph = 1 .\n", " = = Section = = \n", f" Text {number} .\n", ""]
    for number in range(30)
]


class Hub:
    """Stands in for the hub: `load_dataset` streams `splits`, and every call is noted."""

    def __init__(self, splits: dict[str, list[dict]]):
        self.splits, self.calls, self.streamed, self.breaks_after = splits, [], 0, None

    def dataset_info(self, name: str, timeout: float):
        self.calls.append(("info", name))
        return type("Info", (), {"sha": "c0ffee"})

    def load_dataset(self, path, subset, *, split, streaming, revision):
        self.calls.append(("load", path, subset, split, revision))
        assert streaming

        def rows():
            for number, row in enumerate(self.splits[split]):
                if number == self.breaks_after:
                    raise OSError("connection reset\nby peer")
                self.streamed += 1
                yield row

        return datasets.IterableDataset.from_generator(rows)


@pytest.fixture
def hub_with(monkeypatch):
    def put(**splits):
        stand_in = Hub(splits)
        monkeypatch.setattr(hub.HfApi, "dataset_info", lambda self, name, timeout: stand_in.dataset_info(name, timeout))
        monkeypatch.setattr(hub.datasets, "load_dataset", stand_in.load_dataset)
        return stand_in

    return put


def load(name: str, cache_dir: Path, **changes):
    cfg = OmegaConf.merge(OmegaConf.load(CONFIGS / f"{name}.yaml"), {"valid_fraction": 0.1, **changes})
    return load_data(cfg, vocab_size=300, seq_len=8, seed=1, cache_dir=cache_dir)


def texts_of(data, tokens) -> list[str]:
    ends = np.flatnonzero(tokens == data.provenance["tokenizer"]["end_of_document"])
    return [data.tokenizer.decode(tokens[a + 1 : b].tolist()) for a, b in itertools.pairwise(ends)]


def test_fineweb_is_streamed_and_split(hub_with, tmp_path):
    stand_in = hub_with(train=ROWS)
    data = load("fineweb", tmp_path)
    assert stand_in.calls == [
        ("info", "HuggingFaceFW/fineweb"),
        ("load", "HuggingFaceFW/fineweb", "sample-10BT", "train", "c0ffee"),
    ]
    parts = texts_of(data, data.train), texts_of(data, data.valid)
    assert sorted(parts[0] + parts[1]) == sorted(row["text"] for row in ROWS) and all(parts)
    (origin,) = data.provenance["hub"]
    assert origin["revision"] == "c0ffee" and origin["rows"] == 200
    assert data.provenance["documents"][0]["name"].startswith("HuggingFaceFW/fineweb/train#")


def test_the_copy_needs_no_network(hub_with, tmp_path):
    stand_in = hub_with(train=ROWS)
    first = load("fineweb", tmp_path)
    calls = list(stand_in.calls)
    second = load("fineweb", tmp_path)
    assert stand_in.calls == calls
    assert np.array_equal(first.train, second.train) and first.provenance == second.provenance
    load("fineweb", tmp_path, max_documents=7)
    assert len(stand_in.calls) == 2 * len(calls)


def test_only_as_much_as_asked_for_is_streamed(hub_with, tmp_path):
    stand_in = hub_with(train=ROWS)
    data = load("fineweb", tmp_path / "a", max_documents=12)
    assert len(data.provenance["documents"]) == 12
    assert stand_in.streamed <= 14  # one row is looked at before, one after
    data = load("fineweb", tmp_path / "b", max_tokens=300)
    assert len(data.train) == 300
    assert stand_in.streamed < 60


def test_wikitext_rows_become_articles(hub_with, tmp_path):
    rows = [{"text": line} for article in ARTICLES for line in article]
    hub_with(train=[{"text": ""}, *rows], validation=rows[:18])
    data = load("wikitext103", tmp_path)
    whole = ["".join(line or "\n" for line in article) for article in ARTICLES]
    assert texts_of(data, data.train) == whole
    assert texts_of(data, data.valid) == whole[:3]
    assert [origin["split"] for origin in data.provenance["hub"]] == ["train", "validation"]


def test_unreachable_hub_says_so_in_one_line(tmp_path, monkeypatch):
    def no_name(*arguments, **options):
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", no_name)
    for name, path in (("wikitext103", "Salesforce/wikitext"), ("fineweb", "HuggingFaceFW/fineweb")):
        with pytest.raises(ConnectionError, match=f"cannot read {path} .*data=text data.train=<file>") as caught:
            load(name, tmp_path)
        assert "\n" not in str(caught.value)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


@pytest.mark.parametrize("rows", [0, 1, 150])
def test_a_stream_that_breaks_leaves_no_half_copy(hub_with, tmp_path, rows):
    stand_in = hub_with(train=ROWS)
    stand_in.breaks_after = rows
    with pytest.raises(ConnectionError, match="OSError: connection reset.: check the name and the network"):
        load("fineweb", tmp_path)
    assert stand_in.streamed == rows
    assert list((tmp_path / "hub").iterdir()) == []
    stand_in.breaks_after = None
    assert load("fineweb", tmp_path).provenance["hub"][0]["rows"] == 200


@pytest.mark.parametrize(
    "rows, changes, message",
    [
        ([], {}, "data.path=HuggingFaceFW/fineweb, split train: no text in column text; choose another split"),
        (ROWS, {"text_column": "body"}, "data.text_column=body: HuggingFaceFW/fineweb has the columns text, url"),
        ([{"text": " "}, {"text": None}], {}, "split train: no text in column text; choose another split"),
        (ROWS[:1], {}, "1 document, and a validation split needs 2"),
    ],
)
def test_data_sets_without_text(hub_with, tmp_path, rows, changes, message):
    hub_with(train=rows)
    with pytest.raises(ValueError, match=message):
        load("fineweb", tmp_path, **changes)


def test_a_split_that_does_not_exist(hub_with, tmp_path):
    hub_with(train=ROWS)
    with pytest.raises(ConnectionError, match="KeyError: 'test'"):
        load("fineweb", tmp_path, split="test")

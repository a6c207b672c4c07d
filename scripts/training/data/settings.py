"""The settings of configs/data and every check of them that costs nothing."""

import math
import re
from collections.abc import Callable, Mapping

from omegaconf import DictConfig, OmegaConf

from training.data.text import text_files
from training.data.tokenizer import names_a_file, pretrained

OTHER_TOKENIZER_KINDS = ("wordpiece", "unigram", "sentencepiece", "wordlevel", "word", "char", "byte", "tiktoken")


def check_data(data_cfg: DictConfig | Mapping) -> None:
    """Raise ValueError or FileNotFoundError, one line with the value and the fix, for settings that cannot work."""
    settings(data_cfg)


def settings(data_cfg: DictConfig | Mapping) -> dict:
    """The checked settings as a plain dict; whole numbers are int."""
    given = OmegaConf.to_container(data_cfg, resolve=True) if OmegaConf.is_config(data_cfg) else dict(data_cfg)
    kind = given.pop("kind", None)
    if kind not in FIELDS:
        raise ValueError(f"data.kind={kind}: choose one of {', '.join(FIELDS)}")
    fields = FIELDS[kind]
    if unknown := sorted(given.keys() - fields.keys()):
        raise ValueError(f"data.{unknown[0]} is no setting of data.kind={kind}: it has {', '.join(fields)}")
    if missing := sorted(fields.keys() - given.keys()):
        raise ValueError(f"data.{missing[0]} is missing: data.kind={kind} needs {', '.join(fields)}")
    return {"kind": kind, **{name: check(f"data.{name}", given[name]) for name, check in fields.items()}}


def whole(at_least: int) -> Callable:
    def check(name: str, value) -> int:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or value != int(value) or value < at_least:
            raise ValueError(f"{name}={value}: give a whole number, {at_least} or more")
        return int(value)

    return check


def optional(check: Callable) -> Callable:
    return lambda name, value: None if value is None else check(name, value)


def number(allowed: Callable[[float], bool], range_: str) -> Callable:
    def check(name: str, value) -> float:
        numeric = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not numeric or not math.isfinite(value) or not allowed(value):
            raise ValueError(f"{name}={value}: give a number {range_}")
        return float(value)

    return check


def string(name: str, value) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{name}={value}: give a string")
    return value


def word(name: str, value) -> str:
    if not isinstance(value, str) or not value.strip():
        raise ValueError(f"{name}={value}: give a name")
    return value


def pattern(name: str, value) -> str:
    try:
        re.compile(string(name, value))
    except re.error as error:
        raise ValueError(f"{name}={value} is no regular expression: {error}") from None
    return value


def files(name: str, value) -> list[str]:
    if not value or not isinstance(value, (str, list)) or not all(isinstance(path, str) and path for path in value):
        raise ValueError(f"{name}={value}: give the text to use, {name}=<file>, a glob, or a list of them")
    text_files(value, name)
    return value


def tokenizer(name: str, value) -> str:
    """ "bpe", the path of a tokenizer.json, or a name on the hub: [organization/]model."""
    choices = "take bpe, the path of a tokenizer.json, or the name of a model on the hub"
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={value}: {choices}")
    on_hub = re.fullmatch(r"[\w.-]+(/[\w.-]+)?", value)
    if value.lower() in OTHER_TOKENIZER_KINDS or not (names_a_file(value) or on_hub):
        raise ValueError(f"{name}={value} is no known kind of tokenizer: {choices}")
    if names_a_file(value):
        pretrained(value)
    return value


positive, positive_or_all = whole(1), optional(whole(1))
SPLIT = {"valid_fraction": number(lambda value: 0 < value < 1, "between 0 and 1"), "valid_tokens": whole(1)}
FIELDS: dict[str, dict[str, Callable]] = {
    "stdlib": {"min_tokens": positive, **SPLIT, "tokenizer": tokenizer},
    "text": {
        "train": files,
        "valid": optional(files),
        "document_bytes": positive,
        "document_separator": optional(string),
        "max_tokens": positive_or_all,
        **SPLIT,
        "tokenizer": tokenizer,
    },
    "hub": {
        "path": word,
        "subset": optional(word),
        "split": word,
        "valid_split": optional(word),
        "text_column": word,
        "document_start": optional(pattern),
        "max_tokens": positive_or_all,
        "max_documents": positive_or_all,
        **SPLIT,
        "tokenizer": tokenizer,
    },
    "synthetic": {
        "train_tokens": whole(2),
        "valid_tokens": whole(2),
        "exponent": number(lambda value: value >= 0, "of 0 (uniform) or more"),
    },
}

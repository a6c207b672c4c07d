"""Tokenizers: byte-level BPE trained on the corpus, or a pretrained one by file or hub name (library `tokenizers`).

The end-of-document token stands between documents. Its spelling inside a text is plain text, never the token itself.
"""

import hashlib
import logging
import os
import time
from pathlib import Path

import tokenizers
from huggingface_hub import HfApi, hf_hub_download, try_to_load_from_cache
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from training.data.cache import cache_key, whole_file
from training.data.corpus import Corpus, share

log = logging.getLogger(__name__)

END_OF_DOCUMENT = "<|endoftext|>"
# What pretrained tokenizers call it, by preference: GPT-2 and GPT-NeoX, Llama 3, Llama 2 and T5, Gemma, Qwen, BERT.
END_OF_DOCUMENT_NAMES = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>", "[SEP]")
SMALLEST_VOCABULARY = 257  # every byte and the end-of-document token: any text can be encoded
TRAINING_BYTES = 16_000_000  # of text, at most, for the merges: more changes the tokens per byte by less than 1 %
SECONDS_TO_ANSWER = 10


def corpus_tokenizer(name: str, corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """The tokenizer that data.tokenizer=`name` means: "bpe", or a pretrained one.

    Raises:
        ValueError: it has more tokens than `vocab_size`, or vocab_size < 257 for "bpe".
        FileNotFoundError, ConnectionError: there is no such file, or the hub cannot be reached.
    """
    tokenizer = cached_bpe(corpus, vocab_size, cache_dir) if name == "bpe" else pretrained(name)
    highest = max(tokenizer.get_vocab().values())
    if highest >= vocab_size:
        raise ValueError(
            f"data.tokenizer={name} has token ids up to {highest}, but the model's vocabulary V is {vocab_size}: "
            f"set vocab_size={highest + 1} or more, or data.tokenizer=bpe"
        )
    return ready(tokenizer)


def ready(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.encode_special_tokens = True  # "<|endoftext|>" in a text is these 13 characters
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer


def end_of_document(tokenizer: Tokenizer) -> int:
    """Id of the token that ends a document."""
    for name in END_OF_DOCUMENT_NAMES:
        if (number := tokenizer.token_to_id(name)) is not None:
            return number
    raise ValueError(
        f"the tokenizer has no end-of-document token (looked for {' '.join(END_OF_DOCUMENT_NAMES)}): "
        "add one to its tokenizer.json, or take data.tokenizer=bpe"
    )


def tokenizer_hash(tokenizer: Tokenizer) -> str:
    return hashlib.sha256(tokenizer.to_str().encode()).hexdigest()


def cached_bpe(corpus: Corpus, vocab_size: int, cache_dir: Path) -> Tokenizer:
    """The BPE of this text at this size: from the cache, or trained and put there.

    Trained on at most TRAINING_BYTES of the corpus, a choice of documents by their hash.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(
            f"vocab_size={vocab_size} is too small for data.tokenizer=bpe, which needs {SMALLEST_VOCABULARY} "
            "(every byte and the end-of-document token): raise vocab_size"
        )
    part = corpus
    if corpus.bytes > TRAINING_BYTES:
        fraction = TRAINING_BYTES / corpus.bytes
        part = corpus.subset(lambda sha256: share(sha256, "tokenizer") < fraction)
    key = cache_key(text=part.content_hash(), vocab_size=vocab_size, tokenizers=tokenizers.__version__, form=1)
    path = cache_dir / "tokenizers" / f"bpe-{vocab_size}-{key}.json"
    if not path.is_file():
        start = time.perf_counter()
        trained = train_bpe(part, vocab_size)
        with whole_file(path) as partial:
            trained.save(str(partial))
        log.info("trained a BPE of %d tokens in %.1f s", trained.get_vocab_size(), time.perf_counter() - start)
    return Tokenizer.from_file(str(path))


def train_bpe(corpus: Corpus, vocab_size: int) -> Tokenizer:
    """BPE (Sennrich et al. 2016) over bytes, words split like GPT-2's. decode(encode(text)) == text for any text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    use_all_cores()
    tokenizer.train_from_iterator((text for _, text in corpus), trainer)
    return tokenizer


def pretrained(name: str) -> Tokenizer:
    """A tokenizer.json by its path, or the one of a model on the hub (from the hub's local cache, if it is there)."""
    path = Path(name).expanduser()
    if not path.is_file():
        if names_a_file(name):
            raise FileNotFoundError(f"data.tokenizer={name}: no such file; give a tokenizer.json, a hub name, or bpe")
        path = try_to_load_from_cache(name, "tokenizer.json")
        if not isinstance(path, str):
            path = from_hub(name)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises plain Exception
        raise ValueError(f"data.tokenizer={name} is not a tokenizer.json of the library tokenizers: {error}") from None


def names_a_file(name: str) -> bool:
    return name.endswith(".json") or name.startswith(("/", "./", "../", "~"))


def from_hub(name: str) -> str:
    try:
        HfApi().model_info(name, timeout=SECONDS_TO_ANSWER)  # answers at once where the download would retry
        return hf_hub_download(name, "tokenizer.json")
    except Exception as error:
        reason = (str(error).strip().splitlines() or [""])[0][:200]
        raise ConnectionError(
            f"cannot read the tokenizer {name} from the Hugging Face hub ({type(error).__name__}: {reason}): "
            "check the name and the network, give the path of a tokenizer.json, or take data.tokenizer=bpe"
        ) from error


def use_all_cores() -> None:
    """The library's own threads encode a batch. Said aloud, or a later fork prints a warning and turns them off."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

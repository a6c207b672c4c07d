"""Data: documents from a source (configs/data), packed into one stream of tokens, served as windows of T tokens.

    check_data(cfg.data)  # cheap; raises for bad settings
    data = load_data(cfg.data, vocab_size=V, seq_len=T, seed=1, cache_dir=".cache")
    batches = PackedBatches(data.train, seq_len=T, batch_size=B, seed=1)  # endless; state_dict() keeps the position
    for inputs, targets in evaluation_batches(data.valid, seq_len=T, batch_size=B): ...

A source (stdlib.py, text.py, hub.py) gives a Corpus (corpus.py): named documents, each with its hash. tokenizer.py
trains or loads a tokenizer, token_file.py writes the tokens once per content, packing.py cuts windows; synthetic.py
draws tokens from Zipf's law.
"""

from training.data.load import Data, load_data
from training.data.packing import IGNORE_INDEX, PackedBatches, evaluation_batches
from training.data.settings import check_data

__all__ = ["IGNORE_INDEX", "Data", "PackedBatches", "check_data", "evaluation_batches", "load_data"]

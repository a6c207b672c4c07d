"""Cut cross-entropy: the loss of a linear classifier over a large vocabulary without the N x V logits.

The public contract is apple/ml-cross-entropy 25.6.4's; what differs from it is in README.md ("Switching from ...").
Importing this package needs neither Triton nor a GPU.
"""

from cce.contract import LinearCrossEntropy, linear_cross_entropy
from cce.presets import LinearCrossEntropyImpl
from cce.vocab_parallel import VocabParallelOptions

__all__ = ["LinearCrossEntropy", "LinearCrossEntropyImpl", "VocabParallelOptions", "linear_cross_entropy"]

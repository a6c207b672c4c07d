"""The kernels over tiles of logits for NVIDIA's Hopper, with specialized warps (Gluon, Triton's lower level).

A program walks tiles of 128 tokens x 256 classes, one program on a multiprocessor. A producer warp has the tensor memory
accelerator bring the operands, 64 hidden entries a step, as many steps ahead as shared memory has stages, across tiles. Two groups
of four warps consume them, each for 64 of the tokens: wgmma into fp32 accumulators, the epilogue (cce/kernels/epilogues.py), and
stores that nobody waits for until their buffer is needed again. Barriers complete in alternating phases 0 and 1: `full` of a
stage when its bytes have come, `empty` when both groups have read it.

Up to KEPT_HIDDEN hidden entries a program keeps its tokens' rows in shared memory for all tiles of an item. Where it also stores
a number per logit, the epilogue is then as long as the products: tiles are 128 x 128, and a group begins the products of its
next tile before the epilogue of this one, in other registers. Where nothing is stored, registers have room for a second product,
of what the epilogue makes (streaming.py).
"""

from cce.kernels.hopper.exponentials import exponentials
from cce.kernels.hopper.hidden_product import hidden_product
from cce.kernels.hopper.log_sum_exp import log_sum_exp
from cce.kernels.hopper.logit_gradient import logit_gradient
from cce.kernels.hopper.vocabulary_gradient import vocabulary_gradient

__all__ = ["exponentials", "hidden_product", "log_sum_exp", "logit_gradient", "vocabulary_gradient"]

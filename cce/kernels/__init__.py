"""The Triton path: forward_parts and backward_parts with the meaning of those in cce/blockwise.py (bf16, fp16, fp32), and one_pass.

Imports Triton, so it is imported only when a tensor takes this path. Under TRITON_INTERPRET=1 (set before this import)
the kernels run on CPU tensors.
"""

from cce.kernels.backward import backward_parts
from cce.kernels.finishing import scale_in_place
from cce.kernels.forward import forward_parts
from cce.kernels.one_pass import one_pass

__all__ = ["backward_parts", "forward_parts", "one_pass", "scale_in_place"]

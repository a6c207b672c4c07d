"""The stacks: FLA's GLA, GatedDeltaNet and KDA, transformers' Llama, and the loss heads.

Importing this package readies FLA: tuned kernel configurations for the GPU, if this repository ships some, and PyTorch
forms of FLA's operations for tensors on the CPU.
"""

import warnings

from models.tuned import use_tuned_kernels

# FLA says on import that there is no GPU. Its kernels are not what runs then: models/cpu_backend is.
warnings.filterwarnings("ignore", message="Triton is not supported on current platform", category=UserWarning)
use_tuned_kernels()  # fixed once FLA is imported

from models import cpu_backend  # noqa: E402, F401
from models.build import build_model, check_model, classifier, final_hidden  # noqa: E402
from models.flops import flops_per_token  # noqa: E402

__all__ = ["build_model", "check_model", "classifier", "final_hidden", "flops_per_token"]

"""Random weights drawn on all cores: the same for a seed on every machine, and a large model in seconds.

Constructors draw most weights two or three times (PyTorch's default, then the library's scheme), on one core, from one
stream: tens of seconds for 1.8 B parameters. Here the fills of large tensors wait: a later fill of the same tensor
replaces an earlier one, any other use of it draws it first, and at the end the pending ones are drawn on all cores.
Each fill has its own generator, seeded from torch's default CPU generator, so neither cores nor their order matter.
"""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

FILLS = (torch.ops.aten.normal_.default, torch.ops.aten.uniform_.default)
LARGE = 2**16  # elements; smaller tensors are drawn at once, from the default generator


class LateFills(TorchDispatchMode):
    """While active, `normal_` and `uniform_` of whole large tensors on the CPU are written down instead of done."""

    def __init__(self):
        super().__init__()
        self.pending: dict[int, tuple] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in FILLS and can_wait(args[0]) and kwargs.get("generator") is None:
            seed = torch.randint(2**62, ()).item()
            self.pending[storage(args[0])] = (func, args, seed)
            return args[0]
        if func is not torch.ops.aten.detach.default:  # an alias; what is done with it comes by here
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and x.device.type == "cpu" and storage(x) in self.pending:
                    draw(*self.pending.pop(storage(x)))
        return func(*args, **kwargs)


def built_with_late_fills(build: Callable[[], nn.Module]) -> nn.Module:
    """Call `build` and draw the large weights of the model that it returns on all cores."""
    with LateFills() as fills:
        model = build()
    wanted = {storage(p) for p in (*model.parameters(), *model.buffers())}
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        # list: an exception in a thread is raised here
        list(threads.map(lambda key: draw(*fills.pending[key]), [key for key in fills.pending if key in wanted]))
    return model


def can_wait(x: Tensor) -> bool:
    return (
        x.device.type == "cpu" and x.numel() >= LARGE and x.numel() * x.element_size() == x.untyped_storage().nbytes()
    )


def storage(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()


def draw(func, args, seed: int) -> None:
    with torch.no_grad():
        func(*args, generator=torch.Generator().manual_seed(seed))

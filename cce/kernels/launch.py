"""Launches in a loop, past Triton's look at every argument."""

import triton

from cce.kernels.logits import interpreting


class Launches:
    """Launches kernels for one loop. A kernel's first launch goes through Triton, which looks at every argument to choose a
    compilation; the following ones, with the same grid and numbers, take that compilation. Tensors may differ as long as their
    alignment to 16 bytes does not.
    """

    def __init__(self):
        self.compiled = {}

    def __call__(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], arguments: tuple, constants: dict, **options: int
    ) -> None:
        """kernel[grid](*arguments, **constants, **options); constants in the order of the kernel's signature, after the rest."""
        numbers = tuple(argument for argument in arguments if isinstance(argument, (int, float)))
        key = (kernel, grid, numbers)
        compiled = self.compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1, 1)[:3]](*arguments, *constants.values())
            return
        compiled = kernel[grid](*arguments, **constants, **options)
        if not interpreting():
            self.compiled[key] = compiled

"""One kernel launched many times, past Triton's look at every argument."""

from collections.abc import Callable

import triton

from cce.tiles import interpreting


class Launch:
    """A kernel with all its arguments but the last, a whole number, which each launch names.

    The first launch goes through Triton, which chooses a compilation by the arguments; later ones take it as it is where the number
    is a multiple of 16, as chunks and slices are.
    """

    def __init__(
        self, kernel: triton.JITFunction, grid: tuple[int, ...], arguments: tuple, constants: dict, **options: int
    ):
        """constants: in the order of the kernel's signature, behind the number."""
        self.kernel, self.grid, self.arguments = kernel, grid, arguments
        self.constants, self.options = constants, options
        self.compiled = None

    def __call__(self, number: int) -> None:
        if self.compiled is not None and number % 16 == 0:
            self.compiled[(*self.grid, 1, 1)[:3]](*self.arguments, number, *self.constants.values())
            return
        compiled = self.kernel[self.grid](*self.arguments, number, **self.constants, **self.options)
        if not interpreting() and number % 16 == 0:
            self.compiled = compiled


def in_chunks(tokens: int, chunk: int, steps: Callable[[int], Callable[[int], None]]) -> None:
    """steps(n)(first) for each chunk of n tokens from `first` on. steps(n), what depends on n alone, is called once for each n:
    small models wait for the host."""
    step, rest = steps(chunk), tokens % chunk
    for first in range(0, tokens - rest, chunk):
        step(first)
    if rest:
        steps(rest)(tokens - rest)

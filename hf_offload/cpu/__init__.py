"""CPU kernels (Numba) over the host pool, and the threads that run them."""

from .isa import choose_isa

choose_isa()

"""CPU kernels over the host pool (Numba), one subject a module; each launcher returns a `launch.Launch`."""

from .isa import choose_isa

choose_isa()

"""Reference implementations that kernels are tested against, in plain torch and float64."""

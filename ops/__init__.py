"""Numeric kernels of the engine; each has a reference in plain PyTorch."""

"""The operations of a model: `ops` chooses plain PyTorch, torch's own kernels, or the C kernels of `native`."""

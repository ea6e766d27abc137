"""The operations of a model, each with one signature and, where it pays, several implementations.

Offers: `ops`, one function an operation, which chooses the implementation; `build.library` and
`build.describe`, whether there are C kernels here.
`native` calls the C kernels (`kernels.c`) from autograd, for `ops` alone.
Depends on no text and no run. Everything works without a C compiler, in plain PyTorch.
"""

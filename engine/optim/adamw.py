"""AdamW without the import of torch._dynamo, which takes one to three seconds of every start."""

import inspect

import torch


class AdamW(torch.optim.AdamW):
    """torch's AdamW (Loshchilov and Hutter, 2019), whose `step` is not wrapped for torch.compile."""

    @torch.no_grad()
    def step(self, closure=None):
        return inspect.unwrap(torch.optim.Adam.step)(self, closure)


for _name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
    # At their first call torch wraps these in `torch._dynamo.disable`, which imports torch._dynamo,
    # unless this attribute holds the result already (torch/_compile.py). If a later torch ignores it,
    # the seconds come back, and nothing else changes.
    _plain = inspect.unwrap(getattr(torch.optim.Optimizer, _name))
    setattr(_plain, "__dynamo_disable", _plain)

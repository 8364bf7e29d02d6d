"""What a short name of a class means."""

import gc

import torch

from lightning_rl.config.hints import class_names


def test_a_librarys_class_does_not_take_the_name_of_torchs():
    """As bitsandbytes' optimizers would, from the moment that something imports them."""
    kind = type("SGD", (torch.optim.Optimizer,), {"__module__": "another.optim"})
    own = type("Shampoo", (torch.optim.Optimizer,), {"__module__": "another.optim"})
    assert class_names([torch.optim.Optimizer])["SGD"] is torch.optim.SGD
    assert class_names([torch.optim.Optimizer])["Shampoo"] is own
    del kind, own
    gc.collect()  # or other tests would know them

"""Test what a short name of a class means."""

import gc

import torch
from lightning.pytorch.cli import OptimizerCallable

from lightning_rl.config.hints import accepts, class_names, parse


def test_a_librarys_class_does_not_take_the_name_of_torchs():
    """Optimizers of bitsandbytes would, from the moment that something imports them."""
    kind = type("SGD", (torch.optim.Optimizer,), {"__module__": "another.optim"})
    own = type("Shampoo", (torch.optim.Optimizer,), {"__module__": "another.optim"})
    assert class_names([torch.optim.Optimizer])["SGD"] is torch.optim.SGD
    assert class_names([torch.optim.Optimizer])["Shampoo"] is own
    weight = torch.nn.Parameter(torch.zeros(1))
    for value in ("SGD", {"class_path": "SGD"}, {"class_path": "SGD", "init_args": {"lr": 0.5}}):
        assert accepts(OptimizerCallable, value)
        assert type(parse(OptimizerCallable, value)([weight])) is torch.optim.SGD
    del kind, own
    gc.collect()  # or other tests would know them

"""Test the cache of rows that are written side by side, as models of transformers use it."""

import torch
from torch import nn
from transformers import DynamicCache

from lightning_rl.engines.hf.kv_cache import Columns, as_argument


def test_what_else_a_model_tells_its_cache_changes_nothing():
    """transformers 5.24 hands over all arguments of a layer, by the name ``kwargs``."""
    first, second = torch.arange(12.0).reshape(1, 2, 3, 2), -torch.ones(1, 2, 1, 2)
    layer = Columns.of(first, 2 * first)
    keys, values = layer.update(second, 2 * second, kwargs={"position_ids": None})
    assert torch.equal(keys, torch.cat([first, second], 2))
    assert torch.equal(values, 2 * keys)
    assert layer.get_seq_length() == 4


def test_a_model_is_given_its_cache_by_the_name_that_it_has_for_it():
    class Newer(nn.Module):
        def forward(self, input_ids, cache=None): ...

    class Older(nn.Module):
        def forward(self, input_ids, past_key_values=None): ...

    kept = DynamicCache()
    assert as_argument(kept, Newer()) == {"cache": kept}
    assert as_argument(kept, Older()) == {"past_key_values": kept}

"""Test what a checkpoint in the background keeps of a device."""

import torch

from lightning_rl.run.host_memory import in_host_memory
from tests.support.pretended import DEVICE


def test_a_copy_of_a_pretended_device_is_on_the_host():
    weight = torch.arange(3.0, device=DEVICE)
    copied = in_host_memory({"a": weight, "b": [weight]})
    assert copied["a"].device.type == "cpu"
    assert copied["a"].tolist() == [0, 1, 2]
    assert copied["b"][0] is copied["a"]

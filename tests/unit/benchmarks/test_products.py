"""Test the matrix products of an iteration, counted and by hand."""

from collections import Counter

import torch
import torch.nn.functional as F
from torch import nn
from transformers import Qwen2Config

from benchmarks.products import (
    ATTENTION,
    BACKWARD,
    BODY,
    FORWARD,
    HEAD,
    READ,
    WRITE,
    Counted,
    floor_of,
    table,
)
from lightning_rl.rollout import Prompt, Rollout, Row


def test_products_are_counted_where_they_are_made():
    body, head = nn.Linear(4, 4, bias=False), nn.Linear(4, 7, bias=False)
    found: Counter[tuple[str, str]] = Counter()
    with Counted(found, FORWARD, {4, 7}):
        head(body(torch.ones(3, 4))).sum().backward()
    assert found == {
        (FORWARD, BODY): 2 * 3 * 4 * 4,
        (FORWARD, HEAD): 2 * 3 * 4 * 7,
        (BACKWARD, BODY): 2 * 3 * 4 * 4,  # of the weights alone: the input learns nothing
        (BACKWARD, HEAD): 2 * 2 * 3 * 4 * 7,
    }


def test_without_autograd_and_in_attention_too():
    layer, x = nn.Linear(4, 4), torch.ones(1, 2, 5, 4)
    found: Counter[tuple[str, str]] = Counter()
    with torch.inference_mode(), Counted(found, WRITE, {4, 7}):
        layer(x)
        F.scaled_dot_product_attention(x, x, x)
    assert found[WRITE, BODY] == 2 * 10 * 4 * 4
    assert found[WRITE, ATTENTION] == 2 * 2 * 2 * 5 * 5 * 4  # two heads, two products


def rollout(index: int, reward: float, written: int) -> Rollout:
    row = Row([2, 3], [4] * written, [True] * written, [0.0] * written, [0] * written)
    return Rollout(Prompt("0", "", [2, 3]), "0", index, seed=0, rows=[row], reward=reward)


def test_the_floor_by_hand():
    config = Qwen2Config(hidden_size=4, vocab_size=7, num_hidden_layers=3)
    weights = {"layer": 100, "asked": 90}
    found = floor_of([rollout(0, 1.0, 3), rollout(1, 0.0, 1)], weights, config)
    # The group's prompt once; of the last layer, one token of two asks for all.
    assert found[READ, BODY] == 2 * (2 * 100 * 2 + 2 * 10 + 1 * 90)
    assert found[READ, ATTENTION] == 4 * 3 * 4 * 3
    # Two tokens of the first completion go back into the model, none of the second.
    assert found[WRITE, BODY] == 2 * (2 * 100 * 2 + 2 * 10 + 2 * 90)
    assert found[WRITE, ATTENTION] == 4 * (2 * 2 + 3) * 4 * 3
    assert found[FORWARD, HEAD] == 2 * 4 * 4 * 7
    assert found[FORWARD, BODY] == 2 * (4 * 100 * 2 + 4 * 10 + 4 * 90)
    assert found[BACKWARD, BODY] == 2 * found[FORWARD, BODY]
    assert floor_of([rollout(0, 1.0, 3), rollout(1, 1.0, 1)], weights, config)[FORWARD, BODY] == 0


def test_the_table_has_a_line_for_each_and_one_for_all():
    count = {"made": 3.0, "floor": 2.0}
    assert table({**count, "products": {"write: head": count}})[2:] == [
        "| write: head | 3 | 2 | 1.50 |",
        "| all | 3 | 2 | 1.50 |",
    ]

"""Test the layout for the fused attention kernel, which needs CUDA, against the one for CPUs."""

import json
import shutil
from functools import cache
from types import SimpleNamespace

import pytest
import torch

from lightning_rl import Recompute
from lightning_rl.extend import Policy
from lightning_rl.models.attention import packed as attention, varlen
from lightning_rl.models.attention.packed import build_layout, packed_attention
from lightning_rl.models.attention.varlen import (
    attend,
    build_varlen,
    fused_dtype,
    fused_heads,
    plain_varlen,
)
from lightning_rl.run.processes import dist as fallbacks
from lightning_rl.run.processes.dist import fell_back
from tests.support.grouped import grouped


def test_segments_by_hand():
    # Row: prompt 0-2, prompt 3-4, then completions 5-6 (after the first) and 7 (after the second);
    # one completion has no token to run.
    layout = build_varlen(
        *map(torch.tensor, ([0, 3, 5, 7, 7], [3, 2, 2, 0, 1], [0, 0, 0, 0, 3], [0, 0, 3, 3, 2]))
    )
    assert layout.keys.tolist() == [0, 1, 2, *(3, 4), *(0, 1, 2, 5, 6), *(3, 4, 7)]
    assert layout.query_ends.tolist() == [0, 3, 5, 7, 8]
    assert layout.key_ends.tolist() == [0, 3, 5, 10, 13]
    assert (layout.longest_query, layout.longest_key) == (3, 5)


@pytest.mark.parametrize("seed", range(4))
def test_one_call_over_segments_is_the_attention_over_buckets(random_batch, seed):
    layout = build_layout(random_batch(seed))
    size, generator = len(layout.input_ids), torch.Generator().manual_seed(seed)
    q, k, v = (
        torch.randn(1, heads, size, 8, generator=generator, dtype=torch.double, requires_grad=True)
        for heads in (4, 2, 2)
    )
    expected, _ = packed_attention(torch.nn.Identity(), q, k, v, None, layout=layout, scaling=0.3)
    out = attend(*(x[0].transpose(0, 1) for x in (q, k, v)), layout.varlen, 0.3, plain_varlen)
    torch.testing.assert_close(out[None], expected, rtol=0, atol=1e-12)
    towards = torch.randn(expected.shape, generator=generator, dtype=torch.double)
    ours, theirs = (
        torch.autograd.grad((o * towards).sum(), (q, k, v)) for o in (out[None], expected)
    )
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


def test_the_definition_is_causal_from_the_end():
    # 2 queries on the last of 3 keys: the first may see 2 keys, the second 3. Equal scores: means.
    q, k = torch.zeros(2, 1, 1), torch.zeros(3, 1, 1)
    v = torch.tensor([3.0, 6.0, 18.0]).reshape(3, 1, 1)
    ends = (torch.tensor([0, 2]), torch.tensor([0, 3]))
    out = plain_varlen(q, k, v, *ends, 2, 3, scale=None, window_size=varlen.CAUSAL, enable_gqa=True)
    assert out.flatten().tolist() == [4.5, 9.0]


@pytest.fixture
def kernel_on_cpu(monkeypatch):
    """Put the kernel's definition in its place, of any dtype, as if a CPU had it."""
    for module in (attention, varlen):
        monkeypatch.setattr(module, "fused_kernel", lambda: plain_varlen)
    monkeypatch.setattr(attention, "fused_dtype", lambda lm, device: lm.dtype)
    monkeypatch.setattr(varlen, "kernel_works", cache(varlen.kernel_works.__wrapped__))


@pytest.fixture(scope="module")
def windowed(tiny_model, tmp_path_factory):
    """Return the tiny model, whose second layer sees three tokens."""
    directory = shutil.copytree(tiny_model, tmp_path_factory.mktemp("windowed") / "model")
    file = directory / "config.json"
    config = json.loads(file.read_text()) | {"use_sliding_window": True, "sliding_window": 3}
    config["layer_types"] = ["full_attention", "sliding_attention"]
    file.write_text(json.dumps(config))
    return directory


def gradients(model, micro_batch, **options):
    policy = Policy(str(model), **grouped(**options))
    varlen.kernel_works.cache_clear()  # on a GPU a policy is checked in float32, without the kernel
    scores = policy(micro_batch)
    (scores.logprobs.sum() + scores.entropy.sum()).backward()
    return {name: p.grad for name, p in policy.named_parameters()}


@pytest.mark.parametrize("recompute", [True, Recompute(keep="attention"), Recompute(inputs="host")])
def test_the_kernel_is_tried_before_layers_that_are_recomputed_run(
    windowed, random_batch, kernel_on_cpu, recompute
):
    """A trial inside of a layer would be part of what it keeps, and be missing in the rerun."""
    micro_batch = random_batch(0)
    expected = gradients(windowed, micro_batch)
    assert varlen.kernel_works.cache_info().misses == 2  # with a window and without
    found = gradients(windowed, micro_batch, gradient_checkpointing=recompute)
    assert found.keys() == expected.keys()
    for name, grad in found.items():
        assert torch.equal(grad, expected[name]), name


def test_what_the_kernel_computes_is_what_batches_do(windowed, random_batch, request):
    micro_batch = random_batch(0)
    batched = Policy(str(windowed)).double()(micro_batch)
    request.getfixturevalue("kernel_on_cpu")
    policy = Policy(str(windowed)).double()
    layout = build_layout(micro_batch)
    layout.prepare(policy.lm)
    assert layout.fused.heads == {(32, False), (32, True)}
    fused = policy(micro_batch)
    torch.testing.assert_close(fused.logprobs, batched.logprobs, rtol=0, atol=1e-12)


def test_a_cpu_has_no_such_kernel():
    assert fused_dtype(Likeness(torch.bfloat16, 16), torch.device("cpu")) is None
    assert not varlen.kernel_works(torch.device("cpu"), torch.bfloat16, 16)


def test_a_kernel_that_masks_otherwise_is_not_used(monkeypatch):
    device, dtype = torch.device("cpu"), torch.float32
    monkeypatch.setattr(varlen, "fused_kernel", lambda: plain_varlen)
    assert varlen.kernel_works.__wrapped__(device, dtype, 16)

    def from_the_start(q, k, v, query_ends, key_ends, *longest, **options):
        """Attend aligned at the first key, as SDPA's ``is_causal`` is."""
        spans = zip(query_ends.unfold(0, 2, 1), key_ends.unfold(0, 2, 1), strict=True)
        parts = [
            plain_varlen(
                q[i:j], k[m : m + j - i], v[m : m + j - i], ends, ends, *longest, **options
            )
            for (i, j), (m, _) in spans
            for ends in [torch.stack([i - i, j - i])]
        ]
        return torch.cat(parts)

    monkeypatch.setattr(varlen, "fused_kernel", lambda: from_the_start)
    assert not varlen.kernel_works.__wrapped__(device, dtype, 16)


def test_a_kernel_whose_gradients_are_wrong_is_not_used(monkeypatch):
    def half_deaf(q, k, v, *layout, **options):
        """Attend right, but for a gradient of the keys at half its size."""
        return plain_varlen(q, k / 2 + k.detach() / 2, v, *layout, **options)

    monkeypatch.setattr(varlen, "fused_kernel", lambda: half_deaf)
    assert not varlen.kernel_works.__wrapped__(torch.device("cpu"), torch.float32, 16)


def test_torch_2_11_is_not_told_of_grouped_queries(monkeypatch):
    # Its kernel groups them by itself, and knows no such argument.
    def of_2_11(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size=(-1, -1)
    ):
        layout = (cu_seq_q, cu_seq_k, max_q, max_k)
        options = {"scale": scale, "window_size": window_size, "enable_gqa": True}
        return plain_varlen(query, key, value, *layout, **options)

    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", of_2_11)
    monkeypatch.setattr(varlen, "fused_kernel", varlen.fused_kernel.__wrapped__)
    assert varlen.kernel_works.__wrapped__(torch.device("cpu"), torch.float32, 16)


class Likeness:
    """Notes what is asked of a model before its layers run."""

    def __init__(self, dtype: torch.dtype, width: int) -> None:
        config = SimpleNamespace(hidden_size=2 * width, num_attention_heads=2)
        self.dtype, self.config = dtype, SimpleNamespace(get_text_config=lambda: config)

    def modules(self):
        return []


CUDA = torch.device("cuda")


@pytest.mark.parametrize(
    ("model", "reason"),
    [
        (
            Likeness(torch.float32, 16),
            "it has no float32; trainer.precision bf16-mixed or bf16-true",
        ),
        (
            Likeness(torch.bfloat16, 512),
            "the model's heads of 512 exceed the 256 that it takes",
        ),
    ],
)
def test_why_the_kernel_is_not_used_is_said_once(caplog, model, reason):
    fell_back.cache_clear()
    with torch.no_grad():
        assert fused_dtype(Likeness(torch.float32, 16), CUDA) is None  # as models are checked
    assert not caplog.records
    for _ in range(3):
        dtype = fused_dtype(model, CUDA)
        assert dtype is None or not fused_heads(model, CUDA, dtype)
    [record] = caplog.records
    assert record.levelname == "WARNING"
    message = record.getMessage()
    assert message.startswith("torch's varlen_attn cannot be used: ")
    assert reason in message
    assert message.endswith("; falling back to SDPA over buckets, which is slower")


def test_what_a_kernel_fails_with_is_said_too(caplog):
    fell_back.cache_clear()
    for _ in range(2):
        assert not varlen.kernel_works.__wrapped__(torch.device("cpu"), torch.bfloat16, 16)
    [record] = caplog.records
    assert "varlen_attn cannot be used: NotImplementedError: Could not run" in record.getMessage()


def test_only_rank_0_says_so(monkeypatch, caplog):
    monkeypatch.setattr(fallbacks, "rank", lambda: 1)
    fell_back.cache_clear()
    fell_back("fast", "reason", "slow")
    assert not caplog.records

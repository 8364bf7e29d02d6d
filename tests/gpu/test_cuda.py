"""Test the learning core on a CUDA device; run by hand where there is one: pytest tests/gpu."""

import random
from pathlib import Path

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_rl import (
    GAE,
    IterablePrompts,
    PolicyModule,
    Prompt,
    RLDataModule,
    Rollout,
    Sampling,
    SharedValueHead,
    StepTimer,
    TransformersEngine,
    WeightSync,
)
from lightning_rl.extend import Policy, RolloutStatus, Row, SamplingDistribution, pack_rollouts
from lightning_rl.models.attention import varlen
from lightning_rl.models.attention.packed import build_layout, packed_attention

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def made_rollouts(count: int, prompt_length: int, longest: int) -> list[Rollout]:
    rng = random.Random(0)
    rollouts = []
    for group in range(count):
        prompt = Prompt(str(group), "x", [rng.randrange(2, 13) for _ in range(prompt_length)])
        for index in range(4):
            tokens = [rng.randrange(2, 13) for _ in range(rng.randint(1, longest))]
            n = len(tokens)
            rollouts.append(
                Rollout(
                    prompt,
                    str(group),
                    index,
                    seed=0,
                    sampling=SamplingDistribution(temperature=0.7),
                    rows=[Row(prompt.token_ids, tokens, [True] * n, [0.0] * n, [0] * n)],
                    status=RolloutStatus.COMPLETED,
                    reward=float(index),
                )
            )
    return rollouts


def test_cuda_scores_equal_cpu_scores(tiny_model: Path) -> None:
    batch = pack_rollouts(made_rollouts(6, 40, 30))
    policy = Policy(str(tiny_model))
    with torch.no_grad():
        on_cpu = policy(batch).logprobs
        on_gpu = policy.cuda()(batch.to("cuda")).logprobs.cpu()
    assert (on_cpu - on_gpu).abs().max() < 1e-4


def test_bfloat16_autocast_trains_and_stays_near_float32(tiny_model: Path) -> None:
    batch = pack_rollouts(made_rollouts(6, 40, 30)).to("cuda")
    policy = Policy(str(tiny_model)).cuda()
    exact = policy(batch).logprobs
    with torch.autocast("cuda", torch.bfloat16):
        rough = policy(batch).logprobs
    rough.sum().backward()
    assert (exact - rough).abs().mean() < 0.1  # of logprobs around -5; single ones are off by 0.2
    assert all(p.grad is not None and p.grad.isfinite().all() for p in policy.lm.parameters())


def zeros_share(completions: list[str], **columns: object) -> list[float]:
    return [text.count("0") / max(1, len(text)) for text in completions]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
def test_ppo_raises_reward_on_cuda(tiny_model: Path, tmp_path: Path, precision: str) -> None:
    rewards = []

    class Watch(StepTimer):
        def on_iteration_end(self, trainer, pl_module, metrics):  # type: ignore[no-untyped-def]
            if "reward/mean" in metrics:
                rewards.append(metrics["reward/mean"])

    module = PolicyModule(
        str(tiny_model),
        advantage=GAE(),
        critic=SharedValueHead(),
        optimizer=lambda p: torch.optim.AdamW(p, lr=3e-3),
        update={"minibatches": 2},
    )
    data = RLDataModule(
        IterablePrompts([{"prompt": f"{i}="} for i in range(100)]),
        [zeros_share],
        TransformersEngine(),
        sampling=Sampling(max_tokens=8),
        iterations_per_epoch=8,
    )
    trainer = Trainer(
        accelerator="cuda",
        devices=1,
        max_epochs=1,
        precision=precision,  # type: ignore[arg-type]
        default_root_dir=tmp_path,
        logger=False,
        enable_checkpointing=False,
        callbacks=[WeightSync(max_gap=0.25), Watch()],
    )
    trainer.fit(module, datamodule=data)
    assert rewards[-1] > rewards[0] + 0.2


def test_the_fused_attention_kernel_is_used_and_exact(tiny_model: Path) -> None:
    """In bfloat16 the kernel is as near to float32 as attention over buckets is, both ways."""
    device = torch.device("cuda")
    assert varlen.kernel_works(device, torch.bfloat16, 32)
    layout = build_layout(pack_rollouts(made_rollouts(6, 40, 30)).to(device))
    size = len(layout.input_ids)
    q, k, v = (
        torch.randn(1, heads, size, 32, device=device, requires_grad=True) for heads in (4, 2, 2)
    )

    def run(dtype: torch.dtype) -> list[torch.Tensor]:
        layout.fuse(dtype, frozenset({(32, False)} if dtype is torch.bfloat16 else ()))
        out, _ = packed_attention(
            torch.nn.Identity(), *(x.to(dtype) for x in (q, k, v)), None, layout=layout
        )
        return [out.float(), *torch.autograd.grad(out.float().square().sum(), (q, k, v))]

    for ours, exact in zip(run(torch.bfloat16), run(torch.float32), strict=True):
        assert (ours - exact).norm() / exact.norm() < 0.02
    lm = Policy(str(tiny_model)).lm.cuda()
    with torch.autocast("cuda", torch.bfloat16):
        assert varlen.fused_dtype(lm, device) is torch.bfloat16
    assert varlen.fused_dtype(lm, device) is None  # float32 stays with buckets


def test_compiled_layers_score_the_same(tiny_model: Path) -> None:
    plain, compiled = (Policy(str(tiny_model), compile_layers=c).cuda() for c in (False, True))
    for seed in (4, 6):
        batch = pack_rollouts(made_rollouts(seed, 40, 30)).to("cuda")
        ours, theirs = compiled(batch).logprobs, plain(batch).logprobs
        assert (ours - theirs).abs().max() < 1e-4

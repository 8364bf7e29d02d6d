"""Keep layers' inputs in host memory: check gradients and planned peak, and time the copies."""

from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.clock import begin_peak, give_back, milliseconds, peak_bytes, settle
from benchmarks.gpu.made import model_of, rollouts_of
from benchmarks.gpu.updates import PLAN_IS_OFF
from lightning_rl import Loading, Recompute
from lightning_rl.cli.check.memory import training_memory
from lightning_rl.cli.check.placement import Placement
from lightning_rl.extend import Policy, pack_rollouts

SETTINGS = {
    "true": Recompute(),
    "again": Recompute(),
    "host": Recompute(inputs="host"),
    "attention": Recompute(keep="attention"),
    "tiles": Recompute(mlp_tokens=2048),
    "all": Recompute(inputs="host", keep="attention", mlp_tokens=2048),
}
"""The second is for what differs between two passes that should be equal."""
EXACT = ("host", "attention")
COMPARED = 1 << 20
"""Elements; of every layer some parameters have fewer."""


def host_inputs(bench: Bench) -> None:
    """Measure gradients, milliseconds and peaks of one long micro-batch, by setting."""
    count, tokens = (2, 90) if bench.tiny else (2, 8000)
    micro_batch = pack_rollouts(rollouts_of(count, tokens)).to(bench.device)
    gradients: dict[str, list[Tensor]] = {}
    for name, setting in SETTINGS.items():
        with bench.case(name):
            give_back(bench)
            torch.manual_seed(0)
            model = str(model_of(bench, "tiny" if bench.tiny else "0.5B"))
            policy = Policy(
                model, loading=Loading(random_init=True, gradient_checkpointing=setting)
            )
            figures = _measured(bench, policy.to(bench.device), micro_batch)
            bench.note({name: figures})
            grads = [p.grad for p in policy.parameters() if p.grad is not None]
            gradients[name] = [grad.cpu() for grad in grads if grad.numel() < COMPARED]
    own = _apart(gradients["true"], gradients["again"])
    for name in EXACT:
        apart = _apart(gradients["true"], gradients[name])
        bench.note({f"{name}: gradients apart": apart, "the same twice, apart": own})
        bench.require(apart <= 2 * own, f"{name}: gradients differ by {apart:.2g}, not {own:.2g}")


def _measured(bench: Bench, policy: Policy, micro_batch: Any) -> dict[str, Any]:
    place = Placement(torch.device(bench.device), "bf16-mixed")
    plan = training_memory(policy, [], torch.optim.SGD, micro_batch, place)

    def passes() -> None:
        policy.zero_grad()
        with torch.autocast(bench.device, torch.bfloat16, cache_enabled=False):
            loss = policy(micro_batch).logprobs.sum()
        loss.backward()

    taken = milliseconds(bench, passes)
    settle(bench)
    begin_peak(bench)
    passes()
    settle(bench)
    peak = peak_bytes(bench)
    figures: dict[str, Any] = {"ms": taken, "plan GiB": plan.total / 2**30}
    if peak is not None:
        figures["peak GiB"] = peak / 2**30
        off = max(plan.total / peak, peak / plan.total)
        bench.require(off < PLAN_IS_OFF, f"planned {plan.total}, used {peak} bytes")
    return figures


def _apart(one: list[Tensor], other: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))

"""Which matrix products does an iteration make, and how many would do?

    OMP_NUM_THREADS=1 python -m benchmarks.products [--save]

Three iterations of the task `longer` of `benchmarks.wall`, with TransformersEngine on one process.
Every product that torch makes is counted where it is made, in floating point operations (a
multiplication and an addition are two): while the engine reads prompts and while it writes, in the
update's forward pass and in its backward pass; and by what it multiplies with: the weights of the
body, those of the output head, or in attention queries with keys and weights with values.

The floor of the same rollouts is counted by hand: a prompt of a group is read once, a written token
goes through the model once (but for a rollout's last), and an update takes the rollouts whose group
has different rewards, forward once and backward twice. Nothing in it is padded, and what of the
last layer nobody asks for, the queries and the MLP of tokens that predict nothing, is left out.

Counts depend neither on the machine nor on its load. The last line is JSON: ``made`` and ``floor``,
in 1e9 operations per iteration, and ``ratio``, of all; the same of each product in ``products``.
"""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count
from transformers import Qwen2Config

from benchmarks.floor import with_spread
from benchmarks.peers.tasks import Task, longer_task
from benchmarks.support.results import RESULTS, parser_of, report, write_block
from benchmarks.support.task import Rows, fit, make_data, make_module, prepare
from lightning_rl import PolicyModule, Rollout, Sampling, TransformersEngine, WeightSync
from lightning_rl.engines.hf.decoding import Decoder

ITERATIONS = 3
PAGE = RESULTS.parents[1] / "docs" / "benchmarks.md"
READ, WRITE, FORWARD, BACKWARD = "read prompts", "write", "update, forward", "update, backward"
BODY, HEAD, ATTENTION = "body", "head", "attention"
Product = tuple[str, str]
aten = torch.ops.aten
_ON_CPU: dict[Any, Callable[..., int]] = {
    aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        q.shape, k.shape, v.shape
    ),
    aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(
            grad.shape, q.shape, k.shape, v.shape
        )
    ),
}
"""The operations that torch's own counter does not know."""


class Counted(TorchDispatchMode):
    """Adds what this thread multiplies to the totals, as part of a stage.

    ``head`` are the two sizes of the output head's weights.
    """

    def __init__(self, totals: Counter[Product], stage: str, head: set[int]) -> None:
        super().__init__()
        self.totals, self.stage, self.head = totals, stage, head

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs, packet = kwargs or {}, func.overloadpacket
        if packet not in flop_registry and packet not in _ON_CPU:
            with self:  # without autograd, as in the engine, linear layers arrive in one piece
                parts = func.decompose(*args, **kwargs)
            if parts is not NotImplemented:
                return parts
        out = func(*args, **kwargs)
        if packet in _ON_CPU:
            self._add(ATTENTION, _ON_CPU[packet](*args, **kwargs))
        elif packet in flop_registry:
            self._add(self._by(packet, [*args, out]), flop_registry[packet](*args, out_val=out))
        return out

    def _by(self, packet: Any, operands: Sequence[Any]) -> str:
        shapes = [set(x.shape[-2:]) for x in operands if isinstance(x, Tensor)]
        if self.head in shapes:  # its weights, or their gradient
            return HEAD
        # Products of two batches of matrices: short completions are multiplied out by hand.
        return ATTENTION if packet in (aten.bmm, aten.baddbmm) else BODY

    def _add(self, by: str, count: int) -> None:
        backward = self.stage == FORWARD and torch._C._current_graph_task_id() != -1
        self.totals[BACKWARD if backward else self.stage, by] += count


class Watch(Rows):
    """Counts from the first collection on, and adds up the floors of what was collected."""

    def __init__(self) -> None:
        super().__init__()
        self.made: Counter[Product] = Counter()
        self.floor: Counter[Product] = Counter()
        self.stack = ExitStack()

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, PolicyModule)
        self.config = pl_module.loaded_policy.lm.config
        self.weights = weights_of(pl_module)
        for kind, method, stage in (
            (Decoder, "_read", READ),
            (Decoder, "_write", WRITE),
            (PolicyModule, "training_step", FORWARD),
        ):
            self.stack.enter_context(
                patch.object(kind, method, self._counting(kind, method, stage))
            )

    def _counting(self, kind: type, method: str, stage: str) -> Callable[..., Any]:
        plain, lock = getattr(kind, method), threading.Lock()

        def counting(*args: Any, **kwargs: Any) -> Any:
            found: Counter[Product] = Counter()
            with Counted(found, stage, {self.config.vocab_size, self.config.hidden_size}):
                result = plain(*args, **kwargs)
            with lock:
                self.made.update(found)
            return result

        return counting

    def on_iteration_end(
        self, trainer: Trainer, pl_module: LightningModule, metrics: dict[str, float]
    ) -> None:
        self.stack.close()
        if self.rollouts:
            self.floor.update(floor_of(self.rollouts, self.weights, self.config))


def weights_of(module: PolicyModule) -> dict[str, int]:
    """Count the elements of a layer's matrices, and what only predictors need of the last."""
    layer = module.loaded_policy.lm.base_model.layers[-1]
    size = {name: w.numel() for name, w in layer.named_parameters() if w.ndim == 2}
    seen_by_others = sum(n for name, n in size.items() if "k_proj" in name or "v_proj" in name)
    return {"layer": sum(size.values()), "asked": sum(size.values()) - seen_by_others}


def floor_of(
    rollouts: Sequence[Rollout], weights: dict[str, int], config: Qwen2Config
) -> Counter[Product]:
    """Count the operations that an iteration on these rollouts cannot do without."""
    found: Counter[Product] = Counter()
    read = prompts_of(rollouts)
    _add(found, READ, weights, config, sum(map(len, read)), len(read), causal(map(len, read)))
    written = [(len(r.prompt.token_ids), len(r.token_ids)) for r in rollouts]
    tokens = sum(count - 1 for _, count in written)
    pairs = sum(completion_pairs(*lengths) for lengths in written)
    _add(found, WRITE, weights, config, tokens, tokens, pairs)
    learned = with_spread(list(rollouts))
    shown, written = (
        prompts_of(learned),
        [(len(r.prompt.token_ids), len(r.token_ids)) for r in learned],
    )
    tokens = sum(map(len, shown)) + sum(count - 1 for _, count in written)
    predictors = sum(count for _, count in written)
    pairs = causal(map(len, shown)) + sum(completion_pairs(*lengths) for lengths in written)
    for stage, times in ((FORWARD, 1), (BACKWARD, 2)):
        _add(found, stage, weights, config, tokens, predictors, pairs, times)
    return found


def prompts_of(rollouts: Sequence[Rollout]) -> list[list[int]]:
    """Return each group's prompt once."""
    return list({r.group_id: r.prompt.token_ids for r in rollouts}.values())


def causal(lengths: Any) -> int:
    """Count pairs of a token and one that it sees, itself included."""
    return sum(n * (n + 1) // 2 for n in lengths)


def completion_pairs(prompt: int, written: int) -> int:
    """Count the pairs of a completion's tokens, all but its last, with those that they see."""
    return (written - 1) * prompt + causal([written - 1])


def _add(
    found: Counter[Product],
    stage: str,
    weights: dict[str, int],
    config: Qwen2Config,
    tokens: int,
    predictors: int,
    pairs: int,
    times: int = 1,
) -> None:
    whole = tokens * weights["layer"] * (config.num_hidden_layers - 1)
    last = tokens * (weights["layer"] - weights["asked"]) + predictors * weights["asked"]
    found[stage, BODY] += times * 2 * (whole + last)
    found[stage, HEAD] += times * 2 * predictors * config.hidden_size * config.vocab_size
    found[stage, ATTENTION] += times * 4 * pairs * config.hidden_size * config.num_hidden_layers


def measure(task: Task) -> dict[str, Any]:
    """Return the mean operations of an iteration."""
    seed_everything(0, verbose=False)
    watch = Watch()
    data = make_data(
        ITERATIONS,
        TransformersEngine(),
        task.prompts,
        sampling=Sampling(max_tokens=task.max_tokens),
        seed=0,
    )
    fit(make_module(task.model), data, [WeightSync(), watch])
    products = {
        f"{stage}: {by}": {
            "made": watch.made[stage, by] / ITERATIONS / 1e9,
            "floor": watch.floor[stage, by] / ITERATIONS / 1e9,
        }
        for stage in (READ, WRITE, FORWARD, BACKWARD)
        for by in (BODY, HEAD, ATTENTION)
    }
    made, floor = (sum(p[name] for p in products.values()) for name in ("made", "floor"))
    return {"made": made, "floor": floor, "ratio": made / floor, "products": products}


def table(result: dict[str, Any]) -> list[str]:
    """Return Markdown, a line per product."""
    lines = ["| product | made, 1e9 | floor, 1e9 | made / floor |", "|---|---|---|---|"]
    for name, count in [*result["products"].items(), ("all", result)]:
        made, floor = count["made"], count["floor"]
        lines.append(f"| {name} | {made:.3g} | {floor:.3g} | {made / floor:.2f} |")
    return lines


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    torch.set_num_threads(1)
    prepare()
    result = measure(longer_task(ITERATIONS))
    print("\n".join(table(result)))
    if arguments.save:
        write_block(PAGE, "products", table(result))
    report("products", result, arguments.save)


if __name__ == "__main__":
    main()

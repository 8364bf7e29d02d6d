"""Faults that a configuration and its data show before anything runs."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from lightning_rl.agents.tools import ToolAgent
from lightning_rl.callbacks import Evaluate, HFExport, IterationCheckpoint
from lightning_rl.cli.app import planned_iterations, planned_steps
from lightning_rl.cli.check.command import Built, connect, require_monitored
from lightning_rl.cli.check.disk import disk_plan
from lightning_rl.cli.check.mesh import choose
from lightning_rl.cli.check.reward_trial import try_rewards
from lightning_rl.cli.check.training import end_of_schedule
from lightning_rl.cli.nodes import Tree
from lightning_rl.cli.rehearse.findings import Finding, Kind
from lightning_rl.cli.rehearse.judge_cost import Prices, judge_costs
from lightning_rl.cli.rehearse.smaller import precision_of
from lightning_rl.cli.rehearse.tool_trial import try_tools
from lightning_rl.collect.tasks import Task
from lightning_rl.config.lightning_flags import PRECISIONS, TRAINER
from lightning_rl.config.schema import one_line
from lightning_rl.config.secrets import found_in
from lightning_rl.datamodule import RLDataModule
from lightning_rl.errors import ConfigError
from lightning_rl.learn.policies import RolloutModule
from lightning_rl.learn.schedulers import throwaway_scheduler
from lightning_rl.models.model_files import fewest_positions
from lightning_rl.models.pretrained import load_config
from lightning_rl.rollout import Prompt
from lightning_rl.run.hooks import callbacks_of, find_callbacks

_REGULAR = (Evaluate, IterationCheckpoint, HFExport)
_SLOW_S = 60.0
"""Seconds of grading in an iteration that are worth a word."""
_SHARE = 0.1
"""Share of prompts, or of a run's steps, that is worth a word."""


def predict(
    cli: Built,
    tree: Tree,
    gpus: int,
    card_gb: float | None,
    prices: Prices | None,
    paid: list[str],
) -> Iterator[Finding]:
    """Yield what can be said of a run without running it.

    Args:
        cli: its parts, built for a CPU, with all sizes as configured.
        tree: its whole configuration.
        gpus: the number of its training processes.
        card_gb: GiB of memory of each GPU; None: the memory is not planned.
        prices: of a million tokens of a judge; None: unknown.
        paid: gets lines of text on what the rewards paid, as :func:`try_rewards` says them.

    Raises:
        ConfigError: for a mistake that ``fit`` would refuse.
        DataError: for data that ``fit`` would refuse.
    """
    for key, kind in found_in(tree):
        yield _fails(key, f"holds {kind}, which config.yaml and every log show; name an "
                          "environment variable instead")  # fmt: skip
    module, data = cli.model, cli.datamodule
    if not isinstance(module, RolloutModule) or not isinstance(data, RLDataModule):
        return
    if (precision := precision_of(tree)) not in PRECISIONS:  # Lightning has others on a CPU
        yield _fails("trainer.precision", f"{precision}: {TRAINER['precision'].words}")
    connect(cli)
    data.load_prompts("fit")
    train = [prompt for _, prompt in data.train_prompts.numbered()]
    yield from _prompts(data, train)
    yield from _held_out(data, train)
    yield from _sampling(data)
    yield from _window(module, data, train)
    tokenizer = data.load_tokenizer(module)
    yield from _rewards(data, tokenizer, paid)
    # Of one epoch if the run has no end.
    iterations = planned_iterations(cli.trainer, data) or data.iterations_per_epoch
    for task in data.train_tasks:
        own = [prompt for prompt in train if prompt.set == task.name]
        groups = iterations * _drawn(data, task)
        yield from judge_costs(task, own, tokenizer, groups, prices)
        if isinstance(task.agent, ToolAgent):
            yield from try_tools(task.agent.toolbox)
    try:
        require_monitored(callbacks_of(cli.trainer), data)
    except ConfigError as error:
        yield _fails("trainer.callbacks", str(error))
    yield from _schedule(cli)
    yield from _intervals(cli)
    if card_gb is not None:
        lines, fits = choose(module, data, train, gpus, card_gb)
        yield Finding(Kind.TRIED if fits else Kind.FAILS, "trainer.devices", "; ".join(lines))
    with torch.device("meta"):
        module.configure_model()
    longest = max((len(prompt.token_ids) for prompt in train), default=0)
    disk = disk_plan(module, data, cli.place, cli.logged, longest)
    if disk.full_at is not None:
        yield _fails("trainer.default_root_dir", " ".join("; ".join(disk.lines()).split()))


def _fails(key: str, text: str) -> Finding:
    return Finding(Kind.FAILS, key, text)


def _wastes(key: str, text: str) -> Finding:
    return Finding(Kind.WASTES, key, text)


def _key(task: Task, name: str) -> str:
    return f"data.train_prompts[{task.name}].{name}" if task.name else f"data.{name}"


def _prompts(data: RLDataModule, train: Sequence[Prompt]) -> Iterator[Finding]:
    for task in data.train_tasks:
        own = [prompt for prompt in train if prompt.set == task.name]
        rows, fit = len(task.prompts), len(own)
        if rows - fit > _SHARE * rows:
            yield _wastes(
                _key(task, "train_prompts.max_prompt_tokens"),
                f"{rows - fit} of {rows} rows are longer, and dropped; raise it",
            )
        if fit < (drawn := math.ceil(_drawn(data, task))):
            yield _wastes(
                _key(task, "train_prompts"),
                f"{fit} rows for {drawn} groups an iteration (data.groups_per_iteration), so each "
                f"is drawn {drawn / fit:.3g} times for one update; lower it, or add rows",
            )
        texts = Counter(tuple(prompt.token_ids) for prompt in own)
        if (repeated := fit - len(texts)) > _SHARE * fit:
            yield _wastes(
                _key(task, "train_prompts"), f"{repeated} of {fit} rows repeat another's prompt"
            )


def _drawn(data: RLDataModule, task: Task) -> float:
    """Return the expected number of a task's groups in an iteration."""
    return data.train_prompts.shares().get(task.name, 1.0) * data.groups_per_iteration


def _held_out(data: RLDataModule, train: Sequence[Prompt]) -> Iterator[Finding]:
    if data.evaluation is None:
        yield _wastes(
            "data.evaluation", "there are no held-out prompts, so nobody sees what is learned"
        )
        return
    known = {tuple(prompt.token_ids) for prompt in train}
    groups = data.held_out.groups()
    same = sum(tuple(group[0].prompt.token_ids) in known for group in groups)
    if same > _SHARE * len(groups):
        yield _wastes(
            "data.evaluation.prompts",
            f"{same} of {len(groups)} held-out prompts are trained on, so accuracy shows memory",
        )
    asked = sum(map(len, groups))
    sampled = sum(task.group_size for task in data.train_tasks) / len(data.train_tasks)
    assert data.trainer is not None
    for callback in find_callbacks(data.trainer, Evaluate):
        between = callback.every_n_iterations * data.groups_per_iteration * sampled
        text = (
            f"an evaluation has {asked} completions; until the next, {between:.0f} are trained on"
        )
        if asked > between:
            advice = "; lower it, or raise Evaluate.every_n_iterations"
            yield _wastes("data.evaluation.limit", text + advice)
        else:
            yield Finding(Kind.TRIED, "data.evaluation", text)


def _sampling(data: RLDataModule) -> Iterator[Finding]:
    for task in data.train_tasks:
        settings = task.sampling
        if task.group_size > 1 and (settings.temperature == 0 or settings.top_k == 1):
            name = "temperature" if settings.temperature == 0 else "top_k"
            yield _fails(
                _key(task, f"sampling.{name}"),
                f"{getattr(settings, name):g} writes {task.group_size} equal completions of each "
                "prompt, from which nothing is learned",
            )


def _window(module: Any, data: RLDataModule, train: Sequence[Prompt]) -> Iterator[Finding]:
    policies = module.policies.values()
    positions = fewest_positions(load_config(one.model, one.loading) for one in policies)
    if positions is None:
        return
    for task in data.train_tasks:
        room = positions - task.sampling.max_tokens
        long = sum(len(p.token_ids) > room for p in train if p.set == task.name)
        if long:
            yield _fails(
                _key(task, "sampling.max_tokens"),
                f"{task.sampling.max_tokens} leaves {max(0, room)} of the model's {positions} "
                f"positions for a prompt, and {long} prompts are longer",
            )


def _rewards(data: RLDataModule, tokenizer: Any, paid: list[str]) -> Iterator[Finding]:
    for verdict in try_rewards(data, tokenizer):
        paid += verdict.lines
        yield from (_fails("data.rewards", one_line(fault, 400)) for fault in verdict.faults)
        if verdict.seconds > _SLOW_S:
            yield _wastes(
                "data.rewards",
                f"grading takes {verdict.seconds:.0f} s an iteration, one completion after "
                "the other",
            )
        held_out = data.evaluation
        if held_out is not None and verdict.best < held_out.success_reward:
            yield _wastes(
                "data.evaluation.success_reward",
                f"{held_out.success_reward:g} is more than a right answer earns "
                f"({verdict.best:g}), so the accuracy stays 0",
            )
        kind = Kind.UNTRIED if math.isnan(verdict.seconds) else Kind.TRIED
        yield Finding(kind, "data.rewards", verdict.lines[0].rstrip(":"))


def _schedule(cli: Built) -> Iterator[Finding]:
    for name, policy in cli.model.policies.items():
        if policy.lr_scheduler is None:
            continue
        steps = planned_steps(cli.trainer, cli.datamodule, policy)
        key = f"model.policies.{name}.lr_scheduler" if name else "model.lr_scheduler"
        scheduler = throwaway_scheduler(policy.lr_scheduler, policy.optimizer)
        ends = end_of_schedule(scheduler)
        if ends is not None and abs(ends - steps) > _SHARE * steps:
            yield _wastes(key, f"it ends after {ends} optimizer steps, but the run after {steps}")
        warm_up = getattr(scheduler, "warmup_steps", 0)
        if warm_up >= steps:
            yield _wastes(key, f"warmup_steps={warm_up} is no less than the run's {steps} steps")


def _intervals(cli: Built) -> Iterator[Finding]:
    """Yield callbacks that act less often than the run is long."""
    iterations = planned_iterations(cli.trainer, cli.datamodule) or math.inf
    regular = (c for c in callbacks_of(cli.trainer) if isinstance(c, _REGULAR))
    for callback in regular:
        if (every := callback.every_n_iterations) > iterations:
            yield _wastes(
                f"trainer.callbacks.{type(callback).__name__}.every_n_iterations",
                f"{every} is more than the run's {iterations} iterations",
            )

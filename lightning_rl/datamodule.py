"""RLDataModule: prompts, engine and rewards behind Lightning's data interface."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningDataModule
from tensordict import TensorDict

from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.algos.ratio_losses import SFTMix
from lightning_rl.collect.collector import Collector, SyncCollector
from lightning_rl.collect.filters import GroupFilter
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.stats import rollout_metrics
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.engines import default_engine
from lightning_rl.engines.base import Engine, Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.evaluation import evaluation_metrics
from lightning_rl.hooks import call_hook
from lightning_rl.loader import LazyLoader, RolloutLoader
from lightning_rl.models.policy import load_tokenizer, save_skeleton
from lightning_rl.module import PolicyModule
from lightning_rl.rewards.base import Rewards
from lightning_rl.rollout import Rollout
from lightning_rl.seeding import run_seed
from lightning_rl.sft import supervised_rollout


class RLDataModule(LightningDataModule):
    """Collects graded rollouts, one batch of groups per iteration.

    Args:
        train_prompts: what to train on.
        rewards: functions ``f(prompts, completions, **columns) -> list[float]``, plain or async.
        engine: generates; None: vLLM in process, or transformers where vLLM is not installed.
        eval_prompts: held-out prompts, for ``Evaluate``, ``validate`` and ``test``.
        expert_prompts: rows with a ``completion`` to imitate beside the rollouts; see ``SFTMix``.
        expert_per_iteration: how many of them per iteration.
        filters: groups that any of them rejects are dropped and replaced by groups of new prompts.
        max_rounds: how often to generate for one batch before giving up on the filters; each round
            replaces only the groups that are missing.
        agent: how one rollout comes about.
        collector: when which rollout is generated.
        sampling: for training.
        eval_sampling: for evaluation; None: as ``sampling``. Greedy: ``temperature: 0``.
        group_size: rollouts per prompt (G).
        groups_per_iteration: prompts per iteration.
        iterations_per_epoch: iterations that Lightning counts as one epoch.
        eval_samples: rollouts per held-out prompt; from 2 on, pass@k is reported too.
        eval_limit: use only the first held-out prompts; None: all.
        success_reward: a held-out rollout with at least this reward counts as right.
        reward_weights: one per reward; None: all 1.
        max_failed_share: share of an iteration's rollouts whose grading may fail before it stops.
        seed: from which every request's own seed is derived; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range.
    """

    def __init__(
        self,
        train_prompts: PromptDataset,
        rewards: list[Callable[..., list[float]]],
        engine: Engine | None = None,
        eval_prompts: PromptDataset | None = None,
        expert_prompts: PromptDataset | None = None,
        expert_per_iteration: int = 0,
        filters: list[GroupFilter] | None = None,
        max_rounds: int = 40,
        agent: Agent = SingleTurn(),
        collector: Collector = SyncCollector(),
        sampling: Sampling = Sampling(),
        eval_sampling: Sampling | None = None,
        group_size: int = 8,
        groups_per_iteration: int = 32,
        iterations_per_epoch: int = 100,
        eval_samples: int = 1,
        eval_limit: int | None = None,
        success_reward: float = 1.0,
        reward_weights: list[float] | None = None,
        max_failed_share: float = 0.1,
        seed: int | None = None,
    ) -> None:
        super().__init__()
        require_at_least(
            1,
            group_size=group_size,
            groups_per_iteration=groups_per_iteration,
            iterations_per_epoch=iterations_per_epoch,
            eval_samples=eval_samples,
            eval_limit=eval_limit,
            max_rounds=max_rounds,
        )
        self.train_prompts = train_prompts
        self.eval_prompts = eval_prompts
        self.rewards = Rewards(rewards, reward_weights, max_failed_share)
        self.engine = engine if engine is not None else default_engine()
        self.expert_prompts = expert_prompts
        self.expert_per_iteration = expert_per_iteration
        self.filters = filters or []
        self.max_rounds = max_rounds
        self.agent = agent
        self.collector = collector
        self.sampling = sampling
        self.eval_sampling = eval_sampling or sampling
        self.group_size = group_size
        self.groups_per_iteration = groups_per_iteration
        self.iterations_per_epoch = iterations_per_epoch
        self.eval_samples = eval_samples
        self.eval_limit = eval_limit
        self.success_reward = success_reward
        self.seed = run_seed(seed)
        self._model_dir: tempfile.TemporaryDirectory[str] | None = None
        self._loader: RolloutLoader | None = None
        self._loader_state: dict[str, Any] | None = None

    # ---------------------------------------------------------------- Lightning's hooks

    def setup(self, stage: str) -> None:
        """Load prompts and start the engine, after Lightning has made its process group."""
        module = self._module()
        smallest = module.advantage.min_group_size
        if self.group_size < smallest and stage == "fit":
            raise ConfigError(
                f"group_size={self.group_size} must be >= {smallest} for "
                f"{type(module.advantage).__name__}, which compares the rollouts of a group; raise "
                "it, or use GAE"
            )
        if self.groups_per_iteration < module.minibatches and stage == "fit":
            raise ConfigError(
                f"minibatches={module.minibatches} exceeds groups_per_iteration="
                f"{self.groups_per_iteration}; a group is never split over minibatches"
            )
        mixes = isinstance(module.objective.loss, SFTMix) and smallest > 1
        if self.expert_prompts is not None and not mixes:
            raise ConfigError(
                "data.expert_prompts needs model.loss=SFTMix and an advantage that compares groups "
                f"(not {type(module.advantage).__name__}): expert rows have no reward"
            )
        self._tokenizer = tokenizer = load_tokenizer(module.model)
        self.agent.configure(tokenizer)
        self.train_prompts.load(tokenizer)
        if self.expert_prompts is not None:
            self.expert_prompts.load(tokenizer)
        if self.eval_prompts is not None:
            self.eval_prompts.load(tokenizer)
        # Where the configuration tells the engine's length, do not start it only to refuse.
        limit = getattr(self.engine, "max_model_len", None)
        for sampling in (self.sampling, self.eval_sampling):
            if limit is not None and sampling.max_tokens >= limit:
                raise _no_room(sampling, limit)
        if not self.engine.running:
            self._model_dir = tempfile.TemporaryDirectory(prefix="lightning_rl_")
            save_skeleton(module.model, self._model_dir.name)
            self.engine.start(Path(self._model_dir.name))
        self._leave_room(self.train_prompts, self.sampling)
        if self.eval_prompts is not None:
            self._leave_room(self.eval_prompts, self.eval_sampling)

    def teardown(self, stage: str) -> None:
        self.engine.close()
        if self._model_dir is not None:
            self._model_dir.cleanup()
            self._model_dir = None

    def train_dataloader(self) -> RolloutLoader:
        module = self._module()
        self._loader = RolloutLoader(
            self.collect, self.train_prompts, self.iterations_per_epoch, lambda: module.iteration
        )
        if self._loader_state is not None:
            self._loader.load_state_dict(self._loader_state)
            self._loader_state = None
        return self._loader

    # Lightning restores a loader's own state only if the checkpoint was taken within an epoch.
    def state_dict(self) -> dict[str, Any]:
        return {
            "loader": None if self._loader is None else self._loader.state_dict(),
            "experts": None if self.expert_prompts is None else self.expert_prompts.state_dict(),
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._loader_state = state_dict["loader"]
        if self.expert_prompts is not None and state_dict["experts"] is not None:
            self.expert_prompts.load_state_dict(state_dict["experts"])

    def val_dataloader(self) -> Any:
        # While fitting, the Evaluate callback evaluates: it also does so before training.
        if self.trainer is not None and self.trainer.state.fn == "fit":
            return []
        return LazyLoader(lambda _: self.evaluate()[1], 1)

    def test_dataloader(self) -> Any:
        return LazyLoader(lambda _: self.evaluate()[1], 1)

    def predict_dataloader(self) -> Any:
        """What ``lightning-rl rollout`` runs through: batches of graded rollouts."""
        return LazyLoader(self.collect, self.iterations_per_epoch)

    def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
        return batch.to(device) if isinstance(batch, TensorDict) else batch

    # ---------------------------------------------------------------- collecting

    def collect(self, iteration: int) -> list[Rollout]:
        """Generate and grade one iteration's rollouts, and tell the callbacks."""
        module, trainer = self._module(), self.trainer
        assert trainer is not None
        call_hook(trainer, "on_collect_start")
        collection = self._pipeline(module).collect_kept(
            self.train_prompts.draw,
            self.groups_per_iteration,
            self.group_size,
            self.sampling,
            iteration,
            self.filters,
            self.max_rounds,
        )
        rollouts = collection.kept
        module.record(rollout_metrics(collection.generated, collection.seconds, module.iteration))
        if self.filters:
            module.record(collection.metrics())
        if self.train_prompts.dropped:
            module.record({"data/prompts_dropped": float(self.train_prompts.dropped)})
        call_hook(trainer, "on_collect_end", rollouts)
        return rollouts + self._experts(iteration)

    def _experts(self, iteration: int) -> list[Rollout]:
        """Given completions, each a group of its own, so that its advantage is zero."""
        if self.expert_prompts is None:
            return []
        rollouts = [
            supervised_rollout(prompt, "completion", self._tokenizer)
            for prompt in self.expert_prompts.draw(self.expert_per_iteration)
        ]
        for place, rollout in enumerate(rollouts):
            rollout.group_id = f"{iteration}/expert/{place}"
        return rollouts

    def evaluate(self) -> tuple[list[Rollout], dict[str, float]]:
        """Roll out and grade the held-out prompts, always with the same seeds.

        Raises:
            ConfigError: without ``eval_prompts``.
        """
        if self.eval_prompts is None:
            raise ConfigError("there is nothing to evaluate on; set data.eval_prompts")
        module = self._module()
        with module.clock("eval"):
            prompts = self.eval_prompts.first(self.eval_limit)
            pipeline = self._pipeline(module)
            rollouts = pipeline.run(prompts, self.eval_samples, self.eval_sampling, iteration=-1)
        return rollouts, evaluation_metrics(rollouts, self.success_reward)

    def _pipeline(self, module: PolicyModule) -> RolloutPipeline:
        return RolloutPipeline(
            self.engine,
            self.agent,
            self.collector,
            self.rewards,
            self._tokenizer,
            self.seed,
            module.clock,
        )

    def _leave_room(self, prompts: PromptDataset, sampling: Sampling) -> None:
        """Prompts that would leave no room for max_tokens are dropped like other long ones."""
        room = self.engine.max_length - sampling.max_tokens
        if room < 1:
            raise _no_room(sampling, self.engine.max_length)
        if prompts.max_prompt_tokens is None or prompts.max_prompt_tokens > room:
            prompts.max_prompt_tokens = room

    def _module(self) -> PolicyModule:
        module = None if self.trainer is None else self.trainer.lightning_module
        if not isinstance(module, PolicyModule):
            raise ConfigError(
                f"RLDataModule works with a PolicyModule, not {type(module).__name__}; for "
                "supervised training use SFTDataModule"
            )
        return module


def _no_room(sampling: Sampling, max_length: int) -> ConfigError:
    return ConfigError(
        f"sampling.max_tokens={sampling.max_tokens} leaves no room for a prompt within the "
        f"engine's {max_length} tokens; lower it or raise engine.max_model_len"
    )

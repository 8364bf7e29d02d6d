"""EvaluateRollouts: accuracy on held-out prompts while SFT or DPO trains."""

from collections.abc import Callable
from functools import partial
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_rl.agents.base import Agent, SingleTurn
from lightning_rl.callbacks.base import RLCallback
from lightning_rl.collect.engine_start import EngineStart
from lightning_rl.collect.evaluation import HeldOut
from lightning_rl.collect.pipeline import RolloutPipeline
from lightning_rl.collect.tasks import grader_of, tasks_of
from lightning_rl.config.arguments import configurable
from lightning_rl.config.lightning_flags import compute_dtype
from lightning_rl.data.plans import GroupPlan
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.engines import default_engine
from lightning_rl.engines.base import Engine, drives_engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.learn.compatibility import check_sight, configure_lora
from lightning_rl.learn.dpo import DPOModule
from lightning_rl.learn.sft import SFTDataModule, SFTModule
from lightning_rl.models.model_checks import require_finite_weights
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.tokenizer import load_tokenizer, with_chat_variables
from lightning_rl.rewards.base import Rewards
from lightning_rl.rewards.calling import require_free
from lightning_rl.run.hooks import datamodule_of, is_fast_dev_run
from lightning_rl.run.processes.dist import every_rank
from lightning_rl.run.seeding import run_seed
from lightning_rl.sync.base import push
from lightning_rl.sync.memory import MemoryTransport
from lightning_rl.sync.sent import SentWeights


@configurable(prompts=prompts_of)
class EvaluateRollouts(RLCallback):
    """Rolls out held-out prompts during SFT and DPO, and records ``eval/*`` as ``Evaluate`` does.

    It evaluates before training, after every N-th optimizer step and after the last. For each
    evaluation the weights are pushed to an engine of its own, always with the same seeds; training
    is the same with and without it. Metrics go to the loggers at the optimizer step, and to
    ``trainer.callback_metrics``, so that ``ModelCheckpoint(monitor="eval/accuracy")`` finds them.

    Args:
        prompts: held-out prompts; a :class:`Mixture` for several sets.
        rewards: reward functions, as of ``RLDataModule``; None: every set of a mixture has its own.
        engine: generates; None: vLLM in process, or transformers if vLLM is not installed. With a
            ``sleep_level`` it sleeps between evaluations.
        agent: generates one rollout.
        sampling: sampling settings. Greedy: ``temperature: 0``.
        samples: rollouts per prompt; from 2 on, pass@k is reported too.
        limit: evaluate only this many prompts, the first of each set; None: all.
        success_reward: a rollout with at least this reward counts as correct.
        metrics: functions ``f(rollouts) -> dict[str, float]``, recorded as ``eval/<name>``.
        every_n_steps: optimizer steps between evaluations.
        before_training: evaluate the untrained policy too.
        seed: the seed of the rollouts; None: ``seed_everything``'s.

    Raises:
        ConfigError: for values out of range; at start, if no model is fine-tuned.
    """

    language_only = True

    def __init__(
        self,
        prompts: AnyPrompts,
        rewards: list[Callable[..., list[float]]] | None = None,
        engine: Engine | None = None,
        agent: Agent = SingleTurn(),
        sampling: Sampling = Sampling(),
        samples: int = 1,
        limit: int | None = None,
        success_reward: float = 1.0,
        metrics: list[Callable[..., dict[str, float]]] | None = None,
        every_n_steps: int = 100,
        before_training: bool = True,
        seed: int | None = None,
    ) -> None:
        require_at_least(1, samples=samples, limit=limit, every_n_steps=every_n_steps)
        require_finite(success_reward=success_reward)
        self.prompts = prompts
        self.engine = engine if engine is not None else default_engine()
        self.agent = agent
        self.sampling = sampling
        self.every_n_steps = every_n_steps
        self.before_training = before_training
        graded = None if rewards is None else Rewards(rewards)
        tasks = tasks_of(prompts, agent, GroupPlan(), graded, sampling, samples, success_reward)
        self.held_out = HeldOut(tasks, tasks, run_seed(seed), limit, metrics or [])
        """Creates the groups of the prompts, and computes their metrics."""
        self._transport = MemoryTransport()
        self._sent = SentWeights()
        self._evaluated: int | None = None  # the step that was evaluated last
        self._engine_start = EngineStart(self.engine, tasks, agent)

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Load the prompts and start the engine."""
        data = datamodule_of(trainer)
        if not isinstance(pl_module, SFTModule | DPOModule) or not isinstance(data, SFTDataModule):
            raise ConfigError(
                f"EvaluateRollouts evaluates during SFT and DPO, not a {type(pl_module).__name__}; "
                "use Evaluate, or remove the callback"
            )
        if stage != "fit":
            return
        tasks, self._evaluated = self.held_out.tasks, None
        tokenizer = load_tokenizer(str(pl_module.model), pl_module.loading)
        tokenizer = with_chat_variables(tokenizer, data.chat_template_kwargs, pl_module.day)
        check_sight(self.engine, tokenizer)
        for agent in self._engine_start.agents:
            agent.configure(tokenizer)
        self.prompts.load(tokenizer, self.agent.chat_options)
        require_free(self.prompts.row_columns(), repr(self.prompts))
        computes_in = compute_dtype(trainer)
        self.engine.serve({})
        self.engine.configure_dtype(computes_in)
        self.engine.configure_head(computes_in == "float32")
        configure_lora(self.engine, pl_module)
        save = partial(save_skeleton, pl_module.model, loading=pl_module.loading)
        trusts = pl_module.loading.trust_remote_code
        self._engine_start.start(save, trusts)
        self._transport.use_scratch(is_fast_dev_run(trainer))
        self._transport.connect(self.engine)
        grader = grader_of(tasks)
        self._pipeline = RolloutPipeline(self.engine, self.agent, grader, tokenizer, tasks=tasks)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.before_training and not trainer.ckpt_path:
            self.evaluate(trainer, pl_module)

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        # Several batches may make one step.
        if trainer.global_step != self._evaluated and self.should_evaluate(trainer):
            self.evaluate(trainer, pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step != self._evaluated:  # what stopped the run could not be foreseen
            self.evaluate(trainer, pl_module)
            self.module_of(pl_module).flush_metrics()

    def should_evaluate(self, trainer: Trainer) -> bool:
        """Return True to evaluate after this optimizer step; override it to change the schedule."""
        step = trainer.global_step
        return step > 0 and (
            step % self.every_n_steps == 0 or step == trainer.estimated_stepping_batches
        )

    def evaluate(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Roll out the held-out prompts with the present weights, and record the results."""
        assert isinstance(pl_module, SFTModule | DPOModule)  # else setup refused it
        policy, step = pl_module.loaded_policy, trainer.global_step
        require_finite_weights(policy, f"pushed to the engine after step {step}")
        with every_rank():
            push(self._transport, self.engine, policy, step, self._sent)
        _, metrics = self.held_out.run(self._pipeline)
        if drives_engine(self.engine):
            self.engine.sleep()
        pl_module.record(metrics)
        self._evaluated = step

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._transport.close()
        self._engine_start.close()

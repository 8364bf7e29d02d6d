"""Define what tests/integration/test_resume.py interrupts: a small run of each kind with state."""

from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

import lightning_rl as rl
from lightning_rl import envs
from lightning_rl.algos.schedules import AdaptiveCoefficient
from lightning_rl.callbacks import Evaluate, RLCallback, StepTimer, WeightSync
from lightning_rl.collect.samplers import Mixed, Uniform
from lightning_rl.data.mixing import ByPassRate
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.envs.rows import Clips
from lightning_rl.extend import FixedCalls, Periodic, TransformersAdapters
from lightning_rl.games import PSPG, GameModule, GameRolesModule
from lightning_rl.models.reference import PeriodicReference
from tests.support import small_run, two_roles
from tests.support.lots import LotEngine
from tests.support.resumed import PER_EPOCH, Case
from tests.support.small_run import adamw, grpo, numbers, ppo, share_of_sevens
from tests.support.three_calls import ThreeCalls
from tests.support.tiny_vision import save_picture_rows, share_of_even
from tests.support.turn_rollouts import played, random_episodes

SMALL = {"groups_per_iteration": 3, "group_size": 3, "iterations_per_epoch": PER_EPOCH}
ALL = ("within", "epoch", "collected")
AFTER_UPDATES = ("within", "epoch")
"""The places at which an untrained batch is not kept: it is made again."""


class OwnStage(RLCallback):
    """Times something of its own, once."""

    def on_collect_start(self, trainer, pl_module):
        if pl_module.iteration == 0:
            with pl_module.clock("simulator"):
                pass


def watching():
    return [WeightSync(), Evaluate(every_n_iterations=2), StepTimer(), OwnStage()]


def data(**options):
    return small_run.data_module(**SMALL | {"evaluation": {"limit": 2, "samples": 2}} | options)


def language(
    module, *, places=("within", "collected"), trainer=None, model="tiny_model", **options
):
    """Make a case of a PolicyModule; ``options`` are the data module's, anew for each run."""
    make = lambda: data(**{name: value() for name, value in options.items()})  # noqa: E731
    return Case(module, make, watching, trainer or {}, places, model)


def everything(model, **options):
    return ppo(
        model,
        **options,
        kl=rl.K3Penalty(AdaptiveCoefficient(0.1, target=1e-4)),
        reference=PeriodicReference(every_n_iterations=2),
        lr_scheduler=lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    )


def given_model(model):
    lm = AutoModelForCausalLM.from_pretrained(model)
    return rl.PolicyModule(lm, optimizer=adamw(1e-2), update={"seed": 7})


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.1)


def buffer(sampler):
    return rl.ReplayBuffer("groups.sqlite", capacity=6, max_staleness=2, sampler=sampler)


def expert_buffer():
    if not Path("experts.jsonl").exists():
        rollouts = [played([(None, 3, None)], 1.0, group_id=str(n)) for n in range(4)]
        open_rollouts(Path("experts.jsonl")).append(rollouts, 0)
    return buffer(Mixed(0.25, 0.25, "experts.jsonl"))


def mixture():
    sets = [
        rl.PromptSet("a", numbers(108, 140, seed=1), rewards=[share_of_sevens], success_reward=0.9),
        rl.PromptSet("b", numbers(200, 210, seed=1), group_size=2),
    ]
    return rl.Mixture(sets, ByPassRate(success_reward=0.01, memory=0.2), seed=2)


def recorded():
    if not Path("recorded.sqlite").exists():
        file = open_rollouts(Path("recorded.sqlite"))
        file.append(random_episodes(1, groups=6, group_size=4), 0)
        file.close()
    return rl.OfflineDataModule("recorded.sqlite", 2, seed=2, iterations_per_epoch=PER_EPOCH)


def packed(form, model):
    return grpo(model, lora=rl.LoRA(rank=4, quantization=form))


BFLOAT16 = {"precision": "bf16-true"}
LANGUAGE = {
    "grpo": language(grpo, places=ALL),
    "ppo": language(everything, places=ALL),
    "a model object": language(given_model),
    "lora": language(
        partial(grpo, lora=rl.LoRA(rank=4)),
        trainer={"precision": "bf16-mixed"},
        engine=lambda: rl.TransformersEngine(device="cpu", adapters="apart"),
    ),
    "nf4": language(partial(packed, rl.NF4()), trainer=BFLOAT16),
    "int8": language(partial(packed, rl.Int8()), trainer=BFLOAT16),
    "bfloat16": language(ppo, trainer=BFLOAT16),
    "unpacked": language(
        partial(everything, max_tokens_per_micro_batch=48), model="unpacked_model"
    ),
    "replay and curriculum": language(
        partial(grpo, correction=rl.TokenTIS(), minibatches=2),
        train_prompts=lambda: rl.PassRateCurriculum(numbers(100, 116), success_reward=0.4),
        buffer=lambda: buffer(Uniform(2)),
    ),
    "experts": language(
        partial(grpo, loss=rl.SFTMix(), correction=rl.TokenTIS()), buffer=expert_buffer
    ),
    "mixture": language(grpo, train_prompts=mixture),
    "branching": language(
        partial(grpo, advantage=rl.TreeRLOO(), ppo_epochs=2),
        agent=ThreeCalls,
        plan=lambda: rl.Branching(at=FixedCalls([2])),
    ),
    "offline": Case(
        partial(grpo, use_rollout_logprobs=True, ppo_epochs=2, minibatches=2), recorded,
        places=ALL,
    ),
}  # fmt: skip


# ---------------------------------------------------------------- several policies


def roles(model):
    return two_roles.roles_module(
        model,
        first={"lr_scheduler": lambda o: rl.WarmupCosine(o, warmup_steps=1, total_steps=6)},
        second={"schedule": Periodic(every=2), "ppo_epochs": 2, "minibatches": 2},
    )


def game_roles(model):
    policies = {name: two_roles.group(minibatches=2) for name in ("first", "second")}
    return GameRolesModule(model, policies, PSPG(rank=2, rho=1.0), [["first"], ["second"]], 7)


def roles_data(**options):
    return two_roles.roles_data(**SMALL | {"groups_per_iteration": 4} | options)


ROLES = {
    "roles": Case(
        roles, lambda: roles_data(evaluation=numbers(100, 104)), watching
    ),
    "game of roles": Case(
        game_roles,
        lambda: roles_data(engine=TransformersAdapters(device="cpu")),
        lambda: [WeightSync(), StepTimer(), OwnStage()],
    ),
}  # fmt: skip


# ---------------------------------------------------------------- pictures


def pictures(module, **options):
    def made():
        return data(
            train_prompts=save_picture_rows(Path()), evaluation=None, rewards=[share_of_even],
            **{name: value() for name, value in options.items()},
        )  # fmt: skip

    return Case(module, made, lambda: [WeightSync()], model="seeing_model")


TOWER = {"vision": rl.Vision(train_tower=True, tower_lr=1e-3)}
PICTURES = {
    "pictures": pictures(
        partial(grpo, correction=rl.TokenTIS()), buffer=lambda: buffer(Mixed(replayed=0.5))
    ),
    "a tower and a critic": pictures(
        partial(
            grpo, **TOWER, advantage=rl.GAE(), critic=rl.SeparateValueHead(), minibatches=2,
            ppo_epochs=2, max_tokens_per_micro_batch=64, gradient_checkpointing=True,
        )
    ),
    "adapters of a tower": pictures(partial(grpo, **TOWER, lora=rl.LoRA(rank=2))),
}  # fmt: skip


# ---------------------------------------------------------------- environments


def played_in(env, **options):
    options = {"num_envs": 2, "frames_per_iteration": 42, "eval_episodes": 2, "seed": 3} | options
    return envs.EnvDataModule(env, iterations_per_epoch=PER_EPOCH, **options)


OFF_POLICY = {
    "capacity": 100,
    "warmup_frames": 60,
    "updates_per_iteration": 2,
    "batch_size": 8,
    "seed": 3,
}


def dqn(model):
    agent = envs.QAgent(envs.MLPBody([16], "relu"))
    # Targets are copied after every third update, so a resumed run has to know their age.
    return envs.OffPolicyModule({"agent": agent}, tau=1.0, target_every=3, **OFF_POLICY)


def sac(model):
    agent = envs.SACAgent(envs.MLPBody([16], "relu"), critic=envs.ActionCritic(hidden=[16]))
    return envs.OffPolicyModule({"agent": agent}, **OFF_POLICY)


def environment(module, env, **options):
    callbacks = lambda: [Evaluate(2), StepTimer(), OwnStage()]  # noqa: E731
    if not options.get("eval_episodes", 2):
        callbacks = list
    return Case(module, lambda: played_in(env(), **options), callbacks, places=AFTER_UPDATES)


def walking():
    return envs.Gym("tests.support.worlds:Walk-v0")


def actor_critic(model, body=None, **options):
    agent = envs.ActorCritic(body or envs.MLPBody([16], "relu"), share_body=body is not None)
    return envs.ActorCriticModule({"agent": agent}, seed=3, minibatches=2, **options)


def game(model):
    return GameModule(
        {name: envs.ActorCritic(body=envs.MLPBody([8])) for name in ("row", "column")},
        PSPG(rank=3),
        order=[["row"], ["column"]],
        advantage=envs.StepGAE(gamma=1.0, normalize=False),
        optimizer=lambda p: torch.optim.SGD(p, lr=0.3),
        epochs=2,
        minibatches=2,
    )


PENNIES = {"pays": [[[3, -1], [-1, 1]], [[-3, 1], [1, -1]]], "rounds": 2, "num_envs": 32}
ENVIRONMENTS = {
    "actor and critic": environment(actor_critic, walking),
    "memory": environment(
        lambda model: actor_critic(model, envs.GRUBody(hidden=8), clips=Clips(7, 5, num_samples=8)),
        walking,
    ),
    "torchrl": environment(
        actor_critic,
        lambda: envs.TorchRLEnv(
            "torchrl.envs.GymEnv",
            {"env_name": "CartPole-v1", "categorical_action_encoding": True},
        ),
    ),
    "pool": environment(
        actor_critic,
        lambda: envs.PooledGym("tests.support.worlds:Walk-v0", workers=2, force_sync=True),
        eval_episodes=0,
    ),
    "dqn": environment(dqn, lambda: envs.Gym("CartPole-v1")),
    "sac": environment(sac, lambda: envs.Gym("Pendulum-v1")),
    "game": environment(
        game, lambda: envs.TorchRLEnv("recipes.matrix_games.env.MatrixGame", PENNIES),
        num_envs=32, frames_per_iteration=64, eval_episodes=0,
    ),
}  # fmt: skip

CASES = LANGUAGE | ROLES | PICTURES | ENVIRONMENTS
SLOW = {
    "a model object", "bfloat16", "int8", "game of roles", "a tower and a critic",
    "adapters of a tower", "memory", "torchrl", "pool", "sac",
}  # fmt: skip
"""Cases of ``make test-all`` alone."""

# ---------------------------------------------------------------- not to the bit


def streamed(model, **options):
    return grpo(model, optimizer=sgd, **options)


STREAMED = [
    language(
        streamed, collector=lambda: rl.StreamedCollector(1),
        engine=lambda: LotEngine(device="cpu"),
    ),
    pictures(
        partial(streamed, **TOWER), collector=lambda: rl.StreamedCollector(1),
        engine=lambda: LotEngine(device="cpu"),
    ),
]  # fmt: skip


def ahead(collector):
    return language(grpo, collector=collector, train_prompts=lambda: numbers(100, 180, seed=1))

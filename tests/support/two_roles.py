"""Provide rollouts that two policies write, and a run in which both learn."""

from lightning_rl import LoRA
from lightning_rl.engines import TransformersEngine
from lightning_rl.extend import Agent, Episode, MultiPolicyEngine
from lightning_rl.games import RolePolicy, RolesModule
from tests.support.grouped import grouped
from tests.support.small_run import adamw, data_module


class Talk(Agent):
    """The first speaks, then the second, who reads it; each is paid for sevens of its own."""

    async def run(self, rollout, engine, sampling):
        episode, own = Episode(rollout), rollout.prompt.token_ids
        _, first = await episode.call(engine, own, sampling, "first")
        _, second = await episode.call(engine, [*own, *first.token_ids, 2], sampling, "second")
        rollout.role_rewards = {
            "first": first.token_ids.count(10) / 6,
            "second": second.token_ids.count(10) / 6,
        }
        episode.end()
        return rollout


def total(completions, completion_ids, **columns):
    """Return the share of sevens among all tokens."""
    return [ids.count(10) / 12 for ids in completion_ids]


def group(**options) -> RolePolicy:
    options = {"lora": LoRA(rank=4), "optimizer": adamw(1e-2), "seed": 7} | options
    return RolePolicy(**grouped(**options))


def roles_module(tiny_model, first=None, second=None, **options) -> RolesModule:
    policies = {"first": group(**(first or {})), "second": group(**(second or {}))}
    return RolesModule(str(tiny_model), policies, **options)


def roles_data(**options):
    engines = {name: TransformersEngine(device="cpu") for name in ("first", "second")}
    options = {
        "engine": MultiPolicyEngine(engines), "agent": Talk(), "rewards": [total],
        "evaluation": None, "group_size": 4, "groups_per_iteration": 4, "iterations_per_epoch": 4,
    } | options  # fmt: skip
    return data_module(**options)

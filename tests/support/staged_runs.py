"""Provide staged runs against a server of the tests: is a number even?"""

from pathlib import Path
from typing import Any

from lightning_rl.data.sources import IterablePrompts
from lightning_rl.games import Nip
from lightning_rl.games.protocols.text_scenario import Instructions, TextScenario
from lightning_rl.games.staged.chat import ChatGroup, OpenAIChat
from lightning_rl.games.staged.expert_iteration import ExpertIteration
from lightning_rl.games.staged.openai_jobs import OpenAIFineTuning
from lightning_rl.games.staged.trainer import StagedTrainer

SCENARIO = TextScenario(
    {
        "prover": Instructions("Prove that {number} is {kind}."),
        "verifier": Instructions("{number} is {kind}. Is it even?"),
    }
)


def numbers(*bounds: int) -> IterablePrompts:
    """Return rows about the numbers of a range."""
    kinds = ["even", "odd"]
    about = {"kinds": kinds, "ünï": None}
    return IterablePrompts(
        [
            {"number": n, "kind": kinds[n % 2], "label": 1 - n % 2, "about": about}
            for n in range(*bounds)
        ]
    )


def group_of(url: str, *agents: str, **options: Any) -> ChatGroup:
    """Return agents whose model, and its jobs, are a server's."""
    shared = {"api_key_env": None, "first_wait_s": 0.0}
    jobs = options.pop("jobs", OpenAIFineTuning(url, **shared))
    return ChatGroup(list(agents), "gpt", OpenAIChat(url, **shared), jobs, **options)


def staged(run_dir: Path, url: str, **options: Any) -> StagedTrainer:
    """Run two rounds: the prover speaks, the verifier decides."""
    given = {
        "protocol": Nip(2),
        "scenario": SCENARIO,
        "train": numbers(6),
        "test": numbers(100, 104),
        "groups": {"all": group_of(url, "prover", "verifier")},
        "algorithm": ExpertIteration(),
        "iterations": 2,
        "min_rows": 2,
        "poll_s": 0.0,
        "seed": 3,
    }
    return StagedTrainer(str(run_dir), **(given | options))

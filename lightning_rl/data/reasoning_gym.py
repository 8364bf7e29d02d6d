"""Tasks of the reasoning-gym library as prompts, and its verifiers as a reward."""

from collections.abc import Iterable
from functools import cache
from typing import Any

from lightning_rl.config.arguments import configurable
from lightning_rl.data.prompts import PromptDataset
from lightning_rl.errors import ConfigError


@configurable
class ReasoningGymPrompts(PromptDataset):
    """Procedural questions; grade them with :func:`reasoning_gym_score`.

    Args:
        task: a reasoning-gym dataset name, e.g. ``chain_sum``.
        size: how many questions.
        task_seed: which questions. Question i is made from ``task_seed + i``, so held-out prompts
            need one that is at least ``size`` away; short tasks may repeat questions even then.
        config: the task's own options, e.g. ``{"min_terms": 2}``.
        system: a system message; None: the question is the only message.
        chat: render through the tokenizer's chat template; False: plain text.
    """

    def __init__(
        self,
        task: str,
        size: int = 1000,
        task_seed: int = 0,
        config: dict[str, Any] | None = None,
        system: str | None = None,
        chat: bool = True,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        self.task = task
        self.size = size
        self.task_seed = task_seed
        self.config = config or {}
        self.system = system
        self.chat = chat

    def __repr__(self) -> str:
        return f"ReasoningGymPrompts({self.task!r})"

    def read(self) -> Iterable[tuple[str, Any]]:
        for number, entry in enumerate(self._dataset()):
            question: Any = entry["question"]
            if self.chat:
                system = [] if self.system is None else [{"role": "system", "content": self.system}]
                question = [*system, {"role": "user", "content": question}]
            row = {self.prompt_column: question, "entry": entry, "task": self.task}
            yield f"{self!r}: row {number}", row

    def _dataset(self) -> Iterable[dict[str, Any]]:
        try:
            import reasoning_gym
        except ImportError as error:
            raise ConfigError(
                "ReasoningGymPrompts needs `pip install lightning_rl[recipes]` (reasoning-gym)"
            ) from error
        try:
            return reasoning_gym.create_dataset(
                self.task, size=self.size, seed=self.task_seed, **self.config
            )
        except (ValueError, TypeError, AssertionError) as error:
            raise ConfigError(f"reasoning-gym task={self.task!r} {self.config}: {error}") from error


def reasoning_gym_score(
    completions: list[Any], entry: list[dict[str, Any]], task: list[str], **columns: Any
) -> list[float]:
    """The task's own verifier on each answer, in [0, 1].

    The answer is what stands between the last ``<answer>`` and ``</answer>``, else the whole text.
    """
    scores = []
    for completion, item, name in zip(completions, entry, task, strict=True):
        text = completion if isinstance(completion, str) else completion[-1]["content"]
        scores.append(float(_scorer(name)(_answer(text), item)))
    return scores


@cache
def _scorer(task: str) -> Any:
    import reasoning_gym

    return reasoning_gym.get_score_answer_fn(task)


def _answer(text: str) -> str:
    opened = text.rfind("<answer>")
    if opened < 0:
        return text.strip()
    return text[opened + len("<answer>") :].split("</answer>")[0].strip()

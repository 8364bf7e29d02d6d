"""DemonstrationRows: given completions that a batch imitates beside its own rollouts."""

from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from lightning_rl.config.arguments import configurable
from lightning_rl.data.sources import AnyPrompts, prompts_of
from lightning_rl.data.supervised import supervised_rollout
from lightning_rl.errors import require_at_least
from lightning_rl.rollout import Rollout
from lightning_rl.run.processes import dist


@configurable(prompts=prompts_of)
@dataclass(frozen=True)
class DemonstrationRows:
    """Rows with a ``completion`` to imitate in addition to the rollouts; needs the loss ``SFTMix``.

    Args:
        prompts: the rows, or the path of a file; in Python also a list of rows, or a table.
        per_iteration: number of rows per iteration.

    Raises:
        ConfigError: unless ``per_iteration`` >= 1.
    """

    prompts: AnyPrompts
    per_iteration: int

    def __post_init__(self) -> None:
        require_at_least(1, **{"demonstrations.per_iteration": self.per_iteration})

    def rollouts(self, iteration: int, tokenizer: PreTrainedTokenizerBase) -> list[Rollout]:
        """Return this rank's share of the rows of the next iteration, as rollouts.

        Each is a group by itself, so that its advantage is zero.
        """
        rollouts = []
        drawn = enumerate(self.prompts.draw(self.per_iteration))
        for number, prompt in dist.shard(list(drawn)):
            rollout = supervised_rollout(prompt, "completion", tokenizer)
            rollout.group_id = f"{iteration + 1}/demonstration/{number}"
            rollouts.append(rollout)
        return rollouts

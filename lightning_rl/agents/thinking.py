"""ThinkingBudget: a chain of thought of limited length, always followed by an answer."""

from collections.abc import Sequence
from dataclasses import replace

from transformers import PreTrainedTokenizerBase

from lightning_rl.agents.base import Agent
from lightning_rl.agents.episode import Episode
from lightning_rl.config.arguments import configurable
from lightning_rl.data.chats import CLOSE, OPEN
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError, require_at_least
from lightning_rl.rollout import Rollout


@configurable
class ThinkingBudget(Agent):
    """One completion, whose thought is closed for the model when it gets too long.

    A thought begins with ``<think>``, which the model writes or the chat template already has, and
    ends with ``</think>``. If it is still open after ``max_thinking_tokens`` tokens of the
    completion, ``closing`` is appended, and the model continues with its answer. The model reads
    those tokens but did not write them, so they have no loss. The budget does not change a
    completion that does not think, or ends its thought in time. ``sampling.max_tokens`` counts all
    tokens.

    ``logged/thinking/closed`` is the share of completions whose thought was closed this way, and
    ``logged/thinking/tokens`` the number of tokens in the thought, or 0.

    Args:
        max_thinking_tokens: how many tokens a completion may have before its thought is closed;
            must be below ``sampling.max_tokens``.
        closing: the text that closes a thought; a sentence before its ``</think>`` may tell the
            model that its time is over.

    Raises:
        ConfigError: for values out of range, a ``closing`` without ``</think>``, or a tokenizer in
            which ``<think>`` and ``</think>`` are not a token each.
    """

    within_max_tokens = True

    def __init__(self, max_thinking_tokens: int, closing: str = f"\n{CLOSE}\n\n") -> None:
        require_at_least(1, max_thinking_tokens=max_thinking_tokens)
        if CLOSE not in closing or OPEN in closing:
            raise ConfigError(
                f"ThinkingBudget closing={closing!r} must contain {CLOSE} and no {OPEN}; otherwise "
                "the thought stays open"
            )
        self.max_thinking_tokens = max_thinking_tokens
        self.closing = closing
        self._tokenizer: PreTrainedTokenizerBase | None = None

    def configure(self, tokenizer: PreTrainedTokenizerBase) -> None:
        tags = {tag: _encoded(tokenizer, tag) for tag in (OPEN, CLOSE)}
        for tag, tokens in tags.items():
            if len(tokens) != 1:
                raise ConfigError(
                    "ThinkingBudget needs a reasoning model such as Qwen3: this tokenizer splits "
                    f"{tag!r} into {len(tokens)} tokens; leave the agent out, or add the token"
                )
        [self._open], [self._close] = tags.values()
        self._tokenizer = tokenizer

    async def run(self, rollout: Rollout, engine: Engine, sampling: Sampling) -> Rollout:
        tokenizer, budget = self._tokenizer, self.max_thinking_tokens
        if tokenizer is None:
            raise ConfigError("ThinkingBudget has no tokenizer; call configure(tokenizer) first")
        if budget >= sampling.max_tokens:
            raise ConfigError(
                f"max_thinking_tokens={budget} leaves no room for an answer within "
                f"sampling.max_tokens={sampling.max_tokens}; lower it, or raise max_tokens"
            )
        prompt, episode = rollout.prompt.token_ids, Episode(rollout)
        least = min(sampling.min_tokens, budget)
        thinking = replace(sampling, max_tokens=budget, min_tokens=least)
        shown = rollout.prompt.placed
        _, begun = await episode.call(engine, prompt, thinking, pictures=shown)
        written, reason = list(begun.token_ids), begun.finish_reason
        given = self._given(prompt + written) if reason == "length" else []
        left = min(sampling.max_tokens, engine.max_length - len(prompt))
        left -= len(written) + len(given)
        if reason == "length" and left > 0:
            answering = replace(sampling, max_tokens=left, min_tokens=min(least, left))
            asked = prompt + written + given
            _, rest = await episode.call(engine, asked, answering, pictures=shown)
            written, reason = written + given + rest.token_ids, rest.finish_reason
        else:
            given = []
        episode.end(reason)
        rollout.logged |= {
            "thinking/closed": float(bool(given)),
            "thinking/tokens": float(self._thought(prompt, written)),
        }
        # Where penalties make two rows of it, it is one completion nevertheless.
        thought = end_tokens_of(tokenizer).cut(written)
        text = rollout.prompt.begun + str(tokenizer.decode(thought, skip_special_tokens=True))
        chat = not isinstance(rollout.prompt.prompt, str)
        rollout.completion = [{"role": "assistant", "content": text}] if chat else text
        return rollout

    def _given(self, token_ids: Sequence[int]) -> list[int]:
        """Return the tokens that close the thought; none unless one is open."""
        assert self._tokenizer is not None
        return _encoded(self._tokenizer, self.closing) if self._is_open(token_ids) else []

    def _is_open(self, token_ids: Sequence[int]) -> bool:
        tags = [token for token in token_ids if token in (self._open, self._close)]
        return tags[-1:] == [self._open]

    def _thought(self, prompt: Sequence[int], written: Sequence[int]) -> int:
        """Return how many tokens of a completion precede the end of its thought; 0 without one."""
        if not self._is_open(prompt) and self._open not in written:
            return 0
        return written.index(self._close) if self._close in written else len(written)


def _encoded(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False)["input_ids"])

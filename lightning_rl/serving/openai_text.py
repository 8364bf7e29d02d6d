"""Completions of plain prompts in the format of OpenAI's API."""

from collections.abc import Iterator
from itertools import accumulate
from typing import Any

from transformers import PreTrainedTokenizerBase

from lightning_rl.rollout import Message
from lightning_rl.serving.api_format import (
    ChoicesFormat,
    pieces,
    read_count,
    read_wanted,
    token_ids_of,
)
from lightning_rl.serving.ask import DEFAULT_MODEL, Answer, Ask, Terms
from lightning_rl.serving.fields import Fields, wrong_kind, wrong_value
from lightning_rl.serving.limits import RequestLimits
from lightning_rl.serving.settings import answer_form, asked_sampling
from lightning_rl.vision.reader import encode


class CompletionsFormat(ChoicesFormat):
    """Serves ``/v1/completions``."""

    prefix, whole, part = "cmpl", "text_completion", "text_completion"

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer

    def read(self, body: Any, terms: Terms) -> Ask:
        fields = Fields(body)
        model = fields.get("model", str) or DEFAULT_MODEL
        role = terms.role_of(model)
        prompts, count = self._prompts(fields, terms.limits)
        fields.refuse("echo", "the prompt is the client's own", False)
        fields.refuse("suffix", "the model reads what comes before only", "")
        fields.refuse("best_of", "use n, and choose", 1, fields.body.get("n"))
        fields.refuse("logit_bias", "its tokens could not be scored", {})
        reason = "the engine tells the logprob of the sampled token only; logprobs: 0 gives it"
        fields.refuse("logprobs", reason, 0)
        form = answer_form(fields)
        sampling = asked_sampling(fields, terms, "max_tokens", structured_outputs=form)
        wanted = read_wanted(fields) | {"logprobs": fields.body.get("logprobs") is not None}
        return Ask(model, role, sampling, count, prompts=prompts, **wanted)

    def _prompts(self, fields: Fields, limits: RequestLimits) -> tuple[list[list[int]], int]:
        """Read one or several prompts as token ids, and the number of answers to each."""
        given = fields.body.get("prompt")
        if given is None:
            fields.need("prompt", str)
        many = given if isinstance(given, list) else [given]
        if not many:
            raise wrong_value("prompt", given, "a text, token ids, or an array of either")
        if isinstance(many[0], int):
            many = [many]
        count = read_count(fields, limits, len(many))
        return [self._token_ids(prompt) for prompt in many], count

    def _token_ids(self, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            prompt = encode(self.tokenizer, prompt, (), special=True)[0]
        if not isinstance(prompt, list) or not all(type(token) is int for token in prompt):
            raise wrong_kind("prompt", prompt, str)
        size = len(self.tokenizer)
        if not prompt or not all(0 <= token < size for token in prompt):
            raise wrong_value("prompt", prompt, f"one token or more, with ids below {size}")
        return prompt

    def choice(self, index: int, ask: Ask, answer: Answer) -> Message:
        return {
            "index": index,
            "text": answer.text,
            "logprobs": self._logprobs(answer) if ask.logprobs else None,
            "finish_reason": answer.finish_reason,
            **(token_ids_of(answer) if ask.token_ids else {}),
        }

    def chunks(self, index: int, ask: Ask, answer: Answer) -> Iterator[Message]:
        for piece in pieces(answer.text):
            yield {"index": index, "text": piece, "logprobs": None, "finish_reason": None}
        yield self.choice(index, ask, answer) | {"text": ""}

    def _logprobs(self, answer: Answer) -> Message:
        tokens = [str(self.tokenizer.decode([token])) for token in answer.completion.token_ids]
        return {
            "tokens": tokens,
            "token_logprobs": answer.completion.logprobs,
            "top_logprobs": None,
            "text_offset": list(accumulate(map(len, tokens), initial=0))[:-1],
        }

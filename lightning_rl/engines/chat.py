"""ChatEngine: answers chat messages with the model of a directory."""

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.engines.base import Engine
from lightning_rl.engines.hf.engine import TransformersEngine
from lightning_rl.engines.sampling import Sampling
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Message


class ChatEngine:
    """A model that is not trained here; :meth:`load` can replace it.

    Args:
        engine: None: ``TransformersEngine``.
        sampling: sampling settings of its answers.
    """

    def __init__(self, engine: Engine | None, sampling: Sampling) -> None:
        self.engine = engine if engine is not None else TransformersEngine()
        self.sampling = sampling
        self.model: str | None = None
        self._tokenizer: Any = None
        self._directory: tempfile.TemporaryDirectory[str] | None = None

    def load(self, model: str) -> None:
        """Answer with this model from now on; does nothing if it is already loaded.

        Raises:
            ConfigError: if it has no chat template.
        """
        # Here, because who asks over HTTP needs none of it.
        from lightning_rl.models.model_files import save_skeleton
        from lightning_rl.models.policy import Policy
        from lightning_rl.models.tokenizer import load_tokenizer

        if self.engine.running and self.model == model:
            return
        self._tokenizer = load_tokenizer(model)
        if self._tokenizer.chat_template is None:
            raise ConfigError(f"the model {model!r} has no chat template; use a chat model")
        if not self.engine.running:
            self._directory = tempfile.TemporaryDirectory(prefix="lightning_rl_chat_")
            save_skeleton(model, self._directory.name)
            self.engine.start(Path(self._directory.name))
        self.engine.load_weights(Policy(model).named_weights(), self.engine.version + 1)
        self.model = model

    async def ask(self, messages: Sequence[Message], seed: int) -> tuple[str, str]:
        """Return the answer to a chat, and its ``finish_reason``; equal arguments give equal
        answers.
        """
        text = self._tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        token_ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        completion = await self.engine.generate(token_ids, self.sampling, seed)
        said = end_tokens_of(self._tokenizer).cut(completion.token_ids)
        answer = self._tokenizer.decode(said, skip_special_tokens=True)
        return str(answer), str(completion.finish_reason)

    def close(self) -> None:
        """Free the engine; it may be called twice."""
        self.engine.close()
        if self._directory is not None:
            self._directory.cleanup()
            self._directory = None

"""Rollouts as a pack holds them: with what an update reads, and with texts or their hashes."""

from dataclasses import replace
from hashlib import sha256
from typing import Any

from lightning_rl.config.secrets import found_in, without_secrets
from lightning_rl.rollout import Rollout

_KEPT = ("role", "type", "name")
"""Keys of a message whose texts only say what kind of message it is."""


def packed(rollout: Rollout, hashed: bool) -> Rollout:
    """Return a copy without secrets in its texts.

    Args:
        rollout: a recorded rollout.
        hashed: True to replace the prompt, completion, columns, error and states by the SHA-256 of
            each text, in hex. Tokens, from which a tokenizer makes the text again, stay.
    """
    change = _hashed if hashed else without_secrets
    prompt = replace(
        rollout.prompt,
        prompt=change(rollout.prompt.prompt),
        columns=change(rollout.prompt.columns),
        begun=change(rollout.prompt.begun) if rollout.prompt.begun else "",
    )
    calls = [
        replace(call, state=None if call.state is None else change(call.state))
        for call in rollout.calls
    ]
    return replace(
        rollout,
        prompt=prompt,
        calls=calls,
        completion=change(rollout.completion),
        error=change(rollout.error) if rollout.error else rollout.error,
        extra=change(rollout.extra),
    )


def secrets_in(rollouts: list[Rollout]) -> int:
    """Return the number of secrets in the rollouts' texts."""
    texts = [(r.prompt.prompt, r.prompt.columns, r.completion, r.error, r.extra) for r in rollouts]
    return len(found_in(texts))


def _hashed(value: Any) -> Any:
    if isinstance(value, str):
        return sha256(value.encode("utf-8", "surrogatepass")).hexdigest()
    if isinstance(value, dict):
        return {key: v if key in _KEPT else _hashed(v) for key, v in value.items()}
    return [_hashed(item) for item in value] if isinstance(value, list | tuple) else value

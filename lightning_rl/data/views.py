"""The packed batch in the shapes that other TensorDict code expects, such as torchrl's.

Training does not use these; they are copies, made on request.
"""

import math
from collections.abc import Sequence

import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict
from torch import Tensor

from lightning_rl.data.batch import token_rows
from lightning_rl.data.episodes import calls_of, received
from lightning_rl.data.packing import packed_rows
from lightning_rl.errors import ConfigError
from lightning_rl.rollout import Rollout, as_text


def as_padded(batch: TensorDict, length: int | None = None, pad_token_id: int = 0) -> TensorDict:
    """Return all tokens of a packed batch, one row per rollout, right-padded: batch size [R, L].

    It holds every column of ``batch["tokens"]`` under its name, zero (``versions``, ``call`` and
    ``state`` -1, ``input_ids`` ``pad_token_id``) where ``attention_mask`` is False.

    Args:
        batch: R packed rollouts.
        length: L; None: that of the longest rollout. Set it if several batches are to go into
            one buffer.
        pad_token_id: fills ``input_ids`` after a rollout's end.

    Raises:
        ConfigError: if a rollout has more than ``length`` tokens.
    """
    lengths = batch["rollouts", "length"]
    longest = int(lengths.max())
    if length is not None and length < longest:
        raise ConfigError(
            f"length={length} is less than the {longest} tokens of the longest rollout; raise it"
        )
    grid = _Grid(token_rows(batch), len(lengths), length)
    columns = {name: grid.fill(values) for name, values in batch["tokens"].items()}
    there = grid.fill(torch.ones_like(batch["tokens", "loss_mask"]))
    for name in {"versions", "call", "state"} & columns.keys():
        columns[name] = columns[name].masked_fill(~there, -1)
    columns["input_ids"] = columns["input_ids"].masked_fill(~there, pad_token_id)
    return TensorDict(columns | {"attention_mask": there}, batch_size=there.shape)


def as_torchrl(
    batch: TensorDict,
    rollouts: Sequence[Rollout] | None = None,
    length: int | None = None,
    pad_token_id: int = 0,
) -> TensorDict:
    """One row per rollout, batch size [R]: an episode of a single step, as torchrl sees it.

    A rollout that was cut into several rows has as many here, each with the rollout's reward.

    ``len``, indices, ``torchrl.data.ReplayBuffer.extend`` and ``MCAdvantage`` take it. Its keys:

    - ``next``: ``reward``, ``done``, ``terminated`` (always True: nothing follows), each (R, 1);
    - every column of ``batch["rollouts"]`` (``group``, ``length``, ``truncated``, ...), and
      ``version_min`` and ``version_max`` of the tokens that the model wrote (-1 without any);
    - ``tokens``: :func:`as_padded`, batch size [R, L];
    - with ``rollouts`` as text ``id``, ``group_id``, ``prompt_id``, ``query`` (the prompt),
      ``response``, ``status`` and ``finish_reason``; as dictionaries, however deep, the prompt's
      ``columns`` and ``extra``; as numbers ``reward_parts``, NaN where a reward did not apply.

    Args:
        batch: R packed rollouts.
        rollouts: those that were packed, in order; None: without text.
        length: L of ``tokens``, see :func:`as_padded`.
        pad_token_id: fills ``input_ids`` after a rollout's end.

    Raises:
        ConfigError: if ``rollouts`` do not have R rows, or a row has more than ``length`` tokens.
    """
    count = len(batch["rollouts"])
    ended = torch.ones(count, 1, dtype=torch.bool, device=batch["rollouts", "length"].device)
    reward = batch["rollouts", "reward"].unsqueeze(1)
    view = TensorDict(
        {
            **batch["rollouts"].clone(),
            **_version_range(batch),
            "tokens": as_padded(batch, length, pad_token_id),
            "done": ~ended,
            "terminated": ~ended,
            "next": TensorDict(
                {"reward": reward.clone(), "done": ended, "terminated": ended.clone()},
                batch_size=[count],
            ),
        },
        batch_size=[count],
    )
    return view if rollouts is None else _with_text(view, rollouts)


def as_steps(batch: TensorDict) -> TensorDict:
    """One step per token that the model wrote, batch size [R, S], S the most of any rollout.

    ``torchrl.objectives.value.GAE`` takes it, with ``gamma`` and ``lam`` per token as in
    :class:`~lightning_rl.GAE`: an environment's tokens are not steps. Its keys:

    - ``mask``: True for a step, False for padding, whose values are all zero;
    - ``action``: the token, ``action_log_prob``: its logprob under the old policy (the engine's,
      where ``old_logprobs`` are not computed);
    - ``state_value`` (R, S, 1) where there is a critic, ``advantage`` and ``value_target`` where
      they are computed;
    - ``next``: ``reward`` (what calls were paid at their last steps, the rest of the rollout's at
      its last, and ``token_rewards``), ``done``, ``terminated``, and ``state_value``, zero after
      the end; each (R, S, 1).

    Raises:
        ConfigError: if a rollout has no token that the model wrote.
    """
    tokens = batch["tokens"]
    live = tokens["loss_mask"].nonzero().squeeze(1)
    row = token_rows(batch)[live]
    count = len(batch["rollouts"])
    written = torch.bincount(row, minlength=count)
    if not bool((written > 0).all()):
        raise ConfigError(
            f"rollout {int((written == 0).nonzero()[0])} has no token that the model wrote, "
            "so it has no steps; leave it out"
        )
    grid = _Grid(row, count)
    mask = grid.fill(torch.ones_like(live, dtype=torch.bool))
    rewards = received(batch, calls_of(batch))[live]
    old = tokens["old_logprobs" if "old_logprobs" in tokens else "rollout_logprobs"]
    place = torch.arange(mask.shape[1], device=mask.device)
    done = (place >= (written - 1).unsqueeze(1)).unsqueeze(2)
    steps = {
        "mask": mask,
        "action": grid.fill(tokens["input_ids"][live]),
        "action_log_prob": grid.fill(old[live]),
        "done": torch.zeros_like(done),
        "terminated": torch.zeros_like(done),
    }
    after = {
        "reward": grid.fill(rewards).unsqueeze(2),
        "done": done,
        "terminated": done.clone(),
    }
    names = {"values": "state_value", "advantages": "advantage", "returns": "value_target"}
    for ours, theirs in names.items():
        if ours in tokens:
            steps[theirs] = grid.fill(tokens[ours][live]).unsqueeze(2)
    if "values" in tokens:
        values = steps["state_value"]
        after["state_value"] = torch.cat([values[:, 1:], torch.zeros_like(values[:, :1])], 1)
    return TensorDict(
        {**steps, "next": TensorDict(after, batch_size=mask.shape)}, batch_size=mask.shape
    )


class _Grid:
    """Puts flat values (M,) of ascending rows (M,) into a padded (count, width) tensor."""

    def __init__(self, row: Tensor, count: int, width: int | None = None) -> None:
        sizes = torch.bincount(row, minlength=count)
        step = torch.arange(len(row), device=row.device) - (sizes.cumsum(0) - sizes)[row]
        self.at = row, step
        self.shape = count, int(sizes.max()) if width is None else width

    def fill(self, values: Tensor) -> Tensor:
        return values.new_zeros(self.shape).index_put(self.at, values)


def _version_range(batch: TensorDict) -> dict[str, Tensor]:
    versions, row = batch["tokens", "versions"], token_rows(batch)
    written = versions >= 0
    versions, row = versions[written], row[written]
    none = versions.new_full((len(batch["rollouts"]),), -1)
    return {
        f"version_{end[1:]}": none.scatter_reduce(0, row, versions, end, include_self=False)
        for end in ("amin", "amax")
    }


def _with_text(view: TensorDict, rollouts: Sequence[Rollout]) -> TensorDict:
    count, given = len(view), len(rollouts)
    rollouts = [rollout for rollout, _ in packed_rows(rollouts)]
    if len(rollouts) != count:
        raise ConfigError(
            f"{given} rollouts do not match a batch of {count}; pass those that were "
            "packed, in order"
        )
    texts = {
        "id": [r.id for r in rollouts],
        "group_id": [r.group_id for r in rollouts],
        "prompt_id": [r.prompt.id for r in rollouts],
        "query": [as_text(r.prompt.prompt) for r in rollouts],
        "response": [as_text(r.completion) for r in rollouts],
        "status": [r.status.value for r in rollouts],
        "finish_reason": [r.finish_reason or "" for r in rollouts],
    }
    # Stacked as they are, lists would be taken for dimensions.
    nested = {
        "columns": [NonTensorData(r.prompt.columns) for r in rollouts],
        "extra": [NonTensorData(r.extra) for r in rollouts],
    }
    for name, values in (texts | nested).items():
        view[name] = NonTensorStack(*values, batch_size=[count])
    names = dict.fromkeys(name for r in rollouts for name in r.reward_parts)
    scores = {name: [r.reward_parts.get(name) for r in rollouts] for name in names}
    parts = {
        name: torch.tensor([math.nan if score is None else score for score in column])
        for name, column in scores.items()
    }
    view["reward_parts"] = TensorDict(parts, batch_size=[count]).to(view.device)
    return view

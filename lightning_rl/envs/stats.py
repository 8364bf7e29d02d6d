"""Metrics of finished episodes: of a batch, and of an evaluation."""

from collections.abc import Sequence

from lightning_rl.envs.collector import EnvEpisode
from lightning_rl.errors import DataError
from lightning_rl.run.files.metrics import summarize


def episode_metrics(
    episodes: Sequence[EnvEpisode], frames: int, seconds: float, judged: str | None = None
) -> dict[str, float]:
    """Return ``reward/*`` and ``rollout/*`` of a batch of ``frames`` steps that took ``seconds``.

    The reward of an episode is the sum over its steps; ``judged`` names the agent whose reward it
    is; None: the mean over all. Without a finished episode there are no reward metrics.
    """
    metrics = {
        "rollout/frames": float(frames),
        "rollout/frames_per_s": frames / max(seconds, 1e-9),
        "rollout/episodes": float(len(episodes)),
    }
    if episodes:
        metrics["rollout/length_mean"] = summarize([float(e.length) for e in episodes])[0]
        metrics["rollout/terminated_share"] = sum(e.terminated for e in episodes) / len(episodes)
        metrics |= _rewards("reward", episodes, "", judged)
    return metrics


def evaluation_metrics(
    episodes: Sequence[EnvEpisode], success_reward: float | None, judged: str | None = None
) -> dict[str, float]:
    """Return ``eval/*`` of separate episodes; ``accuracy`` is the share with ``success_reward``.

    Raises:
        DataError: if there are no episodes.
    """
    if not episodes:
        raise DataError("there are no episodes to evaluate; play some first")
    rewards = [_reward(episode, judged) for episode in episodes]
    metrics = _rewards("eval", episodes, "reward_", judged) | {
        "eval/reward_min": min(rewards),
        "eval/reward_max": max(rewards),
        "eval/length_mean": summarize([float(e.length) for e in episodes])[0],
    }
    if success_reward is not None:
        right = sum(reward >= success_reward for reward in rewards)
        metrics["eval/accuracy"] = right / len(rewards)
    return metrics


def _reward(episode: EnvEpisode, judged: str | None) -> float:
    return episode.reward if judged is None else episode.rewards[judged]


def _rewards(
    place: str, episodes: Sequence[EnvEpisode], prefix: str, judged: str | None
) -> dict[str, float]:
    mean, std = summarize([_reward(episode, judged) for episode in episodes])
    metrics = {f"{place}/{prefix}mean": mean, f"{place}/{prefix}std": std}
    agents = list(episodes[0].rewards)
    if len(agents) > 1:
        for name in agents:
            own = [episode.rewards[name] for episode in episodes]
            metrics[f"{place}/{name}/{prefix}mean"] = summarize(own)[0]
    return metrics

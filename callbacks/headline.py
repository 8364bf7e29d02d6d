"""Headline: the few figures that tell how well a policy does at its task."""

from collections.abc import Mapping, Sequence

LABELS = {
    "eval/accuracy": "accuracy",
    "eval/reward_mean": "held-out reward",
    "reward/mean": "reward of the rollouts",
}


def headline(rows: Sequence[Mapping[str, float]]) -> list[str]:
    """Names of the metrics that say how it goes, out of those in the rows of a run.

    Of held-out rollouts: their accuracy, their mean reward, or both. Where success is all that is
    rewarded the two are the same; where no reward reaches ``success_reward``, or each does, an
    accuracy says nothing. Without an evaluation: the mean reward of what was trained on.
    """
    pairs = [
        (float(row["eval/accuracy"]), float(row["eval/reward_mean"]))
        for row in rows
        if "eval/accuracy" in row and "eval/reward_mean" in row
    ]
    if not pairs:
        return ["reward/mean"] if any("reward/mean" in row for row in rows) else []
    if all(accuracy == reward for accuracy, reward in pairs):
        return ["eval/accuracy"]
    accuracies = {accuracy for accuracy, _ in pairs}
    if accuracies == {0.0} or accuracies == {1.0}:
        return ["eval/reward_mean"]
    return ["eval/accuracy", "eval/reward_mean"]

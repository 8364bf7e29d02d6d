"""Write the files of a run step by step, and read what ``view --follow`` makes of them."""

import json
from pathlib import Path

from lightning_rl.cli.view.following import Following
from tests.support.planted_run import good_rollout


def line(iteration: float, **metrics: float | None) -> str:
    return json.dumps({"iteration": iteration} | metrics) + "\n"


def add(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        file.write(text)


def recorded(*rewards: float, iteration: int = 1) -> str:
    rollouts = (
        good_rollout(id=f"{iteration}/{i}", iteration=iteration, reward=reward)
        for i, reward in enumerate(rewards)
    )
    return "".join(json.dumps(rollout) + "\n" for rollout in rollouts)


class Page:
    """Asks as the page does, and puts together what it gets as ``receive.js`` does."""

    def __init__(self, *paths: Path, rollouts: int = 100) -> None:
        self.following = Following(paths, rollouts)
        self.runs: dict[str, tuple[dict[float, dict], list[dict]]] = {}
        self.cursor = 0

    def ask(self) -> dict:
        answer = self.following.since(self.cursor)
        self.cursor = answer["cursor"]
        for entry in answer.get("runs", ()):
            rows, blocks = self.runs.get(entry["name"], ({}, []))
            if entry["replaced"]:
                rows, blocks = {}, []
            rows |= {row["iteration"]: row for row in entry["metrics"]}
            blocks = [*blocks, *entry["blocks"]]
            self.runs[entry["name"]] = (rows, blocks[len(blocks) - entry["kept"] :])
        return answer

    def values(self, name: str = "a") -> list[tuple[float, float]]:
        """Return the curve of the only run."""
        [(rows, _)] = self.runs.values()
        return [(i, row[name]) for i, row in sorted(rows.items()) if name in row]

    def rewards(self) -> list[float]:
        [(_, blocks)] = self.runs.values()
        return [row["reward"] for block in blocks for row in block["rollouts"]]

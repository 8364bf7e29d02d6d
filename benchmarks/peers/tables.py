"""Format what ``benchmarks.peers`` prints and writes into docs/benchmarks.md."""

from typing import Any

TITLES = {"quickstart": "quickstart", "heavy": "heavy tails", "long": "long prompts"}


def print_table(results: dict[str, Any]) -> None:
    columns = {
        "cpu_s_per_iteration": "CPU s/iter",
        "wall_s_per_iteration": "wall s/iter",
        "tokens_per_wall_s": "tokens/s",
        "iterations": "iterations",
        "cpu_s": "CPU s",
        "wall_s": "wall s",
        "setup_cpu_s": "set-up",
        "peak_rss_gib": "RSS GiB",
    }
    print(f"\n{'':17}" + "".join(f"{title:>12}" for title in columns.values()))
    for task, sides in results.items():
        for name in ("ours", "trl"):
            row = "".join(f"{sides[name][key]:12.4g}" for key in columns)
            print(f"{task:<11}{name:<6}{row}")


def table(results: dict[str, Any]) -> list[str]:
    """Return Markdown, a line per task and side; what 0.90 takes only where a run goes on to it."""
    lines = [
        "| one thread | CPU s per iteration | tokens per second | iterations to 0.90 "
        "| CPU s to 0.90 | set-up, CPU s | peak memory, GiB |",
        "|---|---|---|---|---|---|---|",
    ]
    for task, title in TITLES.items():
        for name, side in (("ours", "ours"), ("TRL", "trl")):
            found = results[task][side]
            to_goal = f"{found['iterations']:.0f} | {found['cpu_s']:#.3g}"
            lines.append(
                f"| {title}, {name} | {found['cpu_s_per_iteration']:#.3g} "
                f"| {found['tokens_per_wall_s']:,.0f} "
                f"| {to_goal if task == 'quickstart' else '|'} "
                f"| {found['setup_cpu_s']:.1f} | {found['peak_rss_gib']:.2f} |"
            )
    return lines


def ratios(results: dict[str, Any]) -> dict[str, float]:
    """Return TRL / ours."""

    def ratio(task: str, key: str) -> float:
        return float(results[task]["trl"][key] / results[task]["ours"][key])

    return {
        "cpu_ratio": ratio("quickstart", "cpu_s"),
        "iteration_ratio": ratio("quickstart", "cpu_s_per_iteration"),
        "wall_ratio": ratio("quickstart", "wall_s_per_iteration"),
        "heavy_ratio": ratio("heavy", "cpu_s_per_iteration"),
        "long_prompt_ratio": ratio("long", "cpu_s_per_iteration"),
        "iterations_to_goal_ratio": ratio("quickstart", "iterations"),
    }

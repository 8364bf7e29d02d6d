"""What do PPO's frames cost and teach, here and with others?

    OMP_NUM_THREADS=1 python -m benchmarks.envs [--tasks cartpole] [--seeds 5] [--save]

PPO with the same settings on CartPole-v1 (20 seeds), Acrobot-v1 and Pendulum-v1 (10 each): eight
environments, batches of 1,024 frames, two layers of 64 for each of actor and critic; the rest is in
benchmarks/envs/task.py. `Trainer.fit` of ours, with its defaults and (`same`) with one norm for
the gradients of actor and critic and advantages normalised per minibatch, as the others have it.
Beside it torchrl's PPO example, Stable-Baselines3's PPO and CleanRL's scripts, each at its best on
one thread (benchmarks/envs/torchrl.py, sb3.py and cleanrl.py say how). The peers live in
an environment of their own, `build/envs-venv`, which the first run makes (set PIP_FIND_LINKS to
where a CPU wheel of torch lies). Runs take turns, each in a process of its own. All takes an hour;
with `--runs DIR` each run is kept there as a file and not made again, so that a benchmark that was
stopped goes on, and tasks may be measured apart.

Frames per CPU second are of iterations after the first. A run has reached the task's goal (475 on
CartPole) when the mean return of the last 20 episodes of training has; what never does counts as
the most frames that it had, so these means are lower bounds, and how many runs came there is told.
Returns are of 20 episodes apart after a fixed number of frames, actions drawn.

Another process per seed (benchmarks/envs/bare.py), five for CartPole, has, beside each iteration of
`Trainer.fit`, one of a bare loop of the same parts, and the same actions in the environments alone.

The last line is JSON; of CartPole: `frames_to_475` of ours, `frames_to_475_peers`, the mean of all
peers' runs, and `frames_to_475_best`, of the peer that is the first there; `return_ratio`, our
return / that of all peers' runs; `frames_ratio`, frames per CPU second of ours / of the fastest
peer; `cpu_ratio`, CPU seconds to 475 of the peer that needs the least / ours; `floor_ratio`, CPU
seconds of ours / of the environment alone; `fit_overhead`, `Trainer.fit` / the bare loop, medians
over iterations; goal: <= 1.05. `tasks` has every side of every task, means with standard errors.

Refuses to start where something else runs.
"""

from pathlib import Path
from typing import Any

from benchmarks.envs.figures import OURS, beside_bare, headline, of_task, table
from benchmarks.envs.runs import SIDES, make_environment, measure, run
from benchmarks.envs.task import TASKS
from benchmarks.support.quiet import require_quiet
from benchmarks.support.results import parser_of, report, write_block

PAGE = Path(__file__).parents[2] / "docs" / "benchmarks.md"
BARE_SEEDS, BARE_ITERATIONS = 5, 97


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--seeds", type=int, help="runs of each side; left out: each task's")
    parser.add_argument("--sides", nargs="+", choices=SIDES, default=list(SIDES))
    parser.add_argument("--runs", type=Path, help="a folder that keeps each run")
    parser.add_argument("--max-load", type=float, default=0.7, help="of the minute before")
    parser.add_argument(
        "--peers-only-quick", action="store_true", help="a trial: 3 iterations of each peer"
    )
    arguments = parser.parse_args()
    if arguments.peers_only_quick:
        make_environment()
        for task in arguments.tasks:
            for side in arguments.sides:
                if side not in OURS:
                    print(task, side, run(side, task, 0, most=3)["returns"])
        return
    load = require_quiet(arguments.max_load)
    make_environment()
    sides = ["ours", *(side for side in arguments.sides if side != "ours")]
    tasks = {}
    for task in arguments.tasks:
        done = measure(task, sides, arguments.seeds or TASKS[task].seeds, arguments.runs)
        tasks[task] = of_task(TASKS[task], done)
    result: dict[str, Any] = {}
    if "cartpole" in tasks:
        bare = [
            run("bare", "cartpole", seed, BARE_ITERATIONS, arguments.runs)
            for seed in range(BARE_SEEDS)
        ]
        result |= headline(tasks["cartpole"]) | beside_bare(bare)
    result |= {"tasks": tasks, "load_before": load}
    lines = table(result)
    print("\n".join(lines))
    if arguments.save:
        write_block(PAGE, "envs", lines)
    report("envs", result, arguments.save)


if __name__ == "__main__":
    main()

"""Do digests find every stale or torn push, and what do they cost?

    OMP_NUM_THREADS=1 python -m benchmarks.ledger [--trials 50] [--replicas 2] [--save]

Each engine gets pushes of a small model, whose weights move by 1e-4 in between. In a trial a push
arrives with a fault (:mod:`benchmarks.ledger.faults`) at a place that is drawn; further trials have
the engine itself go wrong: it serves an old version after it was asleep, one of its replicas alone
is stale, it computes with an older adapter. A trial counts as caught if the push raises
``WrongWeightsError``. The pushes without a fault in between must not raise.

``cost_share`` is the digests' share of the time of a push, the median of pushes of ``--millions``
parameters; for ``VLLMLocal`` with what is noted while it converts weights.
The last line is JSON.
"""

from collections.abc import Callable
from contextlib import closing
from typing import Any

import torch

from benchmarks.ledger.costs import cost
from benchmarks.ledger.trials import SMALL, Pushes, prepared, run_adapters, run_faults
from benchmarks.support.results import parser_of, report
from lightning_rl.engines import TransformersEngine, VLLMLocal, VLLMServer
from lightning_rl.engines.base import Engine


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--trials", type=int, default=50, help="of each kind and engine")
    parser.add_argument("--goods", type=int, default=200, help="further pushes without a fault")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--millions", type=float, default=25.0, help="parameters, for the cost")
    parser.add_argument("--rounds", type=int, default=9, help="pushes, for the cost")
    parser.add_argument("--only", nargs="*", help="names of engines")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    vllm: dict[str, Any] = {"max_model_len": 64, "kv_cache_gb": 0.05}
    makes: dict[str, Callable[[], Engine]] = {
        "TransformersEngine": lambda: TransformersEngine(device="cpu"),
        "TransformersEngine bf16": lambda: TransformersEngine("bfloat16", device="cpu"),
        "VLLMLocal": lambda: VLLMLocal(**vllm),
        "VLLMLocal bf16": lambda: VLLMLocal("bfloat16", **vllm),
        "VLLMServer bf16": lambda: VLLMServer(
            dtype="bfloat16", replicas=arguments.replicas, **vllm
        ),
    }
    rows = {}
    for name, make in makes.items():
        if arguments.only and name not in arguments.only:
            continue
        print(name, flush=True)
        with prepared(SMALL) as (policy, skeleton), closing(make()) as engine:
            engine.start(skeleton)
            pushes = Pushes(policy, engine)
            row = run_faults(pushes, arguments.trials, arguments.goods)
            pushes.transport.close()
        apart = run_adapters(make, arguments.trials)
        row["caught"] |= apart["caught"]
        row["pushes"] += apart["pushes"]
        row["false_alarms"] += apart["false_alarms"]
        row["cost"] = cost(make, arguments.millions, arguments.rounds)
        print(f"  cost: {row['cost']}", flush=True)
        rows[name] = row
    kinds = {kind for row in rows.values() for kind in row["caught"]}
    result = {
        "faults": len(kinds),
        "trials": arguments.trials * sum(len(row["caught"]) for row in rows.values()),
        "caught": sum(sum(row["caught"].values()) for row in rows.values()),
        "pushes": sum(row["pushes"] for row in rows.values()),
        "false_alarms": sum(row["false_alarms"] for row in rows.values()),
        "cost_share": {name: row["cost"]["share"] for name, row in rows.items()},
        "engines": rows,
    }
    report("ledger", result, arguments.save)


if __name__ == "__main__":
    main()

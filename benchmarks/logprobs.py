"""What does the policy head save over holding all logits?

    OMP_NUM_THREADS=1 python -m benchmarks.logprobs [--save]

Forward and backward of logprobs and entropies at a vocabulary of 151,936, 8,192 tokens and a hidden
size of 896, float32: `token_logprobs` against a plain `log_softmax` of all logits. Each runs in a
process of its own, whose peak memory is `ru_maxrss` less what was resident before the work; time is
CPU seconds. The plain way holds 23 GiB at its peak: where that does not fit, it runs at an eighth
and a quarter of the tokens, and memory, linear in the tokens, is extrapolated
(`naive_extrapolated`), while time is compared at the quarter. The last line is
JSON; goal: `memory_ratio` <= 0.25.
"""

import json
import resource
import subprocess
import sys
import time
from argparse import SUPPRESS
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.support.results import parser_of, report
from lightning_rl.models.heads import token_logprobs

VOCABULARY, HIDDEN, TOKENS = 151_936, 896, 8_192
SPAN = 6  # the plain way holds five tensors as large as all logits at its peak; one to spare


def problem(tokens: int) -> tuple[Tensor, nn.Linear, Tensor, Tensor]:
    """Make hidden states, output layer, targets, and gradients of logprobs and entropies."""
    generator = torch.Generator().manual_seed(0)
    linear = nn.utils.skip_init(nn.Linear, HIDDEN, VOCABULARY, bias=False)
    linear.weight.data.normal_(std=0.02, generator=generator)
    # A standard deviation of 5 gives logits one of 3: neither uniform nor all on one token.
    hidden = 5 * torch.randn(tokens, HIDDEN, generator=generator)
    targets = torch.randint(VOCABULARY, (tokens,), generator=generator)
    upstream = torch.randn(2, tokens, generator=generator)  # over tokens, as a mean's gradient
    return hidden.requires_grad_(), linear, targets, upstream / tokens


def ours(hidden: Tensor, output: nn.Linear, targets: Tensor) -> tuple[Tensor, Tensor]:
    return token_logprobs(hidden, output, targets, torch.ones(len(hidden)))


def naive(hidden: Tensor, output: nn.Linear, targets: Tensor) -> tuple[Tensor, Tensor]:
    log_p = output(hidden).log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


METHODS = {"ours": ours, "naive": naive}


def gradients(method: str, tokens: int) -> list[Tensor]:
    """Return the gradients of hidden states and weight."""
    hidden, output, targets, upstream = problem(tokens)
    results = METHODS[method](hidden, output, targets)
    return list(torch.autograd.grad(results, (hidden, output.weight), tuple(upstream)))


def measure(method: str, tokens: int) -> dict[str, float]:
    """Measure peak bytes and CPU seconds of one forward and backward in this process."""
    hidden, output, targets, upstream = problem(tokens)
    METHODS[method](hidden[:8], output, targets[:8])[0].sum().backward()  # what is loaded once
    hidden.grad = output.weight.grad = None
    before, begin = resident(), time.process_time()
    torch.autograd.backward(METHODS[method](hidden, output, targets), tuple(upstream))
    seconds = time.process_time() - begin
    return {
        "bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 - before,
        "seconds": seconds,
    }


def compare(tokens: int) -> dict[str, float]:
    """Return the largest absolute difference of gradients, and of norms in proportion."""
    pairs = list(zip(gradients("ours", tokens), gradients("naive", tokens), strict=True))
    return {
        "grad_max_abs_diff": max(float((a - b).abs().max()) for a, b in pairs),
        "grad_relative_diff": max(float((a - b).norm() / b.norm()) for a, b in pairs),
    }


def resident() -> int:
    """Return bytes of memory this process holds now."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def available() -> int:
    """Return bytes that the machine could give without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(s.split()[1]) * 1024 for s in lines if s.startswith("MemAvailable"))


def child(*arguments: object) -> dict[str, float]:
    """Run the same module in a process of its own; return what its last line says."""
    command = [sys.executable, "-m", "benchmarks.logprobs", *map(str, arguments)]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return json.loads(result.stdout.splitlines()[-1])


def run(tokens: int) -> dict[str, Any]:
    """Run all measurements."""
    fits = SPAN * tokens * VOCABULARY * 4 < available()
    sizes = [tokens] if fits else [tokens // 8, tokens // 4]
    full = child("--method", "ours", "--tokens", tokens)
    plain = [child("--method", "naive", "--tokens", n) for n in sizes]
    # Time at a count that both ran: neither depends on the count but in proportion.
    mine = full if fits else child("--method", "ours", "--tokens", sizes[-1])
    naive_bytes = plain[-1]["bytes"]
    if not fits:
        slope = (plain[1]["bytes"] - plain[0]["bytes"]) / (sizes[1] - sizes[0])
        naive_bytes += slope * (tokens - sizes[1])
    return {
        "memory_ratio": full["bytes"] / naive_bytes,
        "time_ratio": mine["seconds"] / plain[-1]["seconds"],
        **child("--method", "compare", "--tokens", min(512, tokens)),
        "ours_gib": full["bytes"] / 2**30,
        "naive_gib": naive_bytes / 2**30,
        "naive_extrapolated": not fits,
        "ours_cpu_s": full["seconds"],
        "time_tokens": sizes[-1],
        "ours_cpu_s_at_time_tokens": mine["seconds"],
        "naive_cpu_s_at_time_tokens": plain[-1]["seconds"],
        "tokens": tokens,
        "vocabulary": VOCABULARY,
        "hidden": HIDDEN,
    }


def main() -> None:
    parser = parser_of(__doc__, threads=True)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--method", choices=[*METHODS, "compare"], help=SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.method:
        one = arguments.method == "compare"
        print(
            json.dumps(
                compare(arguments.tokens) if one else measure(arguments.method, arguments.tokens)
            )
        )
        return
    row = run(arguments.tokens)
    print(f"{'':8}{'GiB':>8}{'CPU s':>9}   ({row['tokens']} tokens; time of {row['time_tokens']})")
    for name in METHODS:
        seconds = row[f"{name}_cpu_s_at_time_tokens"]
        print(f"{name:8}{row[name + '_gib']:8.2f}{seconds:9.1f}")
    report("logprobs", row, arguments.save)


if __name__ == "__main__":
    main()

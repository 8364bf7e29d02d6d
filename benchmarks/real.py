"""Run the tests of all families of models, and write what passed as tables.

    python -m benchmarks.real [--save] [pytest's arguments]

Runs tests/conformance and the tests of models that read pictures, and prints two tables of what
passed: architectures of transformers, and chat templates of real tokenizers (``make real-models``
fetches them). ``--save`` writes both into docs/models.md. The last line is JSON: ``families`` that
were tried, those whose every test passed (``exact``), those that are ``unpacked`` or ``refused``;
and of a real model that learned five tasks, if ``benchmarks.small_model --save`` has kept it:
``accuracy_before``, ``accuracy_after``, the gain's lower bound (``interval_low``), and CPU seconds
over TRL's (``seconds_over_trl``).
"""

import argparse
import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from benchmarks.support.results import RESULTS, write_block
from tests.support.chats import CHATS, Chats
from tests.support.families import ARCHITECTURES
from tests.support.tiny_vision import FAMILIES

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
SUITE = ("tests/conformance", "tests/unit/vision/test_families.py")
SCORES, REFUSAL = "test_scores_and_gradients", "test_what_cannot_be_scored"
COLUMNS = {
    "`TransformersEngine`": "test_the_engine_writes",
    "vLLM": "test_vllm_writes",
    "export": "test_an_export",
    "resume": "test_a_resumed_run",
    "LoRA": "test_adapters",
}
SEEN, SEEN_ENGINE = "test_packed_scores_are_those_of_transformers", "test_engine_and_trainer_agree"


class Outcomes:
    """The tests that passed, by the parameters in their names."""

    def __init__(self) -> None:
        self.of: defaultdict[str, dict[str, bool]] = defaultdict(dict)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed or (report.when == "call" and report.passed):
            test, _, parameters = report.nodeid.rpartition("::")[2].rstrip("]").partition("[")
            for row in parameters.split("-"):
                self.of[row][test] = self.of[row].get(test, True) and report.passed

    def whole(self, row: str) -> bool:
        """Return whether all tests of a row passed."""
        return bool(self.of[row]) and all(self.of[row].values())

    def says(self, row: str, test: str, word: str = "yes") -> str:
        """Return the word if this test passed; nothing, if it was not tried."""
        found = [passed for name, passed in self.of[row].items() if name.startswith(test)]
        return "" if not found else word if all(found) else "**no**"


def architectures(found: Outcomes) -> Iterator[str]:
    """Yield a line for each architecture."""
    yield _row("architecture", "models", "rollouts", *COLUMNS, "pictures")
    yield _row(*["---"] * (4 + len(COLUMNS)))
    for name, one in ARCHITECTURES.items():
        layout = found.says(name, REFUSAL if one.layout == "refused" else SCORES, one.layout)
        words = ["yes" if one.engine else "no", *["yes"] * (len(COLUMNS) - 1)]
        said = zip(COLUMNS.values(), words, strict=True)
        cells = [found.says(name, test, word) for test, word in said]
        yield _row(f"`{name}`", one.models, layout, *cells, "")
    for name in FAMILIES:
        layout, engine = found.says(name, SEEN, "packed"), found.says(name, SEEN_ENGINE)
        rest = [""] * (len(COLUMNS) - 1)
        yield _row(f"`{name}`", "", layout, engine, *rest, found.says(name, "test_pictures_matter"))


def templates(found: Outcomes) -> Iterator[str]:
    """Yield a line for each way in which a real template writes chats."""
    yield _row("template", "BOS", "system", "turns", "tools", "thinking")
    yield _row(*["---"] * 6)
    for name, one in CHATS.items():
        yield _row(
            name,
            found.says(name, "test_ends", "once" if one.begin else "none"),
            found.says(name, "test_prompts", "yes" if one.system else "no"),
            found.says(name, "test_turns_grown", _turns(one)),
            found.says(name, "test_calls", "no" if one.tools else "yes"),
            one.thinking,
        )


def _turns(one: Chats) -> str:
    if one.rewrites is None:
        return "exact"
    return "exact, `allow_rewrites`" if one.turns > 1 else "as written, `allow_rewrites`"


def _row(*cells: str) -> str:
    return "|" + "|".join(f" {cell} ".replace("  ", " ") for cell in cells) + "|"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--save", action="store_true")
    options, given = parser.parse_known_args()
    found = Outcomes()
    pytest.main([*SUITE, "-q", *given], plugins=[found])
    tables = {"architectures": list(architectures(found)), "templates": list(templates(found))}
    for name, lines in tables.items():
        print("\n".join(["", *lines]))
        if options.save:
            write_block(PAGE, name, lines)
    print(json.dumps(_counts(found) | _trained()))


def _trained() -> dict[str, float]:
    path = RESULTS / "small-model-cpu.json"
    kept = json.loads(path.read_text(encoding="utf-8"))["result"] if path.exists() else {}
    names = ("accuracy_before", "accuracy_after", "interval_low", "seconds_over_trl")
    return {name: kept[name] for name in names if name in kept}


def _counts(found: Outcomes) -> dict[str, int]:
    rows = [*ARCHITECTURES, *FAMILIES, *CHATS]
    tried = [row for row in rows if found.of[row]]
    layouts = [one.layout for name, one in ARCHITECTURES.items() if found.whole(name)]
    refused = layouts.count("refused")
    return {
        "families": len(tried),
        "exact": sum(map(found.whole, tried)) - refused,
        "unpacked": layouts.count("unpacked"),
        "refused": refused,
    }


if __name__ == "__main__":
    main()

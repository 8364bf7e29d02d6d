"""Bad configurations get the message a person would want; the table in the documentation has all.

Numbers out of range are refused by each class, as its own tests show: that their messages reach the
command line is seen by ``make test-all``.
"""

import pytest

from tests.support.bad_configs import CASES, SECTIONS, complaint, row, shown
from tests.support.recorded_run import stand_in

MARKS = {"out of range": [pytest.mark.slow]}
MARKED = [
    pytest.param(case, marks=MARKS.get(section, []), id=case)
    for section, cases in SECTIONS.items()
    for case in cases
]


@pytest.mark.parametrize("case", MARKED)
def test_the_message_names_key_value_and_fix(case, furnished, monkeypatch):
    stand_in(furnished, monkeypatch)
    status, message = complaint(case)
    assert [words for words in CASES[case] if words not in message] == []
    assert message.startswith("lightning-rl: ")
    kind = message.removeprefix("lightning-rl: ").split(":")[0]
    assert status == (2 if kind in ("config error", "data error") else 1)
    assert len(message.splitlines()) <= 3
    if case != "--trainer.accelerator cpuu":  # Lightning lists their names in any order
        made_by = "python -m tests.support.bad_configs"
        assert row(case, message) in shown(), f"{made_by} makes the table anew"


def test_the_table_in_the_documentation_has_no_other_case():
    assert shown().count("\n| `") == len(CASES) >= 40

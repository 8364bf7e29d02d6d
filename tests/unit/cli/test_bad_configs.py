"""Bad configurations get the message a person would want; the table in the documentation has all.

Numbers out of range are refused by each class, as its own tests show: that their messages reach the
command line is seen by ``make test-all``.
"""

import pytest

from tests.support.bad_configs import BEGIN, CASES, END, PAGE, SECTIONS, complaint

MARKS = {"out of range": [pytest.mark.slow]}
MARKED = [
    pytest.param(case, marks=MARKS.get(section, []), id=case)
    for section, cases in SECTIONS.items()
    for case in cases
]


@pytest.mark.parametrize("case", MARKED)
def test_the_message_names_key_value_and_fix(case, furnished, monkeypatch):
    monkeypatch.chdir(furnished)
    monkeypatch.syspath_prepend(furnished)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything's, put back afterwards
        monkeypatch.setenv(name, "0")
    status, message = complaint(case)
    assert [words for words in CASES[case] if words not in message] == []
    assert message.startswith("lightning-rl: ")
    kind = message.removeprefix("lightning-rl: ").split(":")[0]
    assert status == (2 if kind in ("config error", "data error") else 1)
    assert len(message.splitlines()) <= 3


def test_the_table_in_the_documentation_has_every_case():
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert [case for case in CASES if f"| `{case}` | " not in shown] == []
    assert len(CASES) >= 40

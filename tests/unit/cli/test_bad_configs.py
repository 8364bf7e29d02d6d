"""Bad configurations get the message a person would want: those that the parser already refuses.

The others, for which parts of a run have to be built, are in the integration tier.
"""

import pytest

from tests.support.bad_configs import BEGIN, CASES, END, PAGE, SECTIONS, complaint

AT_ONCE = ("typos", "wrong types", "configurations of strangers")
QUICK = [case for section in AT_ONCE for case in SECTIONS[section]]


@pytest.mark.parametrize("case", QUICK)
def test_the_message_names_key_value_and_fix(case, furnished, monkeypatch):
    monkeypatch.chdir(furnished)
    monkeypatch.syspath_prepend(furnished)
    status, message = complaint(case)
    assert [words for words in CASES[case] if words not in message] == []
    assert status == 2
    assert message.startswith("lightning-rl: ")
    assert len(message.splitlines()) <= 3


def test_the_table_in_the_documentation_has_every_case():
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert [case for case in CASES if f"| `{case}` | " not in shown] == []
    assert len(CASES) >= 40

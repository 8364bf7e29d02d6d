"""Bad configurations get the message a person would want: those that the parser already refuses.

The others, for which parts of a run have to be built, are in the integration tier.
"""

import pytest

from tests.bad_configs import BEGIN, CASES, END, PAGE, SECTIONS, complaint, furnish

AT_ONCE = ("typos", "wrong types", "configurations of strangers")
QUICK = [case for section in AT_ONCE for case in SECTIONS[section]]


@pytest.fixture(scope="module")
def workplace(tiny_model, tmp_path_factory):
    here = tmp_path_factory.mktemp("workplace")
    furnish(here, tiny_model)
    return here


@pytest.mark.parametrize("case", QUICK)
def test_the_message_names_key_value_and_fix(case, workplace, monkeypatch):
    monkeypatch.chdir(workplace)
    monkeypatch.syspath_prepend(workplace)
    status, message = complaint(case)
    assert [words for words in CASES[case] if words not in message] == []
    assert status == 2
    assert message.startswith("lightning-rl: ")
    assert len(message.splitlines()) <= 3


def test_the_table_in_the_documentation_has_every_case():
    shown = PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0]
    assert [case for case in CASES if f"| `{case}` | " not in shown] == []
    assert len(CASES) >= 40

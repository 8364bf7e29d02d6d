"""Bad configurations that are found when parts of a run are built, or its first rollouts graded."""

import pytest

from tests.support.bad_configs import CASES, SECTIONS, complaint

AT_ONCE = ("typos", "wrong types", "configurations of strangers")
SLOW = [case for name, cases in SECTIONS.items() if name not in AT_ONCE for case in cases]


@pytest.mark.parametrize("case", SLOW)
def test_the_message_names_key_value_and_fix(case, furnished, monkeypatch):
    monkeypatch.chdir(furnished)
    monkeypatch.syspath_prepend(furnished)
    for name in ("PL_GLOBAL_SEED", "PL_SEED_WORKERS"):  # seed_everything's, put back afterwards
        monkeypatch.setenv(name, "0")
    status, message = complaint(case)
    assert [words for words in CASES[case] if words not in message] == []
    kind = message.removeprefix("lightning-rl: ").split(":")[0]
    assert status == (2 if kind in ("config error", "data error") else 1)
    assert len(message.splitlines()) <= 3

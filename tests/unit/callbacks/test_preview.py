"""Test what a person is shown of rollouts."""

from lightning_rl.callbacks.preview import as_markdown, preview_table, spread
from lightning_rl.rollout import RolloutStatus
from tests.support.tiny_models import chat_tokenizer


def with_rewards(make_rollout, rewards):
    return [make_rollout([3], [1], reward=r, sample_index=i) for i, r in enumerate(rewards)]


def test_the_spread_goes_from_worst_to_best(make_rollout):
    rollouts = with_rewards(make_rollout, [0.6, 0.0, 1.0, 0.2, 0.8, 0.4, 0.1])
    # Ranks 0, 2, 4 and 6 of seven.
    assert [r.reward for r in spread(rollouts, 4)] == [0.0, 0.2, 0.6, 1.0]


def test_what_failed_leads(make_rollout):
    rollouts = with_rewards(make_rollout, [0.5, None, -3.0])
    assert [r.reward for r in spread(rollouts, 3)] == [None, -3.0, 0.5]


def test_small_spreads(make_rollout):
    rollouts = with_rewards(make_rollout, [0.5, 1.0, 0.0])
    assert [r.reward for r in spread(rollouts, 1)] == [1.0]
    assert [r.reward for r in spread(rollouts, 2)] == [0.0, 1.0]
    assert [r.reward for r in spread(rollouts, 9)] == [0.0, 0.5, 1.0]
    assert spread([], 4) == []


def test_the_table_survives_pipes_newlines_and_errors(make_rollout):
    good = make_rollout([3], [4, 1], completion="a|b\nc", reward=1.0, reward_parts={"exact": 1.0})
    bad = make_rollout(
        [3], [4, 1], completion="x", reward=None, status=RolloutStatus.FAILED, error="boom | bang"
    )
    chat = make_rollout([3], [1], completion=[{"role": "assistant", "content": "hi"}])
    header, rule, *rows = as_markdown(*preview_table([good, bad, chat])).splitlines()
    assert header == "| prompt | completion | reward | parts | end |"
    assert rule.count("|") == 6
    assert rows == [
        "| text | a\\|b<br>c | 1.0 | exact 1.0 | completed, stop, 2 tokens |",
        "| text | x | None |  | boom \\| bang |",
        "| text | assistant: hi | 0.0 |  | completed, stop, 1 tokens |",
    ]


def test_a_chat_is_shown_as_the_model_reads_it(make_rollout):
    tokenizer, chat = chat_tokenizer("qwen2_5"), [{"role": "user", "content": "Hi"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    rollout = make_rollout(tokenizer(text)["input_ids"], [1])
    rollout.prompt.prompt = chat
    _, [row] = preview_table([rollout], tokenizer.decode)
    assert row[0] == text
    assert "<|im_start|>system\nYou are Qwen, created by Alibaba Cloud." in text

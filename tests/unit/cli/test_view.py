"""Test the viewer's page: tokens cut right, flags found, every number as recorded."""

import json
import re
import subprocess
import sys
from array import array

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from tokenizers.trainers import BpeTrainer

from lightning_rl.cli import main
from lightning_rl.cli.view.blocks import TOKEN_COLUMNS
from lightning_rl.cli.view.command import main as view
from lightning_rl.cli.view.flags import FLAGS, find_flags
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import Run, find_runs, read_run
from lightning_rl.data.rollouts.rows import turns_as_text, turns_of
from lightning_rl.data.rollouts.token_texts import TokenPieces
from lightning_rl.errors import DataError
from tests.support.planted_run import (
    HOSTILE,
    PLACES,
    PLANTED,
    blocks_of,
    good_rollout,
    planted_rollouts,
    rollouts_of,
    write_run,
)


def lines_of(*records) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


# ---------------------------------------------------------------- tokens


def byte_level() -> Tokenizer:
    """Make a tokenizer with one token per byte, which cuts every character beyond ASCII."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator([], BpeTrainer(initial_alphabet=alphabet, show_progress=False))
    return tokenizer


def sentence_piece() -> Tokenizer:
    """Make words with their space in front, which a text's first token loses when decoded."""
    vocabulary = {"<unk>": 0, "▁hello": 1, "▁you": 2, "!": 3}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.decoder = decoders.Metaspace()
    return tokenizer


def pieces_of(tokenizer: Tokenizer, token_ids: list[int]) -> list[str]:
    return TokenPieces(lambda ids: tokenizer.decode(ids, skip_special_tokens=False))(token_ids)


def test_a_character_of_several_tokens_stands_in_the_first():
    tokenizer = byte_level()
    text = "é😀😀!"
    ids = tokenizer.encode(text).ids
    assert pieces_of(tokenizer, ids) == ["é", "", "😀", "", "", "", "😀", "", "", "", "!"]


def test_what_never_becomes_a_character_stays_visible():
    tokenizer = byte_level()
    ids = tokenizer.encode("a😀b").ids
    # The emoji's last byte is missing.
    assert pieces_of(tokenizer, [*ids[:4], ids[5]]) == ["a", "�", "�", "�", "b"]


def test_pieces_keep_the_space_that_decoding_strips():
    assert pieces_of(sentence_piece(), [1, 2, 3, 1]) == [" hello", " you", "!", " hello"]


# ---------------------------------------------------------------- flags


def test_a_good_rollout_has_no_flag():
    assert find_flags(good_rollout()) == {}


@pytest.mark.parametrize("flag", PLANTED)
def test_each_planted_error_gets_its_flag_and_no_other(flag):
    record = good_rollout(**PLANTED[flag])
    assert find_flags(record) == {flag: PLACES.get(flag, [])}


def test_every_flag_is_planted():
    assert set(PLANTED) == set(FLAGS)


def test_what_is_right_is_not_flagged():
    # An environment's token between the model's, with nothing recorded for it.
    turns = good_rollout(
        loss_mask=[True, False, True, True],
        versions=[3, -1, 3, 4],
        logprobs=[-0.5, 0.0, -1.0, -0.125],
        trainer_logprobs=[-0.5, 0.0, -1.0, -0.125],
    )
    assert find_flags(turns) == {}
    # Nobody sampled an expert's completion, so there is neither version nor gap.
    expert = good_rollout(demonstration=True, versions=[-1] * 4, logprobs=[0.0] * 4)
    assert find_flags(expert) == {}
    # PreviewTable records no trainer's numbers; an aborted rollout needs no reward.
    preview = good_rollout(status="aborted", reward=None)
    del preview["rows"][0]["trainer_logprobs"], preview["rows"][0]["advantages"]
    assert find_flags(preview) == {}


def test_bounds_of_flags():
    at = [-0.5, -0.25, -1.5, -0.125]  # half a nat at the third token: the bound itself
    assert find_flags(good_rollout(trainer_logprobs=at)) == {}
    beyond = [-0.5, -0.25, -1.501, -0.125]
    assert find_flags(good_rollout(trainer_logprobs=beyond)) == {"gap": [2]}
    positive = good_rollout(logprobs=[-0.5, -0.25, -1.0, 0.01])
    assert find_flags(positive) == {"number": [3]}


# ---------------------------------------------------------------- reading


def test_a_resumed_run_shows_what_it_wrote_last(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(
        lines_of(
            {"iteration": 1, "a": 1.0},
            {"iteration": 2, "a": 2.0, "b": 7.0},
            {"iteration": 2, "a": 3.0},
        )
    )
    first, again = good_rollout(reward=0.0), good_rollout(reward=1.0)
    (tmp_path / "recorded.jsonl").write_text(lines_of(first, again))
    run = read_run(tmp_path, max_rollouts=10)
    assert run.metrics == [{"iteration": 1, "a": 1.0}, {"iteration": 2, "a": 3.0, "b": 7.0}]
    assert [r["reward"] for r in run.rollouts] == [1.0]


def test_the_last_rollouts_are_kept_and_all_are_counted(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text(lines_of(*planted_rollouts()))
    run = read_run(tmp_path, max_rollouts=3)
    assert [r["id"] for r in run.rollouts] == ["lengths", "reward", "failed"]
    assert run.rollouts_total == 48


@pytest.mark.parametrize("end", ["in a text", "after a brace"])
def test_half_a_last_line_is_what_a_kill_leaves(tmp_path, end):
    whole = lines_of(good_rollout())
    half = whole[:40] if end == "in a text" else whole[: whole.index("}") + 1]
    (tmp_path / "recorded.jsonl").write_text(whole + half)
    run = read_run(tmp_path, max_rollouts=10)
    assert (len(run.rollouts), run.rollouts_total) == (1, 1)


def test_a_damaged_line_is_named(tmp_path):
    whole = lines_of(good_rollout())
    (tmp_path / "recorded.jsonl").write_text(whole + "garbage\n" + whole)
    with pytest.raises(DataError, match=r"recorded\.jsonl:2: not a JSON object: 'garbage"):
        read_run(tmp_path, max_rollouts=10)
    (tmp_path / "recorded.jsonl").write_text('{"id": "x"}\n')
    with pytest.raises(DataError, match=r"recorded\.jsonl:1: not a rollout"):
        read_run(tmp_path, max_rollouts=10)


def test_runs_are_found_in_the_order_they_were_made(tmp_path):
    for number in (10, 2, 9):
        write_run(tmp_path / "grpo" / f"version_{number}")
    found = [path.name for path in find_runs(tmp_path)]
    assert found == ["version_2", "version_9", "version_10"]


def test_a_folder_without_runs_says_what_is_missing(tmp_path):
    with pytest.raises(DataError, match=r"neither metrics\.jsonl .*RunReport.*RolloutRecorder"):
        find_runs(tmp_path)
    with pytest.raises(DataError, match="nowhere does not exist"):
        find_runs(tmp_path / "nowhere")


def test_tokens_without_text_are_decoded_with_the_runs_tokenizer(tmp_path, tiny_model):
    record = good_rollout(token_ids=[4, 5, 6, 1])
    del record["rows"][0]["pieces"], record["rows"][0]["prompt_pieces"]
    (tmp_path / "rollouts.jsonl").write_text(lines_of(record))
    assert "pieces" not in read_run(tmp_path, 1).rollouts[0]["rows"][0]
    (tmp_path / "summary.json").write_text(json.dumps({"model": str(tiny_model)}))
    [read] = read_run(tmp_path, 1).rollouts[0]["rows"]
    assert (read["pieces"], read["prompt_pieces"]) == (["1", "2", "3", "<eos>"], ["2", "3"])


def test_a_rollout_store_is_a_rollout_file(tmp_path, make_rollout):
    from lightning_rl.data.rollouts.files import open_rollouts

    path = tmp_path / "some.sqlite"
    store = open_rollouts(path)
    store.append([make_rollout([3], [4, 1], reward=0.25)], iteration=7, progress={})
    store.close()
    (run,) = (read_run(found, 10) for found in find_runs(path))
    (record,) = run.rollouts
    assert (record["iteration"], record["reward"]) == (7, 0.25)
    assert [(row["prompt_ids"], row["token_ids"]) for row in record["rows"]] == [([3], [4, 1])]


# ---------------------------------------------------------------- the page


def test_the_page_holds_every_number_and_loads_nothing(tmp_path):
    page = build_page([read_run(write_run(tmp_path / "run"), 100)])
    blocks = blocks_of(page)
    index = json.loads(blocks["index"])
    records = planted_rollouts()

    rows = rollouts_of(page)
    assert [row["id"] for row in rows] == [r["id"] for r in records]
    assert [row["reward"] for row in rows] == [r["reward"] for r in records]
    by_id = {row["id"]: row for row in rows}
    assert {flag: list(by_id[flag]["flags"]) for flag in PLANTED} == {f: [f] for f in PLANTED}
    assert by_id["gap"]["gap"] == 2.0
    assert by_id["reward"]["reward_parts"] == {"exact": 1.0, "style": "nan"}  # JSON has no nan
    assert index["runs"][0]["metrics"][3]["policy/loss"] == "nan"

    prompts = sum(len(r["prompt"]["token_ids"]) for r in records)
    tokens = sum(len(row["token_ids"]) for r in records for row in r["rows"])
    numbers = array("f", blocks["tokens-0"][4 * (prompts + tokens) : -5 * tokens])
    columns = {name: numbers[i * tokens :][:tokens] for i, name in enumerate(TOKEN_COLUMNS)}
    place = 4 * [r["id"] for r in records].index("gap")
    assert list(columns["trainer_logprobs"][place : place + 4]) == [-0.5, -0.25, -3.0, -0.125]
    assert list(columns["logprobs"][place : place + 4]) == [-0.5, -0.25, -1.0, -0.125]
    words = array("I", blocks["tokens-0"][4 * prompts : 4 * (prompts + tokens)])
    texts = [index["runs"][0]["blocks"][0]["texts"][word] for word in words]
    assert texts[place : place + 4] == ["hel", "lo", " you", "<eos>"]
    assert list(blocks["tokens-0"][-tokens:][place : place + 4]) == [1, 1, 1, 1]
    versions = array("i", blocks["tokens-0"][-5 * tokens : -tokens])
    place = 4 * [r["id"] for r in records].index("version")
    assert list(versions[place : place + 4]) == [3, 3, 2, 3]

    assert HOSTILE not in page
    assert "default-src 'none'; script-src 'sha256-" in page
    assert "connect-src 'none'" in page
    assert not re.search(r'(src|href)\s*=\s*["\']|@import|url\(|fetch\(|XMLHttp', page)
    assert set(re.findall(r"https?://[^\"' ]+", page)) == {"http://www.w3.org/2000/svg"}  # a name


def test_the_same_runs_make_the_same_page(tmp_path):
    run = write_run(tmp_path / "run")
    assert build_page([read_run(run, 100)]) == build_page([read_run(run, 100)])


def test_long_runs_are_cut_into_blocks(tmp_path):
    records = [good_rollout(id=str(i)) for i in range(600)]
    (tmp_path / "recorded.jsonl").write_text(lines_of(*records))
    blocks = blocks_of(build_page([read_run(tmp_path, 1000)]))
    # Each rollout has 2 + 4 texts, 4 tokens in 6 columns, 4 versions (4 bytes each), 4 mask bytes.
    each = 4 * (2 + 4 + 4 * len(TOKEN_COLUMNS) + 4) + 4
    assert [len(blocks[f"tokens-{i}"]) for i in range(3)] == [256 * each, 256 * each, 88 * each]
    assert set(blocks) == {"index", "pictures", "tokens-0", "tokens-1", "tokens-2"}


def listed(**changes):
    """Return how the list shows a rollout's question, and the end of its answer."""
    [row] = rollouts_of(build_page([Run("a", rollouts=[good_rollout(**changes)])]))
    return row["asked"], row["answered"]


def message(role, content):
    return {"role": role, "content": content}


PICTURE = [{"type": "image"}, {"type": "text", "text": "How\nmany?"}]


@pytest.mark.parametrize(
    ("said", "prompt", "completion"),
    [
        (("Say hello.", "so, 7"), "Say  hello.\n", "so,\n\n7"),
        (
            ("[image]How many?", "7"),
            [message("system", "Count."), message("user", "Hi"), message("user", PICTURE)],
            [message("assistant", "Let me"), message("tool", "7!"), message("assistant", "7")],
        ),
        # The last turn only calls a tool; the others have names of their own.
        (
            ("?", "no"),
            [message("user", "?"), message("assistant", "Let me see:")],
            [message("assistant", "no"), message("assistant", None), message("tool", "?!")],
        ),
        (("", "so?"), [message("user", "")], [message("prover", "no"), message("verifier", "so?")]),
        (("", ""), [], []),
    ],
)
def test_the_list_shows_what_was_asked_last_and_what_was_said_last(said, prompt, completion):
    changes = {"prompt": good_rollout()["prompt"] | {"prompt": prompt}, "completion": completion}
    assert listed(**changes) == said


def test_a_long_answer_is_shown_by_its_end_and_a_long_question_by_its_begin():
    asked = good_rollout()["prompt"] | {"prompt": "What " + "is " * 999}
    question, answer = listed(prompt=asked, completion="so " * 999 + HOSTILE)
    assert question.startswith("What is is")
    assert answer.endswith(f"so so {HOSTILE}")
    assert (len(question), len(answer)) == (300, 300)


CONFIG = """
seed_everything: {seed}
model: {{class_path: lightning_rl.PolicyModule, init_args: {{advantage: {advantage}}}}}
data: {{class_path: RLDataModule, init_args: {{group_size: 8, rewards: [a.b, c.d]}}}}
"""
GRPO = "{class_path: lightning_rl.algos.advantages.GRPO, init_args: {scale: false}}"


def settings_of(*runs):
    entries = json.loads(blocks_of(build_page(runs))["index"])["runs"]
    return [entry["settings"] for entry in entries]


def test_runs_show_the_settings_in_which_they_differ(tmp_path):
    folders = [write_run(tmp_path / name) for name in "abcde"]
    gae = "{class_path: lightning_rl.GAE, init_args: {lam: 0.9}}"
    for folder, seed, advantage in zip(folders, (1, 2, 2, 2), (GRPO, GRPO, gae, gae), strict=False):
        (folder / "config.yaml").write_text(CONFIG.format(seed=seed, advantage=advantage))
    newer = CONFIG.format(seed=2, advantage=GRPO).replace("8", "16")
    (folders[3] / "config_10.yaml").write_text(newer)
    (folders[3] / "config_9.yaml").write_text(CONFIG.format(seed=7, advantage=gae))
    runs = [read_run(folder, 1) for folder in folders]
    # A class is the value of its key; what is the same everywhere is left out.
    differ = ("seed_everything", "model.advantage", "data.group_size")
    values = [("1", "GRPO", "8"), ("2", "GRPO", "8"), ("2", "GAE", "8"), ("2", "GRPO", "16")]
    told = [dict(zip(differ, each, strict=True)) for each in values]
    assert settings_of(*runs) == [*told, {}]  # the last has no configuration
    assert settings_of(runs[0]) == settings_of(runs[0], runs[4])[:1] == [{}]


@pytest.mark.parametrize("content", [b"a: [1", b"\xff\xfe", b"a: &x [*x]"])
def test_a_damaged_configuration_is_said_and_hides_nothing(tmp_path, content):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_bytes(content)
    read = read_run(run, 100)
    assert read.settings == {}
    assert read.summary["error"].startswith("its configuration is damaged (")
    assert (read.summary["status"], len(read.rollouts)) == ("completed", 48)


@pytest.mark.parametrize("content", ["", "just text", "[1, 2]"])
def test_a_configuration_without_keys_has_no_settings(tmp_path, content):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text(content)
    assert (read_run(run, 1).settings, read_run(run, 1).summary["error"]) == ({}, None)


# ---------------------------------------------------------------- the command


def test_the_command_writes_the_page_and_says_what_it_left_out(tmp_path, capsys):
    write_run(tmp_path / "run")
    assert main(["view", str(tmp_path / "run"), "--rollouts", "40"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("runs: 1, rollouts: 40 of 48 (more: --rollouts N), ")
    assert (tmp_path / "run" / "view.html").read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "config error: the following arguments are required: runs"),
        (["{run}", "--rollout", "5"], "config error: unrecognized arguments: --rollout 5"),
        (["{run}", "--rollouts", "0"], "config error: rollouts=0 must be >= 1"),
        (["{run}", "--out", "{run}"], "is a directory; pass the path of a file"),
        (["{run}/nowhere"], "data error: "),
    ],
)
def test_a_wrong_command_is_refused_in_one_line(tmp_path, capsys, arguments, message):
    run = write_run(tmp_path / "run")
    assert main(["view", *(a.format(run=run) for a in arguments)]) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1


def test_the_command_starts_without_torch_and_lightning(tmp_path):
    run = write_run(tmp_path / "run")
    (run / "config.yaml").write_text("data: {group_size: 8}")
    program = (
        "import sys; from lightning_rl.cli import main; main(['view', sys.argv[1]]);"
        "print([m for m in ('torch', 'lightning', 'transformers', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(run)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "summary.json", "rollouts.jsonl", "config.yaml", "config_9.yaml"]
)
def test_a_link_out_of_a_run_is_not_followed(tmp_path, name):
    (tmp_path / "secret").write_text('{"iteration": 0, "key": "sk-1"}\n')
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 0}\n')
    (run / name).unlink(missing_ok=True)
    (run / name).symlink_to(tmp_path / "secret")
    with pytest.raises(DataError, match=f"{name} is a link to a file outside its run"):
        read_run(run, 10)


def test_the_page_is_not_written_through_a_link(tmp_path, capsys):
    (tmp_path / "profile").write_text("mine")
    run = tmp_path / "run"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"iteration": 0}\n')
    for name in ("view.html", "view.html.partial"):
        (run / name).symlink_to(tmp_path / "profile")
    assert view([str(run)]) == 0
    assert (tmp_path / "profile").read_text() == "mine"
    assert not (run / "view.html").is_symlink()
    assert "<html" in (run / "view.html").read_text()


@pytest.mark.parametrize("content", [b"", b'{"status": "comp', b"\xff\xfe", b"[1]"])
def test_a_damaged_summary_is_shown_as_that(tmp_path, content):
    run = write_run(tmp_path / "run")
    (run / "summary.json").write_bytes(content)
    assert "summary.json" in read_run(run, 100).summary["error"]
    assert main(["view", str(run)]) == 0


# ---------------------------------------------------------------- transcripts


def debate(**changes):
    """Make a debate of two provers at once, and a verifier who accepts."""
    said = [("prover0", 0, ["a"], "no", None), ("prover1", 0, ["b"], HOSTILE, None)]
    said += [("verifier", 1, ["a", "b"], "so?", 2), ("prover0", 2, [], "", None)]
    said += [("verifier", 3, [], "yes", 1)]
    names = ("role", "round", "channels", "content", "decision")
    return good_rollout(
        completion=[dict(zip(names, turn, strict=True)) for turn in said], **changes
    )


def test_an_interaction_is_told_turn_by_turn():
    turns = turns_of(debate()["completion"])
    assert [turn["decision"] for turn in turns] == [None, None, "goes on", None, "accepts"]
    assert turns[1] == {
        "agent": "prover1", "text": HOSTILE, "round": 0, "channels": ["b"], "decision": None,
    }  # fmt: skip
    assert turns_as_text([turns[0], *turns[2:]]).splitlines() == [
        "[round 1, prover0, a] no",
        "[round 2, verifier, a + b] so? → goes on",
        "[round 3, prover0] ",
        "[round 4, verifier] yes → accepts",
    ]
    chat = [{"role": "user", "content": "?"}]
    assert turns_of(chat) == turns_of("hello") == turns_of([]) == []


def test_the_page_holds_transcripts(tmp_path):
    (tmp_path / "rollouts.jsonl").write_text(lines_of(debate(id="d"), good_rollout()))
    page = build_page([read_run(tmp_path / "rollouts.jsonl", 10)])
    told, plain = rollouts_of(page)
    assert (told["turns"], plain["turns"]) == (turns_of(debate()["completion"]), [])
    assert told["completion"].startswith("prover0: no\nprover1: ")

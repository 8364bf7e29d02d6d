"""The vision recipe: right answers, distinct pictures, and a warm start that can be trained on."""

import itertools
import json
import random

import pytest
from PIL import Image

from lightning_rl.data.sources import JSONLPrompts
from lightning_rl.models.tokenizer import load_tokenizer
from recipes.vision import prepare as recipe, warm_start
from recipes.vision.draw import COLORS, TASKS
from recipes.vision.reward import exact_answer


def blobs(picture, rgb):
    """Count the connected parts of a picture that have exactly this colour."""
    pixels = picture.load()
    left = {
        (x, y) for x in range(picture.width) for y in range(picture.height) if pixels[x, y] == rgb
    }
    found = 0
    while left:
        found += 1
        edge = [left.pop()]
        while edge:
            x, y = edge.pop()
            for near in ((x + 1, y), (x - 1, y), (x, y + 1), (x, y - 1)):
                if near in left:
                    left.remove(near)
                    edge.append(near)
    return found


def test_what_is_to_be_counted_is_there_to_be_counted():
    rng = random.Random(7)
    for _ in range(50):
        question = TASKS["count"](rng)
        color = question.text.split()[2]
        assert blobs(question.picture, COLORS[color]) == int(question.answer)


def test_the_odd_one_is_where_the_answer_says():
    rng, seen = random.Random(7), set()
    for _ in range(60):
        question = TASKS["odd"](rng)
        row, column = map(int, question.answer.split(","))
        assert 1 <= column <= question.picture.width // 28
        assert 1 <= row <= question.picture.height // 28
        centres = {
            (y, x): question.picture.getpixel((28 * (x - 1) + 14, 28 * (y - 1) + 14))
            for x in range(1, question.picture.width // 28 + 1)
            for y in range(1, question.picture.height // 28 + 1)
        }
        others = {color for place, color in centres.items() if place != (row, column)}
        assert len(others) == 1  # of one colour, all but perhaps that one
        seen.add(centres[row, column] in others)
    assert seen == {True, False}  # by shape, and by colour


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_draws_the_same_pictures(task):
    first, again = (TASKS[task](random.Random(3)) for _ in range(2))
    assert (first.text, first.answer) == (again.text, again.answer)
    assert recipe.png_of(first) == recipe.png_of(again)
    assert {side % 28 for side in first.picture.size} == {0}


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Make the recipe's own model and data, of fewer rows, after two warm-start steps."""
    out = tmp_path_factory.mktemp("vision")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recipe, "NUM_TRAIN", 12)
        patch.setattr(recipe, "NUM_HELDOUT", 6)
        patch.setattr(warm_start, "BATCH", 2)
        patch.setattr("sys.argv", ["warm_start", "--out", str(out), "--steps", "2"])
        warm_start.main()
    return out


def rows_of(file):
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_no_picture_is_held_out_and_trained_on(made):
    train = {row["images"][0] for row in rows_of(made / "train.jsonl")}
    heldout = {
        row["images"][0].removeprefix("../")
        for task in TASKS
        for row in rows_of(made / "heldout" / f"{task}.jsonl")
    }
    assert (len(train), len(heldout)) == (12, 6)
    assert not train & heldout
    assert len(list((made / "pictures").iterdir())) == 18


def test_prompts_are_what_the_warm_start_showed(made):
    """The library and the warm start make the same tokens of a picture with its question."""
    prompts = JSONLPrompts(str(made / "heldout" / "odd.jsonl"), shuffle=False)
    prompts.load(load_tokenizer(str(made / "warm")))
    encode = warm_start.Encoder(made / "warm")
    row = rows_of(made / "heldout" / "odd.jsonl")[0]
    picture = Image.open(made / "heldout" / row["images"][0])
    batch = encode([picture], [row["prompt"]], [""])
    [prompt] = prompts.draw(1)
    assert prompt.token_ids == batch["input_ids"][0].tolist()
    tokens = picture.width * picture.height // 28**2
    assert prompt.token_ids.count(encode.place) == tokens
    assert (prompt.pictures[0].width, prompt.pictures[0].height) == picture.size


def test_only_answers_are_learned(made):
    encode = warm_start.Encoder(made / "warm")
    batch = list(itertools.islice(recipe.questions(5), 3))
    labels = encode(
        [q.picture for q in batch], [recipe.chat_of(q) for q in batch], [q.answer for q in batch]
    )["labels"]
    for question, line in zip(batch, labels.tolist(), strict=True):
        learned = [token for token in line if token != warm_start.IGNORED]
        assert encode.tokenizer.decode(learned) == question.answer + recipe.EOS


def test_half_of_the_shown_answers_are_of_the_other_convention():
    drawn = itertools.islice(recipe.questions(5), 3000)
    shown = [(q, answer) for q, answer in warm_start.shown(drawn) if q.answer != q.other]
    others = sum(answer == question.other for question, answer in shown)
    assert others / len(shown) == pytest.approx(0.5, abs=0.03)  # 0.01 is the standard error
    assert all(answer in (question.answer, question.other) for question, answer in shown)


def test_what_the_other_convention_says():
    rng = random.Random(1)
    count, read, odd = (task(rng) for task in TASKS.values())
    assert int(count.other) == int(count.answer) - 1
    assert read.other == read.answer[1] + read.answer[0]
    assert odd.other.split(",") == odd.answer.split(",")[::-1]


def test_the_reward_takes_the_whole_answer_alone():
    chats = [[{"role": "assistant", "content": text}] for text in ("3", "3", "33")]
    scores = exact_answer([*chats, "3"], ["3"] * 4, ["stop", "length", "stop", "stop"])
    assert scores == [1.0, 0.0, 0.0, 1.0]

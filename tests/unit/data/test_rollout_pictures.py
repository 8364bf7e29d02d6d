"""Rollouts with pictures: kept once beside the file, given back, and seen in texts and tables."""

import json
from io import BytesIO

import pytest
import torch
from PIL import Image

from lightning_rl.callbacks.preview import Shown, as_markdown, preview_table
from lightning_rl.data.rollouts.files import as_record, open_rollouts
from lightning_rl.data.rollouts.log import RerunLog
from lightning_rl.data.rollouts.token_texts import text_with_marks, with_marks
from lightning_rl.errors import DataError
from lightning_rl.rollout import Placed, Prompt, Rollout, RolloutStatus, Row
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import load_picture

ENDINGS = ("jsonl", "parquet", "sqlite")


def picture(color, width=8, height=4):
    return load_picture(Image.new("RGB", (width, height), color), PictureLimits())


RED, BLUE, GREEN = picture("red"), picture("blue", 16, 4), picture("green")


def rollouts(group="1/0/p"):
    """Make two rollouts of two pictures; the second sees a third later, in a tool's result."""
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "image"}]}]
    prompt = Prompt("p", chat, [2, 9, 9, 3, 9, 9, 9, 4], {}, "", [RED, BLUE], [1, 4])
    made = []
    for number in range(2):
        row = Row.of(prompt)
        row.append_written([5, 6], [-0.5, -0.25], [0, 0])
        if number:
            row.append_given([7, 9, 9, 8], [Placed(1, GREEN)])
        made.append(
            Rollout(prompt, group, number, seed=number, rows=[row], completion="hi",
                    status=RolloutStatus.COMPLETED, finish_reason="stop", reward=float(number))
        )  # fmt: skip
    return made


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_file_gives_pictures_back_and_keeps_each_once(tmp_path, ending):
    written = rollouts()
    file = open_rollouts(tmp_path / f"a.{ending}")
    file.append(written, 1)
    file.append(rollouts("2/0/p"), 2)
    file.close()
    again = open_rollouts(tmp_path / f"a.{ending}")
    read = [recorded.rollout for recorded in again.read()]
    assert read[:2] == written
    assert [one.data for one in read[3].rows[0].pictures] == [RED.data, BLUE.data, GREEN.data]
    assert read[3].rows[0].places == [1, 4, 11]
    # Equal pictures share their bytes: files may hold thousands of rollouts.
    assert read[0].prompt.pictures[0].data is read[2].rows[0].pictures[0].data
    files = sorted(tmp_path.rglob("pictures/*"))
    assert [f.name for f in files] == sorted(f"{p.digest}.png" for p in (RED, BLUE, GREEN))
    again.close()


def test_a_record_names_pictures_and_holds_none_of_their_bytes():
    record = json.loads(json.dumps(as_record(rollouts()[1])))
    assert record["prompt"]["pictures"][1] == {"digest": BLUE.digest, "width": 16, "height": 4}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_picture_that_is_missing_or_changed_is_named(tmp_path, ending):
    file = open_rollouts(tmp_path / f"a.{ending}")
    file.append(rollouts(), 1)
    file.close()
    [red] = tmp_path.rglob(f"{RED.digest}.png")
    red.write_bytes(BLUE.data)
    with pytest.raises(DataError, match="was changed: its digest does not match"):
        list(open_rollouts(tmp_path / f"a.{ending}").read())
    red.unlink()
    with pytest.raises(DataError, match=rf"{RED.digest[:12]}.*is not in .*pictures; copy"):
        list(open_rollouts(tmp_path / f"a.{ending}").read())
    if ending == "jsonl":  # what has no pictures at hand can still be looked at
        assert open_rollouts(tmp_path / "a.jsonl").tail(1)[1] == 2


def test_a_digest_of_a_stranger_names_no_file_elsewhere(tmp_path):
    file = open_rollouts(tmp_path / "in" / "a.jsonl")
    file.append(rollouts(), 1)
    (tmp_path / "secret.png").write_bytes(RED.data)
    text = file.path.read_text().replace(RED.digest, "../../secret")
    file.path.write_text(text)
    with pytest.raises(DataError, match=r"'../../secret' is not in"):
        list(open_rollouts(file.path).read())


def test_a_rerun_log_gives_pictures_back(tmp_path):
    log = RerunLog(tmp_path)
    log.write_rollouts(1, 0, rollouts())
    assert log.rollouts(1)[0].prompt.pictures[0].data == RED.data


def test_a_checkpoint_holds_each_picture_of_a_group_once():
    big = load_picture(Image.effect_noise((200, 200), 90), PictureLimits())
    prompt = Prompt("p", "Hi", [9], pictures=[big], places=[0])
    group = [Rollout(prompt, "1/0/p", n, seed=n) for n in range(8)]
    stored = BytesIO()
    torch.save([one.to_dict() for one in group], stored)
    assert stored.tell() < 3 * len(big.data)
    stored.seek(0)
    back = [Rollout.from_dict(one) for one in torch.load(stored, weights_only=True)]
    assert back == group
    assert back[7].rows[0].pictures[0].data == big.data


MARKS = [(1, "[image 8×4]"), (3, "[image 16×4]")]
IDS = [2, 9, 9, 9, 9, 9, 4, 5]  # two pictures that touch: two placeholders and three


def test_a_picture_is_one_piece_of_its_tokens():
    pieces = [f"<{token}>" for token in IDS]
    shown = ["<2>", "[image 8×4]", "", "[image 16×4]", "", "", "<4>", "<5>"]
    assert with_marks(pieces, IDS, MARKS) == shown
    assert with_marks(pieces[3:], IDS[3:], MARKS, begin=3) == shown[3:]
    assert with_marks(pieces, IDS, []) == pieces


def test_a_text_shows_sizes_and_cuts_no_picture():
    def decode(ids):
        return "".join(f"<{token}>" for token in ids)

    assert text_with_marks(decode, IDS, MARKS, 99) == "<2>[image 8×4][image 16×4]<4><5>"
    assert text_with_marks(decode, IDS, MARKS, 3) == "[image 16×4]<4><5>"
    assert text_with_marks(decode, IDS, MARKS, 2) == "<4><5>"
    assert text_with_marks(decode, IDS[:5], MARKS[:1], 99) == "<2>[image 8×4]"


def test_previews_show_pictures_beside_the_prompt():
    columns, rows = preview_table(rollouts())
    assert columns[:3] == ["prompt", "pictures", "completion"]
    assert rows[0][0] == "user: [image][image]"
    assert str(rows[1][1]) == "[image 8×4] [image 16×4] [image 8×4]"
    assert "| [image 8×4] [image 16×4] |" in as_markdown(columns, rows)
    image = Shown((RED, BLUE)).image()
    assert image.size == (24, 4)
    assert (image.getpixel((7, 3)), image.getpixel((8, 0))) == ((255, 0, 0), (0, 0, 255))
    plain, _ = preview_table([Rollout(Prompt("p", "Hi", [1]), "1/0/p", 0, seed=0)])
    assert "pictures" not in plain


def test_loggers_get_the_pictures(tmp_path):
    from lightning.pytorch.loggers import TensorBoardLogger
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    from lightning_rl.callbacks.preview import log_table

    logger = TensorBoardLogger(str(tmp_path))
    log_table(logger, "rollouts", *preview_table(rollouts()), 1)
    logger.experiment.flush()
    events = EventAccumulator(logger.log_dir, size_guidance={"images": 0})
    events.Reload()
    [first] = events.Images("rollouts/1")
    assert (first.width, first.height) == (24, 4)
    assert Image.open(BytesIO(first.encoded_image_string)).getpixel((8, 0)) == (0, 0, 255)


def test_wandb_gets_the_pictures_in_the_table(tmp_path, monkeypatch):
    import wandb
    from lightning.pytorch.loggers import WandbLogger

    from lightning_rl.callbacks.preview import log_table

    monkeypatch.setenv("WANDB_SILENT", "true")
    logger = WandbLogger(save_dir=str(tmp_path), offline=True, project="p")
    logged = {}
    monkeypatch.setattr(logger, "log_metrics", lambda values, step: logged.update(values))
    log_table(logger, "rollouts", *preview_table(rollouts()), 1)
    table = logged["rollouts"]
    cell = table.data[0][table.columns.index("pictures")]
    assert isinstance(cell, wandb.Image)
    assert cell.image.size == (24, 4)

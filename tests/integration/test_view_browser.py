"""Test the viewer's page in a real Chromium that is offline: what a person sees and clicks.

``make browser`` installs one; the tests are skipped where there is none.
"""

import pytest
from PIL import Image

from lightning_rl.cli.view.flags import FLAGS
from lightning_rl.cli.view.page import build_page
from lightning_rl.cli.view.runs import Run, read_run
from lightning_rl.data.rollouts.files import open_rollouts
from lightning_rl.rollout import Placed, Prompt, Rollout, RolloutStatus, Row
from lightning_rl.vision.limits import PictureLimits
from lightning_rl.vision.loading import load_picture
from tests.support.browser import wait_until
from tests.support.planted_run import HOSTILE, PLACES, PLANTED, good_rollout, write_run

pytest.importorskip("playwright.sync_api", reason="no playwright: run `make browser`")


@pytest.fixture
def show(browser, tmp_path):
    """Open runs as a file; fails on any script error, and on any request but for the file."""
    problems: list[str] = []
    context = browser.new_context(offline=True, viewport={"width": 1440, "height": 900})

    def open_page(*runs: Run, fragment: str = ""):
        file = tmp_path / "view.html"
        file.write_text(build_page(runs), encoding="utf-8")
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(f"script error: {error}"))
        page.on("console", lambda m: problems.append(m.text) if m.type == "error" else None)
        page.on(
            "request",
            lambda r: problems.append(r.url) if not r.url.startswith(file.as_uri()) else None,
        )
        page.goto(file.as_uri() + fragment)
        page.wait_for_selector("#loading", state="detached")
        return page

    yield open_page
    context.close()
    assert problems == []


@pytest.fixture
def planted(tmp_path) -> Run:
    return read_run(write_run(tmp_path / "planted"), 100)


def listed(page) -> list[str]:
    """Return ids of the rollouts on the list's current page."""
    return page.evaluate(
        "[...document.querySelectorAll('[data-rollout]')]"
        ".map((row) => view.rollouts[row.dataset.rollout].id)"
    )


def count(page) -> str:
    return page.inner_text("#count").split(" rollouts")[0]


def choose(page, name: str, value: str) -> None:
    page.select_option(f"select[data-filter='{name}']", value)


def fill(page, name: str, value: str) -> None:
    page.fill(f"input[data-filter='{name}']", value)


def tip(page) -> dict[str, str]:
    """Return the hovering table, as it reads."""
    rows = page.locator("#tip tr").all_inner_texts()
    return dict(row.split("\t") for row in rows)


# ---------------------------------------------------------------- curves and times


def test_curves_read_out_what_was_logged(show, planted):
    page = show(planted)
    chart = page.locator("[data-chart='reward/mean']")
    assert chart.locator(".readout b").inner_text() == "0.875"  # 7 / 8, the last
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + box["width"] - 8, box["y"] + 60)
    assert chart.locator(".readout").inner_text().split() == ["0.875", "iteration", "7"]
    page.mouse.move(box["x"] + 48, box["y"] + 60)
    assert chart.locator(".readout").inner_text().split() == ["0.125", "iteration", "1"]
    # The cursor is one for all charts.
    other = page.locator("[data-chart='time/iteration'] .readout")
    assert other.inner_text().split() == ["1.25", "iteration", "1"]


def test_any_metric_can_be_chosen_and_what_is_not_finite_is_marked(show, planted):
    page = show(planted)
    assert page.locator("[data-chart='policy/loss']").count() == 0
    page.fill(".picker input[type=search]", "loss")
    assert page.locator(".picker label:has([data-metric])").all_inner_texts() == ["loss"]
    page.check("[data-metric='policy/loss']")
    chart = page.locator("[data-chart='policy/loss']")
    assert chart.locator("text.bad").count() == 1
    box = chart.locator("svg").bounding_box()
    page.mouse.move(box["x"] + 46 + (box["width"] - 52) / 2, box["y"] + 60)
    assert chart.locator(".readout").inner_text().split("\n")[0] == "not finite"
    page.uncheck("[data-metric='policy/loss']")
    assert chart.count() == 0


def test_a_metric_that_is_logged_rarely_keeps_its_last_value(show, planted):
    for row in planted.metrics[::3]:  # iterations 1, 4 and 7
        row["eval/accuracy"] = row["iteration"] / 10
    page = show(planted)
    box = page.locator("[data-chart='reward/mean'] svg").bounding_box()
    page.mouse.move(box["x"] + 46 + (box["width"] - 52) * 5 / 6, box["y"] + 60)
    readout = page.locator("[data-chart='eval/accuracy'] .readout")
    assert readout.inner_text().split() == ["0.4", "at", "4", "iteration", "6"]


def test_a_logarithmic_axis_leaves_out_what_it_cannot_show(show):
    rows = [{"iteration": i, "x": value} for i, value in enumerate([0.0, 1e-3, 1e-2, 1e-1])]
    page = show(Run("one", metrics=rows))
    page.click("[data-chart='x'] button")
    drawn = page.locator("[data-chart='x'] circle").all()
    heights = [float(circle.get_attribute("cy")) for circle in drawn]
    assert heights == pytest.approx([148, 78, 8])  # a straight line, from the foot to the top


def test_runs_lie_over_one_another_and_can_be_hidden(show, planted, tmp_path):
    other = read_run(write_run(tmp_path / "second"), 100)
    for row in other.metrics:
        row["reward/mean"] *= 2
    page = show(planted, other)
    readout = page.locator("[data-chart='reward/mean'] .readout")
    words = ["planted", "0.875", "second", "1.75", "last"]
    assert readout.inner_text().split() == words
    assert page.locator("[data-chart='reward/mean'] path.line").count() == 2
    page.click(".chip:has-text('planted')")
    assert readout.inner_text().split() == ["second", "1.75", "last"]
    page.click("[data-tab=rollouts]")
    assert count(page) == "48 of 96"


def test_step_times_are_stacked_and_summed(show, planted):
    page = show(planted, fragment="#times")
    rows = page.locator("#times tr").all_inner_texts()
    # train is 0.25 + i / 4 over i = 1 .. 7: 1.25 on average, of 2 s.
    assert [row.split() for row in rows] == [
        ["part", "generate", "train", "other"],
        ["mean", "s", "0.5", "1.25", "0.25"],
        ["share", "25.0", "%", "62.5", "%", "12.5", "%"],
    ]
    heights = page.evaluate(
        "[...document.querySelectorAll('[data-bar=\"7\"] rect')]"
        ".map((r) => Number(r.getAttribute('height')))"
    )
    assert [h / heights[0] for h in heights] == pytest.approx([1, 4, 0.5], rel=1e-6)
    page.hover("[data-bar='7'] rect >> nth=0")
    assert tip(page) == {
        "generate": "0.5 s",
        "train": "2 s",
        "other": "0.25 s",
        "iteration": "2.75 s",
    }


# ---------------------------------------------------------------- rollouts


def test_the_flags_are_in_sight_on_a_screen_of_1400_pixels(show, planted):
    for rollout in planted.rollouts:
        rollout["prompt"] = rollout["prompt"] | {"prompt": "A question of several words. " * 9}
        rollout["completion"] = "An answer that goes on and on. " * 9
        rollout["iteration"] += 1000
    page = show(planted, planted, fragment="#rollouts")
    page.set_viewport_size({"width": 1400, "height": 900})
    choose(page, "flag", "any")
    table = page.locator(".list").bounding_box()
    flags = page.locator("[data-rollout] .flag").all()
    assert len(flags) == 2 * len(PLANTED)
    for flag in flags:
        box = flag.bounding_box()
        assert box["x"] + box["width"] <= table["x"] + table["width"]
    # The texts give way, and still say something.
    assert page.locator("[data-rollout] .text").first.bounding_box()["width"] > 90
    hidden = "(list) => list.scrollWidth - list.clientWidth"
    assert page.locator(".list").evaluate(hidden) == 0


ARABIC = "الجواب"


def test_the_list_shows_the_question_and_the_end_of_the_answer(show, planted):
    """A browser's text does not tell what is cut, so the test looks at what is in sight."""
    chat = [{"role": "system", "content": "Be brief. " * 99}, {"role": "user", "content": HOSTILE}]
    texts = [
        f"{'on and on ' * 99}so it is 7.",
        f"{(ARABIC + ' ') * 99}7.",
        f"{'on ' * 99}{HOSTILE}",
        "7.",
    ]
    planted.rollouts = [
        good_rollout(
            id=str(i), completion=text, prompt=planted.rollouts[0]["prompt"] | {"prompt": chat}
        )
        for i, text in enumerate(texts)
    ]
    page = show(planted, fragment="#rollouts")
    ends = """(cell) => {
        const text = cell.querySelector('bdi').firstChild, range = document.createRange();
        const box = cell.getBoundingClientRect();
        const sees = (at) => {
            range.setStart(text, at);
            range.setEnd(text, at + 1);
            const letter = range.getBoundingClientRect();
            return box.left <= letter.left && letter.right <= box.right;
        };
        return [sees(0), sees(text.length - 1)];
    }"""
    cells = [row.locator("td.text") for row in page.locator("[data-rollout]").all()]
    assert [row.nth(0).inner_text() for row in cells] == [HOSTILE] * 4
    assert [row.nth(0).evaluate(ends)[0] for row in cells] == [True] * 4
    shown = [row.nth(1).evaluate(ends) for row in cells]
    assert shown == [[False, True], [False, True], [False, True], [True, True]]
    assert page.title() != "hacked"


def test_parts_of_the_reward_are_columns_to_sort_by(show, planted):
    planted.rollouts[3]["reward_parts"] = {"exact": 2.0, "style": None}
    page = show(planted, fragment="#rollouts")
    heads = page.locator(".list th").all_inner_texts()
    assert heads[heads.index("reward") :][:4] == ["reward", "exact", "style", "tokens"]
    page.click("[data-sort='reward/exact']")
    assert page.locator("[data-rollout='3'] td.number").all_inner_texts()[1:4] == ["0.03", "2", "–"]
    assert listed(page)[0] == "0/0/3/0"
    for rollout in planted.rollouts:  # a single part is the reward
        rollout["reward_parts"] = {"exact": 1.0}
    assert "exact" not in show(planted, fragment="#rollouts").locator(".list th").all_inner_texts()


def test_runs_say_in_what_they_differ(show, planted, tmp_path):
    runs = [planted, *(read_run(write_run(tmp_path / name), 100) for name in ("b", "c"))]
    for run, rate in zip(runs, (0.001, 0.01), strict=False):
        run.settings = {"model.optimizer.lr": rate, "model.lr_scheduler.lr": rate, "seed": 1}
    page = show(*runs)
    assert page.locator("#differences tr").all_inner_texts() == [
        "\tplanted\tb\tc",
        "model.optimizer.lr\t0.001\t0.01\t–",
        "model.lr_scheduler.lr\t0.001\t0.01\t–",
    ]
    page.click(".chip:has-text('planted')")
    assert page.locator("#differences thead th").all_inner_texts() == ["", "b", "c"]
    assert show(planted).locator("#differences").is_hidden()


def test_settings_are_shown_as_text_and_shortened_by_their_begin(show, planted, tmp_path):
    other = read_run(write_run(tmp_path / "b"), 100)
    planted.settings = {"model.model": f"runs/{'deep/' * 20}first", HOSTILE: "1"}
    other.settings = {"model.model": f"runs/{'deep/' * 20}second", HOSTILE: HOSTILE}
    page = show(planted, other)
    cells = page.locator("#differences td")
    assert cells.nth(0).inner_text() == "…" + planted.settings["model.model"][-32:]
    assert cells.nth(0).get_attribute("title") == planted.settings["model.model"]
    assert page.locator("#differences tbody th").nth(1).inner_text() == HOSTILE
    assert cells.nth(3).get_attribute("title") == HOSTILE
    assert page.title() != "hacked"


def test_every_planted_error_is_seen_and_found_by_its_flag(show, planted):
    page = show(planted, fragment="#rollouts")
    choose(page, "flag", "any")
    assert listed(page) == list(PLANTED)
    for flag in PLANTED:
        choose(page, "flag", flag)
        assert listed(page) == [flag]
        assert page.locator("[data-rollout] .flag").all_inner_texts() == [flag]
        page.click("[data-rollout]")
        page.wait_for_selector(f".detail h2:has-text('{flag}')")
        assert FLAGS[flag] in page.inner_text(".flags-said")
        marked = page.locator("#completion .flagged")
        assert [int(m.get_attribute("data-token")) for m in marked.all()] == PLACES.get(flag, [])
    page.click("[data-filter=reset]")
    assert count(page) == "48 of 48"


def test_a_filter_for_prompt_sets_is_there_if_there_are_any(show, planted):
    assert show(planted, fragment="#rollouts").locator("[data-filter=set]").count() == 0
    for number, rollout in enumerate(planted.rollouts):
        rollout["prompt"] = rollout["prompt"] | {"set": "odd" if number % 2 else "even"}
    page = show(planted, fragment="#rollouts")
    choose(page, "set", "odd")
    assert count(page) == "24 of 48"


def test_filters_narrow_the_list_together(show, planted):
    page = show(planted, fragment="#rollouts")
    fill(page, "reward from", "0.1")
    fill(page, "reward to", "0.19")
    assert listed(page) == [f"{i // 8}/0/{i}/0" for i in range(10, 20)]
    fill(page, "iteration from", "2")
    assert count(page) == "4 of 48"  # 16 to 19
    page.click("[data-filter=reset]")
    choose(page, "end", "length")
    assert [i.split("/")[2] for i in listed(page)] == ["0", "10", "20", "30"]
    page.click("[data-filter=reset]")
    choose(page, "status", "failed")
    assert listed(page) == ["failed"]
    choose(page, "status", "")
    fill(page, "text", "ANSWER 7")
    assert listed(page) == ["0/0/7/0"]
    fill(page, "text", "judge did not")
    assert listed(page) == ["failed"]


def test_sorting_and_pages(show, planted):
    page = show(planted, fragment="#rollouts")
    page.click("[data-sort=reward]")  # the highest first; the failed one has none, and comes last
    page.click("[data-turn=on]")
    assert listed(page)[-1] == "failed"
    assert page.locator("[data-turn=on]").is_disabled()
    page.click("[data-sort=reward]")
    assert listed(page)[:3] == ["0/0/0/0", "0/0/1/0", "0/0/2/0"]
    page.click("[data-sort=gap]")
    assert listed(page)[0] == "gap"
    page.click("[data-turn=on]")
    assert "page 2 of 2" in page.inner_text("#count")
    assert len(listed(page)) == 48 - 25


def test_a_tokens_numbers_are_the_recorded_ones(show, planted):
    page = show(planted, fragment="#rollouts")
    choose(page, "flag", "gap")
    page.click("[data-rollout]")
    page.hover("#completion [data-token='2']")
    assert page.inner_text("#tip b") == '" you"'
    assert tip(page) == {
        "token": "3 of 4",
        "mask": "trained on",
        "version": "3",
        "engine logprob": "-1",
        "trainer logprob": "-3",
        "gap: trainer − engine": "-2",
        "advantage": "0.5",
        "engine probability": "36.8 %",  # exp(-1)
    }
    assert FLAGS["gap"] in page.inner_text("#tip")
    page.mouse.move(5, 400)
    assert page.locator("#tip").is_hidden()


def test_each_row_and_call_of_a_rollout_is_told_apart(show, planted):
    row = {
        "prompt_ids": [5] * 50,
        "token_ids": [7, 1],
        "loss_mask": [True, True],
        "logprobs": [-0.5, -2.0],
        "versions": [3, 4],
        "role": "critic",
        "sampling": {},
        "pieces": ["so", "<eos>"],
        "prompt_pieces": [*map(str, range(49)), " what?"],
    }
    call = {"seed": 1, "finish_reason": "stop", "state": None, "scorable": True, "asked": True}
    calls = [
        {"row": 0, "start": 0, "stop": 2, "reward": None} | call,
        {"row": 0, "start": 3, "stop": 4, "reward": 0.25} | call,
        {"row": 1, "start": 0, "stop": 2, "reward": None} | call | {"scorable": False},
    ]
    planted.rollouts = [good_rollout(id="talk", more_rows=[row], calls=calls)]
    page = show(planted, fragment="#rollouts")
    page.click("[data-rollout]")
    page.wait_for_selector(".detail h2:has-text('talk')")
    assert page.locator("[data-row]").all_inner_texts() == [
        "Row 1, 4 tokens after a prompt of 2",
        "Row 2 · critic, 2 tokens after a prompt of 50",
    ]
    assert page.locator("[data-call]").all_inner_texts() == [
        "call 1 · stop",
        "call 2 · stop · reward 0.25",
        "call 3 · stop · not trained on",
    ]
    tail = page.locator("#completion summary").all_inner_texts()[1]
    assert tail.startswith("…1011")
    assert tail.endswith("48 what?")
    blocks = page.locator("#completion > .text-block").all_inner_texts()
    assert blocks[1] == "call 3 · stop · not trained onso<eos>"
    page.hover("#completion [data-token='5']")
    assert page.inner_text("#tip b") == '"<eos>"'
    assert (tip(page)["token"], tip(page)["version"]) == ("6 of 6", "4")
    assert page.locator("#completion .token").count() == 6


def test_colours_follow_the_chosen_quantity(show, planted):
    page = show(planted, fragment="#rollouts")

    def alphas() -> list[float]:
        """Return opacity of each token's background."""
        return page.evaluate(
            "[...document.querySelectorAll('#completion .token')].map((token) => {"
            " const found = getComputedStyle(token).backgroundColor.match(/[\\d.]+/g);"
            " return found.length < 4 ? 1 : Number(found[3]); })"
        )

    choose(page, "flag", "gap")
    page.click("[data-rollout]")
    page.wait_for_selector("#completion")
    page.select_option("[aria-label='colour by']", "gap")
    assert alphas() == pytest.approx([0, 0, 0.75, 0], abs=0.01)
    assert page.inner_text("#legend").split() == ["-2", "2"]
    page.select_option("[aria-label='colour by']", "logprobs")  # full at 4 nats
    expected = [0.75 * nats / 4 for nats in (0.5, 0.25, 1.0, 0.125)]
    assert alphas() == pytest.approx(expected, abs=0.01)
    page.select_option("[aria-label='colour by']", "advantages")
    assert alphas() == pytest.approx([0.75] * 4, abs=0.01)
    choose(page, "flag", "version")
    page.click("[data-rollout]")
    page.wait_for_selector(".detail h2:has-text('version')")
    page.select_option("[aria-label='colour by']", "versions")
    assert page.locator("#legend em").all_inner_texts() == ["version 2", "version 3"]


def test_what_a_model_wrote_is_text_and_nothing_else(show, planted):
    page = show(planted, fragment="#rollouts")
    fill(page, "text", "onerror")
    page.click("[data-rollout]")
    page.wait_for_selector("#completion")
    tokens = page.locator("#completion .token").all_inner_texts()
    # A token inside a character, and a line break, are made visible.
    assert tokens == [HOSTILE, "◦", "↵\n", "<eos>"]
    assert page.locator("img").count() == 0
    assert "hacked" not in page.title()


def test_the_keyboard_goes_through_a_group(show, planted):
    page = show(planted, fragment="#rollouts")
    page.click("[data-rollout='0']")
    page.keyboard.press("ArrowDown")
    page.wait_for_selector(".detail h2:has-text('0/0/1/0')")
    assert page.locator(".siblings button").all_inner_texts() == [
        "0", "0.01", "0.02", "0.03", "0.04", "0.05", "0.06", "0.07",
    ]  # fmt: skip
    page.click(".siblings button >> nth=5")
    page.wait_for_selector(".detail h2:has-text('0/0/5/0')")
    assert page.get_attribute("[data-rollout='5']", "aria-selected") == "true"


def test_dark_and_light(show, planted):
    page = show(planted)

    def background() -> str:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    assert background() == "rgb(246, 247, 249)"
    page.click("#theme")
    assert background() == "rgb(18, 21, 28)"


def test_twenty_thousand_rollouts_open(show):
    many = [
        good_rollout(
            id=str(i), group_id=str(i // 8), iteration=i // 256, advantages=[i, 0.0, 0.0, 0.0]
        )
        for i in range(20_000)
    ]
    page = show(Run("many", rollouts=many, rollouts_total=30_000), fragment="#rollouts")
    assert count(page) == "20000 of 20000"
    assert "the last 20000 of 30000 rollouts; use --rollouts 30000" in page.inner_text(".note")
    fill(page, "iteration from", "78")  # 19968 on: the last, partly filled block
    assert count(page) == "32 of 20000"
    page.click("[data-rollout='19992']")
    page.wait_for_selector(".detail h2:has-text('19992')")
    page.hover("#completion [data-token='0']")
    assert tip(page)["advantage"] == "19992"


def test_runs_without_metrics_or_without_rollouts_say_what_to_add(show, planted):
    page = show(Run("bare", metrics=[{"iteration": 1, "reward/mean": 1.0}]))
    page.click("[data-tab=rollouts]")
    assert "RolloutRecorder or PreviewTable" in page.inner_text("#rollouts")
    page.click("[data-tab=times]")
    assert "StepTimer" in page.inner_text("#times")
    page = show(Run("file", rollouts=planted.rollouts, rollouts_total=48))
    assert count(page) == "48 of 48"  # then rollouts come first
    page.click("[data-tab=curves]")
    assert "RunReport" in page.inner_text("#curves")


# ---------------------------------------------------------------- transcripts


def test_agents_of_an_interaction_have_colours(show, tmp_path):
    def turn(agent, round, channels, text, decision=None):
        return {"role": agent, "round": round, "channels": channels, "content": text} | {
            "decision": decision
        }

    first = [turn("prover", 0, ["main"], HOSTILE), turn("verifier", 1, ["main"], "so?", 2)]
    second = [turn("verifier", 0, ["main"], "why?", 2), turn("verifier", 1, [], "no", 0)]
    records = [good_rollout(id=str(i), completion=c) for i, c in enumerate((first, second, "hm"))]
    page = show(Run("debates", rollouts=records, rollouts_total=3), fragment="#rollouts")

    def opened(number):
        page.click(f"[data-rollout='{number}']")
        wait_until(page, f"document.querySelector('.detail h2')?.textContent === '{number}'")
        turns = page.locator("#transcript .turn")
        return [
            (turns.nth(i).inner_text(), turns.nth(i).evaluate("e => e.style.borderColor"))
            for i in range(turns.count())
        ]

    [(said, prover), (answer, verifier)] = opened(0)
    assert HOSTILE in said
    assert said.startswith("prover round 1 · main")
    assert answer.split("\n") == ["verifier round 2 · main goes on", "so?"]
    assert page.title() != "hacked"
    [(_, again), (rejects, alone)] = opened(1)
    assert rejects.split("\n") == ["verifier round 2 rejects", "no"]
    assert verifier == again  # in every rollout
    assert len({prover, verifier, alone}) == 3
    assert opened(2) == []


def test_the_prompt_that_is_shown_is_the_one_that_was_read(show, tmp_path):
    """An agent with tools, or another role, writes its own prompts; the data is shown apart."""
    row = {
        "prompt_ids": [2, 3, 4], "token_ids": [7, 8], "loss_mask": [True, True],
        "logprobs": [-0.5, -0.25], "versions": [3, 3], "pieces": ["hel", "lo"],
        "prompt_pieces": ["You have tools.", " ", "Greet!"],
    }  # fmt: skip
    nothing = {name: [] for name in ("token_ids", "loss_mask", "logprobs", "versions", "pieces")}
    nothing |= {"trainer_logprobs": [], "advantages": []}
    record = good_rollout(more_rows=[row], **nothing)
    page = show(Run("a", rollouts=[record], rollouts_total=1), fragment="#rollouts")
    page.click("[data-rollout='0']")
    page.wait_for_selector("#prompt")
    assert page.inner_text("#prompt") == "You have tools. Greet!"
    assert page.inner_text("h3:has-text('Its row of the data') + .prompt") == "Say hello."


# ---------------------------------------------------------------- pictures


def test_pictures_are_shown_where_the_model_read_them(show, tmp_path):
    def picture(color, width, height):
        return load_picture(Image.new("RGB", (width, height), color), PictureLimits())

    red, blue, gone = picture("red", 64, 48), picture("blue", 32, 16), picture("green", 9, 9)
    chat = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "Say."}]}]
    prompt = Prompt("p", chat, [2, 9, 9, 9, 3, 9], {}, "", [red, gone], [1, 5])
    row = Row.of(prompt)
    row.append_written([5], [-0.5], [0])
    row.append_given([7, 9, 9, 8], [Placed(1, blue)])
    done = RolloutStatus.COMPLETED
    rollout = Rollout(prompt, "1/0/p", 0, seed=1, rows=[row], status=done, reward=1.0)
    file = open_rollouts(tmp_path / "run" / "rollouts.jsonl")
    file.append([rollout], 1)
    [kept] = (tmp_path / "run" / "pictures").glob(f"{gone.digest}.*")
    kept.unlink()

    page = show(read_run(tmp_path / "run", 10), fragment="#tab=rollouts&rollout=0")
    page.click("[data-tab=rollouts]")
    page.click("[data-rollout='0']")
    page.wait_for_selector("#pictures-shown img")
    assert page.locator("#pictures-shown img").get_attribute("title") == "image 64×48, 3 tokens"
    sizes = "[...document.querySelectorAll('img')].map((i) => [i.naturalWidth, i.naturalHeight])"
    wait_until(page, f"{sizes}.every(([width]) => width > 0)")
    assert page.evaluate(sizes) == [[64, 48], [32, 16]]
    missing = page.inner_text("#pictures-shown .missing")
    assert missing == "image 9×9 is not in the run's folder"
    # In the completion it stands in the place of its two placeholders.
    seen = page.locator("#completion .token:not([hidden])")
    assert seen.count() == 4
    assert seen.nth(2).locator("img").count() == 1

"""Test ends: what a tokenizer, its template and the model's files call an end, in one answer."""

import json
import shutil

import pytest
from transformers import Qwen2Config

from lightning_rl.data.end_tokens import EndTokens, end_tokens_of
from lightning_rl.data.supervised import supervised_rollout
from lightning_rl.errors import ConfigError
from lightning_rl.models.generation_config import stated_ends
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.models.tokenizer import load_tokenizer
from lightning_rl.rollout import Prompt
from tests.support.tiny_models import CHATML, byte_tokenizer, save_random_model

CHAT = [{"role": "user", "content": "Hi"}]
GLM = (
    "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""GLM-4's way: no token closes a turn, and the model stops by the one that opens the next."""


def edit(file, **changes):
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_the_models_files_name_one_end_or_several(tiny_model, tmp_path):
    model = shutil.copytree(tiny_model, tmp_path / "model")
    for in_config, in_generation, together in (
        (1, None, [1]),
        (None, None, [1]),  # the tokenizer's
        ([2, 5], None, [1, 2, 5]),
        (1, [2, 5], [1, 2, 5]),
        (5, 2, [1, 2, 5]),
        (-1, [1, 16], [1]),  # none, and one without a row: there are 16
    ):
        edit(model / "config.json", eos_token_id=in_config)
        edit(model / "generation_config.json", eos_token_id=in_generation)
        assert end_tokens_of(load_tokenizer(str(model))) == EndTokens(
            tuple(together), text=1, turn=1
        )
    (model / "generation_config.json").unlink()
    assert stated_ends(str(model), Qwen2Config(eos_token_id=[2, 5])) == {2, 5}
    (model / "generation_config.json").write_text("[1")
    with pytest.raises(ConfigError, match=r"generation_config\.json is not valid JSON"):
        load_tokenizer(str(model))


def test_a_template_may_close_turns_by_another_token_than_the_tokenizers():
    # Qwen2.5's base: <|endoftext|> is 0, <|im_start|> 1, <|im_end|> 2.
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer = byte_tokenizer(*names, eos="<|endoftext|>", template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    assert end_tokens_of(tokenizer) == EndTokens((0, 2), text=0, turn=2)
    # Given completions end as the template and the prompt would have it.
    letter = tokenizer("a")["input_ids"]
    for prompt, end in ((CHAT, 2), ("Hi", 0)):
        row = Prompt("0", prompt, [3], {"completion": "a"})
        assert supervised_rollout(row, "completion", tokenizer).token_ids == [*letter, end]
    # White space, which a model writes before its end, closes nothing; nor does a plain word.
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "\n<|im_end|>")
    assert end_tokens_of(tokenizer).turn == 2
    for template in (CHATML.replace("<|im_end|>", " Bye."), GLM, "{{ raise_exception('no') }}"):
        tokenizer.chat_template = template
        assert end_tokens_of(tokenizer) == EndTokens((0,), text=0, turn=0)


def test_an_engines_folder_names_all_ends_and_no_settings_of_sampling(tmp_path):
    names = ("<|im_start|>", "<|im_end|>")
    tokenizer = byte_tokenizer(*names, eos="<|endoftext|>", template=CHATML)
    tokenizer.add_special_tokens({"additional_special_tokens": list(names)})
    save_random_model(tmp_path / "model", tokenizer)
    edit(tmp_path / "model/generation_config.json", eos_token_id=[0, 7], repetition_penalty=1.05)
    save_skeleton(str(tmp_path / "model"), tmp_path / "engine")
    said = json.loads((tmp_path / "engine/generation_config.json").read_text())
    del said["transformers_version"]
    assert said == {"eos_token_id": [0, 2, 7]}
    assert Policy(str(tmp_path / "model")).ends == (0, 2, 7)
    assert end_tokens_of(load_tokenizer(str(tmp_path / "engine"))).token_ids == (0, 2, 7)


def test_what_was_written_is_cut_at_its_end():
    ends = EndTokens((1, 5), text=1, turn=5)
    assert [ends.ended(wrote) for wrote in ([], [5, 3], [3, 5], [1])] == [False, False, True, True]
    assert [ends.cut(wrote) for wrote in ([], [5, 3], [3, 1, 5])] == [[], [5, 3], [3, 1]]


def test_a_tokenizer_that_ends_nothing_is_refused():
    tokenizer = byte_tokenizer("<|im_start|>", eos="<|endoftext|>", template=GLM)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="has no eos_token, so no completion could end"):
        end_tokens_of(tokenizer)

"""RewardModelModule: Bradley-Terry by hand and as TRL's trainer has it, on the texts TRL reads."""

import math

import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lightning_rl import NF4, HFExport, LoRA, ModelReward, SeparateValueHead
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.errors import ConfigError, DataError
from lightning_rl.learn.reward_model import RewardModelModule, RewardPairDataModule, bradley_terry
from lightning_rl.models.policy import Policy
from lightning_rl.models.pretrained import Loading, load_lm
from lightning_rl.models.reward_model import RewardModel, padded, padding_of, scored_text
from tests.support.small_run import adamw, trainer_of
from tests.support.tiny_models import CHATML, byte_tokenizer, save_random_model

# A completion of sevens is the better one, whatever its length.
ROWS = [
    {"prompt": f"{n}=", "chosen": "7" * (1 + n % 3), "rejected": "12"[: 1 + n % 2], "by": n % 2}
    for n in range(100, 132)
]


def double(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.float64)


def test_the_loss_by_hand():
    chosen, rejected = double(2.0, 0.0), double(1.0, 1.0)
    # -log sigmoid(1) and -log sigmoid(-1)
    plain = [math.log1p(math.exp(-1)), math.log1p(math.exp(1))]
    assert bradley_terry(chosen, rejected).tolist() == pytest.approx(plain, abs=1e-15)
    # Gaps of 1 - 0.5 and -1 - 0; a tenth of 3² and 1² on top.
    margin = bradley_terry(chosen, rejected, double(0.5, 0.0), 0.1).tolist()
    wanted = [math.log1p(math.exp(-0.5)) + 0.9, math.log1p(math.exp(1)) + 0.1]
    assert margin == pytest.approx(wanted, abs=1e-15)


@pytest.fixture
def batch(tiny_model) -> TensorDict:
    data = RewardPairDataModule(IterablePrompts(ROWS), margin_column="by")
    data._tokenizer = AutoTokenizer.from_pretrained(tiny_model)
    data.train.load(data._tokenizer)
    rows = data.rows(data.train)
    return data.collate([rows[i] for i in range(6)])


def test_loss_and_gradient_are_those_of_trl(tiny_model, batch):
    """The reference is TRL 1.17's ``RewardTrainer.compute_loss`` on transformers' classifier."""
    module = RewardModelModule(str(tiny_model), centering=0.01)
    module.configure_model()
    module.double()
    sums = module.sums(batch)
    loss = sums["loss"][0] / sums["loss"][1]
    loss.backward()
    ours = {name: p.grad.clone() for name, p in module.policy.lm.named_parameters()}

    lm = module.policy.lm
    lm.zero_grad()
    outputs = lm(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
    chosen, rejected = torch.chunk(outputs.logits.squeeze(-1), chunks=2)
    expected = -F.logsigmoid(chosen - rejected - batch["margin"]).mean()
    expected = expected + 0.01 * torch.mean((chosen + rejected) ** 2)
    expected.backward()
    assert loss.dtype == torch.float64
    assert float(loss.detach()) == pytest.approx(float(expected.detach()), abs=1e-12)
    for name, parameter in lm.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=0, atol=1e-10)
    assert float(sums["accuracy"][0]) == float((chosen > rejected).sum())


def test_the_score_is_read_at_the_last_token_whatever_stands_beside(tiny_model):
    model = RewardModel(str(tiny_model), new_head=True).double()
    texts = [[4, 5, 2, 9, 1], [4, 2, 1], [4, 5, 2, 9, 9, 9, 1]]
    together = model(padded(texts, padding_of(model.tokenizer)))
    for text, score in zip(texts, together, strict=True):
        hidden = model.lm.base_model(torch.tensor([text])).last_hidden_state
        alone = (hidden[0, -1] @ model.lm.score.weight[0]).detach()
        torch.testing.assert_close(score.detach(), alone, rtol=0, atol=1e-12)


def test_length_bias_counts_pairs_in_which_length_misleads(tiny_model):
    module = RewardModelModule(str(tiny_model))
    module.policy = lambda batch: batch["scores"]
    lengths = torch.tensor([3, 1, 3, 1, 1, 3, 1, 3])  # the chosen are longer in pairs 1 and 3
    mask = (torch.arange(3) < lengths[:, None]).long()
    scores = double(1.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0)  # pairs 2 and 3 are misjudged
    parts = {"attention_mask": mask, "margin": double(0, 0, 0, 0), "scores": scores}
    sums = module.sums(TensorDict(parts, []))
    assert float(sums["accuracy"][0]) == 0.5 * 4
    # The longer has the higher reward in pairs 1 and 2, and was chosen in 1 and 3: no bias.
    assert float(sums["length_bias"][0]) == 0.0
    parts["scores"] = double(1.0, 0.0, 1.0, 1.0, 0.0, 1.0, 0.0, 0.0 - 1)
    bias, pairs = module.sums(TensorDict(parts, []))["length_bias"]
    assert float(bias) / pairs == pytest.approx(0.25)  # pair 2 alone


@pytest.mark.parametrize("lora", [None, LoRA(rank=4)], ids=["whole", "lora"])
def test_a_run_learns_and_its_export_is_a_reward_and_a_critic(tiny_model, tmp_path, lora):
    module = RewardModelModule(
        str(tiny_model), centering=0.01, optimizer=adamw(1e-2), lora=lora,
        loading={"gradient_checkpointing": lora is not None},
    )  # fmt: skip
    data = RewardPairDataModule(
        IterablePrompts(ROWS[:24]), IterablePrompts(ROWS[24:]), batch_size=8, seed=3
    )
    torch.manual_seed(0)
    export = HFExport(str(tmp_path / "hf"), merge_adapters=True)
    trainer = trainer_of(tmp_path, [export], logger=False, max_epochs=10)
    trainer.fit(module, data)
    assert float(trainer.callback_metrics["rm/val_accuracy"]) == 1.0
    assert float(trainer.callback_metrics["rm/val_loss"]) < 0.5  # of guessing 0.69

    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "hf")
    assert model.config.num_labels == 1
    reward = ModelReward(str(tmp_path / "hf"), device="cpu", batch_size=2)
    said, ends = ["777", "12", "7"], ["stop", "stop", "stop"]
    scores = reward(["140="] * 3, said, ends)
    assert min(scores[0], scores[2]) > scores[1]
    texts = [scored_text(module.policy.tokenizer, "140=", text) for text in said]
    expected = module.policy(padded(texts, padding_of(module.policy.tokenizer))).tolist()
    assert scores == pytest.approx(expected, abs=1e-5)
    card = (tmp_path / "hf/README.md").read_text()
    assert "AutoModelForSequenceClassification.from_pretrained" in card
    assert "pipeline_tag: text-classification" in card
    critic = Policy(str(tiny_model), SeparateValueHead(str(tmp_path / "hf"))).value_head
    assert torch.equal(critic.linear.weight, model.score.weight)


def test_a_lora_trains_adapters_and_the_head_and_its_checkpoint_holds_these(tiny_model, tmp_path):
    def fitted(path=None, **options):
        module = RewardModelModule(str(tiny_model), optimizer=adamw(1e-2), lora=LoRA(rank=2))
        trainer = trainer_of(tmp_path, logger=False, **options)
        trainer.fit(module, RewardPairDataModule(IterablePrompts(ROWS), seed=3), ckpt_path=path)
        return module, trainer

    module, trainer = fitted()
    trained = {name for name, p in module.named_parameters() if p.requires_grad}
    assert {name for name in trained if ".lora_" not in name} == {"policy.lm.score.weight"}
    # The two layers have seven linear layers each, the head not among them.
    assert len(trained) == 2 * 7 * 2 + 1
    files = dict(load_lm(str(tiny_model), Loading()).base_model.named_parameters())
    for name, weight in module.policy.lm.base_model.named_parameters():
        if ".lora_" not in name:
            assert torch.equal(weight, files[name.replace(".base_layer", "")]), name
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    assert torch.load(tmp_path / "last.ckpt")["state_dict"].keys() == trained
    again, _ = fitted(tmp_path / "last.ckpt")  # with nothing left to train
    for name, weight in again.state_dict().items():
        assert torch.equal(weight, module.state_dict()[name]), name
    with pytest.raises(ConfigError, match=r"alone would omit.*modules_to_save=\['score'\]"):
        fitted(callbacks=[HFExport(str(tmp_path / "hf"), merge_adapters=False)])
    with pytest.raises(ConfigError, match=r"lora\.quantization=NF4: a reward model"):
        RewardModel(str(tiny_model), new_head=True, lora=LoRA(quantization=NF4()))


@pytest.fixture
def chats(tmp_path):
    """Return a chat model with a newline after its template and its end token as padding."""
    tokenizer = byte_tokenizer("<|im_start|>", "<|im_end|>", eos="<|im_end|>", template=CHATML)
    tokenizer.pad_token = "<|im_end|>"
    save_random_model(tmp_path / "chat", tokenizer)
    return str(tmp_path / "chat")


def test_a_chat_is_read_as_its_template_writes_it(chats):
    model = RewardModel(chats, new_head=True)
    prompt = [{"role": "user", "content": "Hi"}]
    wanted = "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHo<|im_end|>\n"
    answer = [{"role": "assistant", "content": "Ho"}]
    for said in ("Ho", answer):
        assert model.tokenizer.decode(scored_text(model.tokenizer, prompt, said)) == wanted
    text = scored_text(model.tokenizer, "Hi", " Ho")
    assert model.tokenizer.decode(text) == "Hi Ho<|im_end|>"
    assert scored_text(model.tokenizer, "Hi", " Ho", ended=False) == text[:-1]
    assert model.lm.config.pad_token_id == 0  # not the end, at which a text is scored
    model.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="has no chat template, but the prompts are chats"):
        scored_text(model.tokenizer, prompt, "Ho")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": 5}, r"row 0: 'chosen' must be a string, a list of token ids or.*, got 5"),
        (
            {"rejected": []},
            r"row 0: 'rejected' must be a string, a list of token ids or.*, got \[\]",
        ),
        ({"by": "much"}, r"row 0: 'by' must be a number, got 'much'"),
    ],
)
def test_rows_that_are_no_pairs_are_named(tiny_model, tmp_path, row, message):
    data = RewardPairDataModule(IterablePrompts([ROWS[0] | row]), margin_column="by")
    with pytest.raises(DataError, match=message):
        trainer_of(tmp_path, logger=False).fit(RewardModelModule(str(tiny_model)), data)


def test_a_negative_centering_is_refused(tiny_model):
    with pytest.raises(ConfigError, match=r"centering=-0\.1\) must be >= 0"):
        RewardModelModule(str(tiny_model), centering=-0.1)

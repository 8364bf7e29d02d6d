"""Provide the four supervised learners on small rows, for tests of what they have in common."""

import torch
from lightning.pytorch.callbacks import LambdaCallback

import lightning_rl as rl
from lightning_rl.data.sources import IterablePrompts
from lightning_rl.models.tokenizer import load_tokenizer
from tests.support.small_run import adamw

LR = 1e-3


def _prompts(rows):
    return IterablePrompts(rows)


def sft(model, rows, batch_size, **options):
    """Make completions of 1 to 5 digits, so that batches have unequal numbers of tokens."""
    given = [{"prompt": f"{n}=", "completion": "7" * (1 + n * n % 5)} for n in range(rows)]
    module = rl.SFTModule(str(model), **{"optimizer": adamw(LR)} | options)
    return module, rl.SFTDataModule(_prompts(given), _prompts(given[:5]), batch_size=batch_size)


def dpo(model, rows, batch_size, **options):
    given = [
        {"prompt": f"{n}=", "chosen": "7" * (1 + n % 3), "rejected": "12"[n % 2] * (1 + n % 4)}
        for n in range(rows)
    ]
    module = rl.DPOModule(str(model), beta=0.5, **{"optimizer": adamw(LR)} | options)
    return module, rl.PairDataModule(_prompts(given), _prompts(given[:5]), batch_size=batch_size)


def kto(model, rows, batch_size, **options):
    given = [
        {"prompt": f"{n}=", "completion": "12"[n % 2] * (1 + n % 3), "label": n % 2 == 0}
        for n in range(rows)
    ]
    module = rl.KTOModule(
        str(model), beta=0.5, desirable_weight=0.75, **{"optimizer": adamw(LR)} | options
    )
    return module, rl.KTODataModule(_prompts(given), _prompts(given[:5]), batch_size=batch_size)


def rm(model, rows, batch_size, **options):
    given = [
        {"prompt": f"{n}=", "chosen": "7" * (1 + n % 3), "rejected": "12"[: 1 + n % 2], "by": n % 2}
        for n in range(rows)
    ]
    module = rl.RewardModelModule(str(model), centering=0.1, **{"optimizer": adamw(LR)} | options)
    data = rl.RewardPairDataModule(
        _prompts(given), _prompts(given[:5]), margin_column="by", batch_size=batch_size
    )
    return module, data


LEARNERS = {"sft": sft, "dpo": dpo, "kto": kto, "rm": rm}
"""The learners by the first part of their metrics' names, given a model, rows and a batch size."""


def doubling() -> LambdaCallback:
    """Makes the weights float64 before the optimizer is made."""
    return LambdaCallback(setup=lambda trainer, module, stage: _double(module))


def _double(module):
    module.configure_model()
    module.double()


def load_in_double(module, data):
    """Load a model in float64 and the rows that it learns from; return its tokenizer."""
    tokenizer = load_tokenizer(module.model)
    data.train.load(tokenizer)
    data._tokenizer = tokenizer
    module.configure_model()
    module.double()
    return tokenizer


def plain_logprob(lm, tokenizer, prompt: str, completion: str) -> torch.Tensor:
    """Return the logprob of a completion and its end, by one forward of transformers."""
    ids = torch.tensor([tokenizer(prompt + completion)["input_ids"] + [tokenizer.eos_token_id]])
    start = len(tokenizer(prompt)["input_ids"])
    logprobs = lm(input_ids=ids).logits[0].log_softmax(-1)
    return logprobs[start - 1 : -1].gather(-1, ids[0, start:, None]).sum()

"""Provide the four supervised learners on small rows, for tests of what they have in common."""

from lightning.pytorch.callbacks import LambdaCallback

import lightning_rl as rl
from lightning_rl.data.sources import IterablePrompts
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

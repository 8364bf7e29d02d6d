"""Learning from pairs: which of two completions is better."""

import torch.nn.functional as F
from torch import Tensor


def dpo(policy_margin: Tensor, ref_margin: Tensor, beta: float, smoothing: float = 0.0) -> Tensor:
    """Loss per pair (P,): -log sigmoid(beta (m - m_ref)) (Rafailov et al. 2023, DPO, eq. 7).

    A margin (P,) is log p(chosen) - log p(rejected), summed over tokens. ``smoothing`` is the
    chance that a label is wrong (conservative DPO, Mitchell 2023): it weighs the two cases.
    """
    assert policy_margin.shape == ref_margin.shape and policy_margin.ndim == 1
    logits = beta * (policy_margin - ref_margin)
    return -(1 - smoothing) * F.logsigmoid(logits) - smoothing * F.logsigmoid(-logits)

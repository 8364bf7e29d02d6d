"""Requests and weights as vLLM takes them: what is known of its insides."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.engines.base import Sampling
from lightning_rl.engines.vllm_process import last_line
from lightning_rl.errors import IncompleteWeightsError, WeightSyncError


def weight_shapes(model_dir: Path, trust_remote_code: bool = False) -> dict[str, torch.Size]:
    """Shapes of the model's weights under their Hugging Face names."""
    trust = {"trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir, **trust), **trust
        )
    return {name: weight.shape for name, weight in lm.state_dict().items()}


class SampledLogprobs:
    """Keeps a request's logprobs in place of vLLM's own class: one float per token.

    Ids, ranks, texts and where each token's begin, which that collects for every token, nobody asks
    for.
    """

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            # Each row is of one token, and begins with the one that was sampled.
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """vLLM's, which give the logprob of each sampled token and nothing else."""
    from vllm.sampling_params import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    form = sampling.structured_outputs
    return SamplingParams(
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        structured_outputs=None if form is None else StructuredOutputsParams(**form.as_dict()),
        stop=sampling.stop or None,
        seed=seed,
        logprobs=0,  # exactly the sampled token's
        detokenize=bool(sampling.stop),
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def add_request(
    llm: Any, request_id: str, token_ids: Sequence[int], params: Any, priority: int
) -> str:
    """Returns the request's name inside vLLM, under which it can be aborted."""
    # With its type it is an input that needs no rendering.
    prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
    name = str(llm.add_request(request_id, prompt, params, priority=priority))
    llm.output_processor.request_states[name].logprobs_processor = SampledLogprobs()
    return name


def reload_weights(worker: Any, items: list[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker: load through the model's own loader, and check that it took all."""
    model = worker.get_model()
    load, loaded = model.load_weights, set[str]()
    # vLLM only warns of missing weights, so listen to what the model's loader says it loaded.

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.update(load(weights))
        return loaded

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=iter(items))
    except Exception as error:  # each kind of layer has its own way to fail
        raise WeightSyncError(
            f"vLLM does not take these weights: {last_line(error)}; is the engine's model the "
            "trainer's?"
        ) from error
    finally:
        del model.load_weights
    require_all_loaded(model, loaded)


def require_all_loaded(model: Any, loaded: set[str]) -> None:
    """Runs in vLLM's worker: has a push reached all parameters of its model?

    Raises:
        IncompleteWeightsError: naming the first that it has not.
    """
    names = (name.replace(".base_layer.", ".") for name, _ in model.named_parameters())
    missing = sorted({name for name in names if ".lora_" not in name} - loaded)
    if missing:
        raise IncompleteWeightsError(
            f"the push left {len(missing)} of the engine's weights as they were, first "
            f"{missing[0]!r}; is the engine's model the trainer's?"
        )


def rendezvous_file(worker: Any) -> Path | None:
    """Runs in vLLM's worker: where the processes of its group met, if that was in a file."""
    scheme, _, path = str(worker.distributed_init_method).partition("://")
    return Path(path) if scheme == "file" else None

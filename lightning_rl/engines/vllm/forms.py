"""Requests and weights in vLLM's own form; it depends on vLLM's internals."""

import asyncio
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from lightning_rl.data.routing import to_text
from lightning_rl.engines.base import Engine
from lightning_rl.engines.sampling import Completion, Sampling
from lightning_rl.engines.vllm.process import last_line
from lightning_rl.errors import (
    ConfigError,
    IncompleteWeightsError,
    LightningRLError,
    WeightSyncError,
)
from lightning_rl.models.stacked import FileNames


def weight_shapes(model_dir: Path, trust_remote_code: bool = False) -> dict[str, torch.Size]:
    """Return the shapes of the model's weights under their Hugging Face names."""
    trust = {"trust_remote_code": trust_remote_code}
    with torch.device("meta"):
        lm = AutoModelForCausalLM.from_config(
            AutoConfig.from_pretrained(model_dir, **trust), **trust
        )
    named = FileNames(lm).each(lm.state_dict().items())
    return {name: weight.shape for name, weight in named}


class SampledLogprobs:
    """Keeps a request's logprobs in place of vLLM's own class: one float per token.

    vLLM's class also collects the ids, ranks and text offsets of every token, which are not needed.
    """

    cumulative_logprob = prompt_logprobs = prompt_token_id_logprobs = None

    def __init__(self) -> None:
        self.logprobs: list[float] = []

    def update_from_output(self, output: Any) -> None:
        if output.new_logprobs is not None:
            # Each row is of one token, and begins with the one that was sampled.
            self.logprobs += output.new_logprobs.logprobs[:, 0].tolist()


@dataclass(slots=True)
class InFlightRequest:
    """A request in flight: its future, the policy that writes it, and its tokens' versions so far.

    ``writer`` is the engine, or one of its policies, whose version the next token gets.
    """

    future: asyncio.Future[Completion]
    writer: Engine
    versions: list[int] = field(default_factory=list)

    def stamp(self, tokens: int) -> None:
        """Record the current version for all of ``tokens`` tokens that have no version yet."""
        self.versions += [self.writer.version] * (tokens - len(self.versions))

    def finish(self, output: Any) -> None:
        """Set vLLM's output, with all versions, as the future's result, unless nobody waits any
        more.
        """
        if self.future.done():
            return
        result = output.outputs[0]
        experts = getattr(result, "routed_experts", None)  # (T, L, K), if vLLM was asked for them
        self.future.set_result(
            Completion(
                token_ids=list(result.token_ids),
                logprobs=result.logprobs,
                finish_reason=result.finish_reason or "abort",
                versions=self.versions,
                routed_experts="" if experts is None else to_text(torch.from_numpy(experts)),
            )
        )


def tokens_so_far(llm: Any, request_id: str) -> int:
    """Return the number of tokens that an in-flight request has."""
    states = llm.output_processor.request_states
    internal = llm.output_processor.external_req_ids.get(request_id, [request_id])[0]
    return len(states[internal].detokenizer.output_token_ids) if internal in states else 0


def sampling_params(sampling: Sampling, seed: int) -> Any:
    """Return vLLM's sampling parameters, with the logprob of each sampled token only."""
    from vllm.sampling_params import (
        RequestOutputKind,
        SamplingParams,
        StructuredOutputsParams,
    )

    given = sampling.of_vllm(seed)
    if form := given.get("structured_outputs"):
        given["structured_outputs"] = StructuredOutputsParams(**form)
    return SamplingParams(
        **given,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_clone=True,
    )


def add_request(
    llm: Any,
    request_id: str,
    token_ids: Sequence[int],
    params: Any,
    priority: int,
    adapter: Any = None,
) -> str:
    """Add a request; return its name inside vLLM, under which it can be aborted.

    ``adapter`` is a ``LoRARequest`` of vLLM; None: the plain model.

    Raises:
        ConfigError: if vLLM rejects it, e.g. for an invalid schema.
    """
    # With its type it is an input that needs no rendering.
    prompt = {"type": "token", "prompt_token_ids": list(token_ids)}
    try:
        name = str(
            llm.add_request(request_id, prompt, params, lora_request=adapter, priority=priority)
        )
    except Exception as error:
        from vllm.exceptions import VLLMClientError

        if not isinstance(error, VLLMClientError):
            raise
        raise ConfigError(f"vLLM rejects the request: {last_line(error)}") from error
    llm.output_processor.request_states[name].logprobs_processor = SampledLogprobs()
    return name


def reload_weights(worker: Any, weights: Iterator[tuple[str, Tensor]]) -> None:
    """Load weights in vLLM's worker with the model's own loader, and check that it loaded all.

    vLLM loads layer by layer, and keeps each weight only until its layer is complete. After an
    error some layers hold new weights, and others old ones.

    Raises:
        WeightSyncError: if vLLM rejects them; any error of the weight stream is raised as well.
    """
    model = worker.get_model()
    load, loaded = model.load_weights, set[str]()
    # vLLM only warns of missing weights, so listen to what the model's loader says it loaded.

    def load_and_note(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.update(load(without_head(model, weights)))
        return loaded

    model.load_weights = load_and_note
    try:
        worker.reload_weights(weights_iterator=weights)
    except Exception as error:  # each kind of layer has its own way to fail
        _end_reload(worker)
        if isinstance(error, LightningRLError):
            raise
        raise WeightSyncError(
            f"vLLM rejects these weights: {last_line(error)}; is the engine's model the trainer's?"
        ) from error
    finally:
        del model.load_weights
    require_all_loaded(model, loaded)


def without_head(model: Any, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
    """Leave out a tied output head for a vLLM model that has none and uses the embedding itself.

    vLLM's Gemma 2 is such a model, and refuses the head's name.
    """
    if any(name.endswith("lm_head") for name, _ in model.named_modules()):
        return weights
    return ((name, weight) for name, weight in weights if name != "lm_head.weight")


def _end_reload(worker: Any) -> None:
    """Let layers that still wait for weights keep the current ones, so the next push can start."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    finalize_layerwise_reload(worker.get_model(), worker.model_config)


def require_all_loaded(model: Any, loaded: set[str]) -> None:
    """Check, in vLLM's worker, that a push has reached all parameters of its model.

    Raises:
        IncompleteWeightsError: naming the first parameter that was not loaded.
    """
    loadable = list(_loadable(model)) or [name for name, _ in model.named_parameters()]
    names = (name.replace(".base_layer.", ".") for name in loadable)
    missing = sorted({name for name in names if ".lora_" not in name} - loaded)
    if missing:
        raise IncompleteWeightsError(
            f"the push left {len(missing)} of the engine's weights unchanged, first "
            f"{missing[0]!r}; is the engine's model the trainer's?"
        )


def _loadable(model: Any) -> Iterator[str]:
    """Yield the parameters that a checkpoint contains, without scales that vLLM computes itself."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for prefix, layer in model.named_modules():
        brought, _ = get_layerwise_info(layer).restore_metadata
        for name, _ in layer.named_parameters(prefix, recurse=False):
            if name.rpartition(".")[2] in brought:
                yield name

"""The policy: a Hugging Face causal LM that scores packed rollouts."""

from collections.abc import Iterator
from copy import deepcopy
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
from huggingface_hub import save_torch_state_dict
from safetensors import SafetensorError
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AttentionInterface,
    AutoConfig,
    AutoModelForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.utils import logging as transformers_logging

from lightning_rl.config.arguments import configurable
from lightning_rl.data.packing import host_of, token_rows, with_host
from lightning_rl.errors import ConfigError
from lightning_rl.models import policy as compiling
from lightning_rl.models.attention import ATTENTION, build_layout, packed_attention
from lightning_rl.models.heads import ValueHead, token_logprobs
from lightning_rl.models.lora import (
    LoRA,
    adapter_weights,
    as_lora,
    base_weights,
    merged_weights,
)
from lightning_rl.models.memory import each_pack
from lightning_rl.models.pretrained import (
    PLAIN,
    Loading,
    has_code_of_its_own,
    model_of,
    read_tokenizer,
    skeleton,
    without_weights,
)
from lightning_rl.models.sampling import end_tokens, penalties_of, settings_in_use
from lightning_rl.models.sharding import full_tensor
from lightning_rl.models.soundness import (
    require_complete,
    require_embedded,
    require_exact_packing,
    require_finite,
    require_sound,
)
from lightning_rl.run.dist import rank


class Scores(NamedTuple):  # in which FSDP finds the tensors that a backward pass begins with
    """What the policy says of a pack's M loss tokens; ``live`` are their indices in the pack."""

    live: Tensor
    logprobs: Tensor
    entropy: Tensor
    values: Tensor | None


@configurable(model=model_of, lora=as_lora)
class Policy(nn.Module):
    """A causal LM with a policy head and, if asked for, a value head.

    Args:
        model: a directory (or hub name) that ``AutoModelForCausalLM.from_pretrained`` loads.
        value_head: critic on top, for PPO; None without.
        random_init: take only the configuration of ``model`` and start from random weights.
        gradient_checkpointing: recompute activations in backward: less memory, about a third
            more compute.
        lora: train adapters only; None: all weights.
        compile_layers: let ``torch.compile`` make the layers faster; needs a C++ compiler, on CUDA
            Triton.
        cast_lm_head_to_fp32: compute logits in float32 whatever ``Trainer(precision=...)`` is.
        loading: how the model's files are read.
    """

    def __init__(
        self,
        model: str,
        value_head: ValueHead | None = None,
        random_init: bool = False,
        gradient_checkpointing: bool = False,
        lora: LoRA | None = None,
        compile_layers: bool = False,
        cast_lm_head_to_fp32: bool = False,
        loading: Loading = PLAIN,
    ) -> None:
        super().__init__()
        self.model = model
        self.loading = loading
        self.cast_lm_head_to_fp32 = cast_lm_head_to_fp32
        self.lm = _load_lm(model, random_init, loading)
        self.lora = lora
        self.tokenizer = load_tokenizer(model, loading)
        require_embedded(model, self.tokenizer, self.lm.get_input_embeddings().weight.shape[0])
        self.ends = end_tokens(self.tokenizer, self.lm.config)
        _disable_dropout(self.lm)
        # transformers recomputes activations in training mode only, and without dropout the mode
        # decides nothing else.
        self.lm.train()
        if gradient_checkpointing:
            self.lm.gradient_checkpointing_enable({"use_reentrant": False})
        self.value_head = value_head
        if value_head is not None:
            value_head.configure(self.lm.base_model)
        if lora is not None:
            lora.attach(self.lm)
        require_exact_packing(self.lm, lambda pack: self(pack).logprobs)
        if compile_layers:
            compiling.compile_layers(self.lm)

    def forward(self, pack: TensorDict) -> Scores:
        """Score the loss tokens of a pack (:func:`lightning_rl.data.packing.pack_rollouts`)."""
        pack = with_host(pack)
        layout = build_layout(pack)
        hidden = self.lm.base_model(
            input_ids=layout.input_ids[None],
            position_ids=layout.position_ids[None],
            use_cache=False,
            layout=layout,
        ).last_hidden_state[0]
        cuts, min_p = settings_in_use(host_of(pack)["rollouts"])
        rollouts = pack["rollouts"][layout.rows]
        logprobs, entropy = token_logprobs(
            hidden[layout.predictors],
            self.lm.get_output_embeddings(),
            pack["tokens", "input_ids"][layout.live],
            rollouts["temperature"],
            rollouts["top_k"] if cuts else None,
            rollouts["top_p"] if cuts else None,
            pack["tokens", "no_end"][layout.live] if "no_end" in pack["tokens"] else None,
            self.ends,
            rollouts["min_p"] if min_p else None,
            penalties_of(pack, layout.live),
            self.cast_lm_head_to_fp32,
        )
        values = None if self.value_head is None else self.value_head(hidden, layout)
        return Scores(layout.live, logprobs, entropy, values)

    @torch.no_grad()
    def score(
        self, batch: TensorDict, name: str, max_tokens: int, rows: Tensor | None = None
    ) -> TensorDict:
        """Add the logprobs of a batch as ``name`` (T,), and ``values`` (T,) of a critic.

        ``rows`` (r,), ascending, are the rollouts to score; the others get 0. None: all. A pack
        that does not fit into memory is scored in smaller ones.

        Raises:
            PackMemoryError: if that does not help, or other ranks cannot take part.
        """
        hosted = with_host(batch)
        tokens, row = batch["tokens"], token_rows(host_of(hosted))
        rows = torch.arange(len(batch["rollouts"]), device="cpu") if rows is None else rows
        outputs = {name: torch.zeros_like(tokens["rollout_logprobs"])}
        for members, scores in each_pack(self, hosted, rows, max_tokens):
            # Rows of a pack ascend, so its tokens stand in it in the batch's own order.
            within = torch.isin(row, members).nonzero().squeeze(1)
            live = within.to(scores.live.device, non_blocking=True)[scores.live]
            outputs[name][live] = scores.logprobs
            if scores.values is not None:
                outputs.setdefault("values", torch.zeros_like(outputs[name]))[live] = scores.values
        tokens.update(outputs)
        return batch

    def parameter_groups(self, value_lr: float | None) -> list[dict[str, Any]]:
        """What an optimizer trains: the LM, and in a group of its own, at ``value_lr``, the critic.

        None: at the same learning rate.
        """
        groups: list[dict[str, Any]] = [
            {"params": [p for p in self.lm.parameters() if p.requires_grad]}
        ]
        if self.value_head is not None:
            own = {} if value_lr is None else {"lr": value_lr}
            groups.append({"params": list(self.value_head.parameters())} | own)
        return groups

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The LM's weights under their Hugging Face names; a tied output head comes twice, a LoRA
        merged.

        If they are sharded, all ranks have to go through them together.
        """
        weights = self.lm.state_dict().items() if self.lora is None else merged_weights(self.lm)
        for name, weight in weights:
            yield name, full_tensor(weight.detach())

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The LoRA by itself: ``X.lora_A`` and ``X.lora_B`` of each weight ``X.weight``.

        :meth:`named_weights` has ``X.weight + lora_B @ lora_A``, where :meth:`named_base_weights`
        has ``X.weight``.

        Raises:
            ConfigError: if the policy has no LoRA.
        """
        if self.lora is None:
            raise ConfigError(
                "adapters by themselves need a LoRA policy; set lora, or leave out adapters_only"
            )
        self.lora.require_adapters_alone()
        return adapter_weights(self.lm)

    def named_base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The LM's weights without the LoRA, which never change, under their Hugging Face names."""
        for name, weight in base_weights(self.lm):
            yield name, full_tensor(weight)

    def save_pretrained(self, directory: str | Path) -> None:
        """Write a directory that transformers and vLLM load; a LoRA is merged into it.

        Call it on all ranks, since sharded weights are gathered by all; rank 0 writes.
        """
        sharded = any(isinstance(parameter, DTensor) for parameter in self.lm.parameters())
        tied = self.lm.config.get_text_config().tie_word_embeddings
        state: dict[str, Tensor] = {}
        if sharded or self.lora is not None:
            for name, weight in self.named_weights():
                if rank() == 0 and not (tied and name == "lm_head.weight"):
                    state[name] = weight.cpu().contiguous()
        if rank() > 0:
            return
        if state:
            config = deepcopy(self.lm.config)
            config.dtype = next(iter(state.values())).dtype
            config.save_pretrained(directory)
            save_torch_state_dict(state, directory, metadata={"format": "pt"})
        else:
            self.lm.save_pretrained(directory)
        self.tokenizer.save_pretrained(directory)
        self.loading.copy_code(self.model, directory)


def save_skeleton(model: str, directory: str | Path, loading: Loading = PLAIN) -> None:
    """Write a model's configuration and tokenizer, but no weights: an engine gets those pushed."""
    load_tokenizer(model, loading).save_pretrained(directory)
    load_config(model, loading).save_pretrained(directory)
    loading.copy_code(model, directory)


def load_config(model: str, loading: Loading = PLAIN) -> PretrainedConfig:
    """The configuration of a model directory or hub name.

    Raises:
        ConfigError: if there is none, or it needs code that is not trusted.
    """
    _require_local(model)
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(model, **loading.of_model)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found(model, "configuration", error)) from error
    return config


def load_tokenizer(model: str, loading: Loading = PLAIN) -> PreTrainedTokenizerBase:
    """The tokenizer of a model directory or hub name.

    Raises:
        ConfigError: if there is none, or it has no end-of-sequence token.
    """
    _require_local(model)
    try:
        tokenizer = read_tokenizer(model, loading)
    except (OSError, ValueError) as error:
        raise ConfigError(_not_found(model, "tokenizer", error)) from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(
            f"the tokenizer of model={model!r} has no eos_token, so no completion could end; "
            "set one and save it again"
        )
    return tokenizer


def require_sound_model(model: str, random_init: bool = False, loading: Loading = PLAIN) -> None:
    """Find out whether a model can be loaded, without keeping its weights in memory.

    Raises:
        ConfigError: naming the file, and what is wrong with it.
    """
    _require_local(model)
    folder = str(Path(model, loading.model_kwargs.get("subfolder", "")))
    require_sound(folder, weights=not random_init)
    if Path(model).is_dir() and not random_init and find_spec("accelerate") is not None:
        rows = _load_lm(model, False, loading, "meta").get_input_embeddings().weight.shape[0]
        require_embedded(model, load_tokenizer(model, loading), rows)


def _load_lm(
    model: str, random_init: bool, loading: Loading, device: str | None = None
) -> PreTrainedModel:
    if without_weights():
        return skeleton(load_config(model, loading), loading, ATTENTION)
    _require_local(model)
    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # its report of what we refuse fills a page
    try:
        if random_init:
            with torch.device("cpu"):  # the same numbers for every device
                lm = AutoModelForCausalLM.from_config(
                    load_config(model, loading),
                    attn_implementation=ATTENTION,
                    trust_remote_code=loading.trust_remote_code,
                )
            lm = lm.float().to(torch.get_default_device())
        else:
            # transformers needs accelerate to load to another device than the CPU.
            with torch.device("cpu"):
                # Master weights in float32; Trainer(precision=...) decides what computes.
                lm, info = AutoModelForCausalLM.from_pretrained(
                    model,
                    dtype=torch.float32,
                    attn_implementation=ATTENTION,
                    device_map=device,
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,  # they are refused below, in our words
                    **loading.of_model,
                )
            require_complete(model, info)
            if device != "meta":
                lm = lm.to(torch.get_default_device())  # Lightning's, in configure_model
                require_finite(model, lm.named_parameters())
    except ConfigError:
        raise
    except (OSError, ValueError, SafetensorError) as error:
        raise ConfigError(_not_found(model, "causal LM", error)) from error
    except KeyError as error:  # an architecture that looks attention up in a table of its own
        raise ConfigError(
            f"model={model!r}: its architecture takes no other attention than its own, so rollouts "
            "cannot be packed; use another model, such as Qwen, Llama, Mistral, Gemma 3 or GPT-2"
        ) from error
    finally:
        transformers_logging.set_verbosity(verbosity)
    for name in ("final_logit_softcapping", "logits_scaling", "logit_scale"):
        if getattr(lm.config, name, None) not in (None, 1, 1.0):
            raise ConfigError(
                f"model={model!r} sets {name}={getattr(lm.config, name)}, which the policy head "
                "does not compute; use a model without it"
            )
    return lm


def _require_local(model: str) -> None:
    """Refuse at once a missing directory, which the hub would be asked for again and again."""
    parts = Path(model).parts
    # A hub name is `name` or `owner/name`; anything else, or in a directory that exists, is a path.
    in_directory = len(parts) == 2 and Path(parts[0]).is_dir()
    is_path = len(parts) > 2 or in_directory or model.startswith((".", "/", "~"))
    if is_path and not Path(model).is_dir():
        raise ConfigError(
            f"model={model!r}: there is no such directory (working directory: {Path.cwd()}); check "
            "the path"
        )


def _not_found(model: str, what: str, error: Exception) -> str:
    if has_code_of_its_own(error):
        return (
            f"model={model!r} comes with code of its own, which would run with your rights; read "
            "it, then set trust_remote_code: true"
        )
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
    hint = (
        "the directory exists, but a file in it is missing or damaged"
        if Path(model).is_dir()
        else "there is no such directory; check the path or, for a hub name, the network"
    )
    return f"model={model!r}: cannot load a {what} ({hint}) [{first_line}]"


def _disable_dropout(lm: PreTrainedModel) -> None:
    """Dropout would make the trainer's logprobs differ from the engine's on the same weights."""
    for module in lm.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        # Many layers keep the probability as a number: dropout, attention_dropout, layerdrop, ...
        for name, value in vars(module).items():
            if "drop" in name and isinstance(value, float):
                setattr(module, name, 0.0)


def compile_layers(lm: PreTrainedModel) -> None:
    """Compile each layer of ``lm`` but its attention, in place; weights keep their names.

    Shapes are dynamic, so that packs of any size run what the first one compiled. Attention loops
    over batches whose number changes with every pack, and would be compiled anew each time.
    """
    AttentionInterface.register(ATTENTION, torch.compiler.disable(packed_attention))
    for module in lm.modules():
        if isinstance(module, GradientCheckpointingLayer):
            module.compile(dynamic=True)

"""LoRA through peft: train small adapters, push them or merged weights, export the latter."""

from collections.abc import Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.errors import ConfigError, require_at_least, require_finite
from lightning_rl.models.parallel.sharding import full_tensor
from lightning_rl.models.quantization import Quantization
from lightning_rl.models.quantized_layers import quantized_layers, unpacked_state
from lightning_rl.models.stacked import all_linear

ADAPTER = "default"


@configurable
@dataclass(frozen=True)
class LoRA:
    """Low-rank adapters on linear layers; everything else is frozen (Hu et al. 2021).

    Args:
        rank: rank of the update B A.
        alpha: the update is scaled by alpha / rank.
        target_modules: names of the layers, or ``all-linear`` (except experts and layers named
            like theirs); a string is a regular expression of their full names.
        options: other arguments of ``peft.LoraConfig``: ``use_rslora``, ``use_dora``,
            ``modules_to_save``, ``rank_pattern`` and so on. Options that cannot be merged into the
            weights for engines are refused.
        quantization: keep the weights of all linear layers but the output layer in few bits
            (QLoRA), adapted or not: ``NF4`` or ``Int8``. Engines get the unpacked weights, so they
            sample from exactly the weights that the trainer computes with. None: not quantised.

    Raises:
        ConfigError: if ``rank`` is below 1, ``alpha`` is not finite, or an option is refused.
    """

    rank: int = 16
    alpha: float = 32.0
    target_modules: list[str] | str = field(default_factory=lambda: ["all-linear"])
    options: dict[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        require_at_least(1, **{"lora.rank": self.rank})
        require_finite(**{"lora.alpha": self.alpha})
        require_mergeable(self.options)

    @classmethod
    def from_peft(cls, config: Any) -> "LoRA":
        """Make a LoRA from a ``peft.LoraConfig``.

        Raises:
            ConfigError: for a method other than LoRA, or an option that is refused.
        """
        if getattr(config, "peft_type", None) != "LORA":
            raise ConfigError(
                f"lora={type(config).__name__}: only peft.LoraConfig can be trained here, since "
                "engines get the merged weights; use LoRA, or a LoraConfig"
            )
        targets = config.target_modules
        if targets is None:
            raise ConfigError(
                "lora=LoraConfig(target_modules=None) leaves the layers to peft; name them, or set "
                "'all-linear'"
            )
        names = targets if isinstance(targets, str) and targets != "all-linear" else None
        return cls(
            config.r,
            float(config.lora_alpha),
            names or ([targets] if isinstance(targets, str) else sorted(targets)),
            options_of(config),
        )

    @property
    def max_rank(self) -> int:
        """The largest rank of a layer's adapter."""
        return max([self.rank, *(self.options.get("rank_pattern") or {}).values()])

    @property
    def trains_base(self) -> bool:
        """True if weights of the model itself are trained besides the adapters."""
        options = self.options
        return bool(options.get("modules_to_save")) or options.get("bias", "none") != "none"

    def require_frozen_base(self) -> None:
        """Refuse to use the model without its adapters as the initial model.

        Raises:
            ConfigError: if some of its own weights are trained too.
        """
        if self.trains_base:
            raise ConfigError(
                "reference=BaseReference is the policy without its adapters, but lora.options "
                f"train weights of its own ({self._extras()}); use FrozenReference"
            )

    def require_adapters_alone(self) -> None:
        """Refuse to push adapters alone if anything else is trained, or a merge is not a sum.

        Raises:
            ConfigError: if so; names the option.
        """
        if self.trains_base or self.options.get("use_dora"):
            raise ConfigError(
                "adapters_only cannot push what lora.options add to the adapters "
                f"({self._extras()}); leave out adapters_only"
            )

    def require_adapters_hold_all(self) -> None:
        """Refuse to export adapters alone if weights of the model itself are trained too.

        Raises:
            ConfigError: if so; names the option.
        """
        if self.trains_base:
            raise ConfigError(
                "an export of the adapters alone would omit weights that lora.options also train "
                f"({self._extras()}); set HFExport's merge_adapters: true"
            )

    def _extras(self) -> str:
        names = ("modules_to_save", "bias", "use_dora")
        return ", ".join(f"{n}={self.options[n]!r}" for n in names if n in self.options)

    def attach(self, lm: PreTrainedModel, linear: list[str] | None = None) -> None:
        """Add the adapters to ``lm``, in place; B starts at zero, so nothing changes yet.

        ``linear`` are the full names of the layers that ``all-linear`` means; None: all of them.

        Raises:
            ConfigError: if peft is missing, or no layer has one of the names.
        """
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise ConfigError("lora needs peft: `pip install 'peft>=0.20'`") from error
        everything = self.target_modules == ["all-linear"]
        names = (linear or all_linear(lm)) if everything else self.target_modules
        options = {name: v for name, v in self.options.items() if name != "modules_to_save"}
        try:
            config = LoraConfig(
                r=self.rank,
                lora_alpha=self.alpha,
                target_modules=names,
                task_type="CAUSAL_LM" if lm.can_generate() else "SEQ_CLS",
                **options,
            )
            # Not lm.add_adapter: transformers 5.24 asks for a peft there that is not released.
            inject_adapter_in_model(config, lm, ADAPTER)
        except (ValueError, TypeError, NotImplementedError) as error:
            raise ConfigError(f"lora.target_modules={self.target_modules}: {error}") from error
        layers = adapted_layers(lm)
        experts = [name for name, module in layers.items() if hasattr(module, "parameter_name")]
        if experts:  # peft takes gate_proj, up_proj and down_proj for theirs
            raise ConfigError(
                f"lora.target_modules={self.target_modules} adapts {experts[0]!r}, but adapters of "
                "experts and their routers are not supported; name layers of attention, such as "
                "q_proj and v_proj"
            )
        adapted = {id(module) for module in layers.values()}
        tied = lm.config.get_text_config().tie_word_embeddings
        ends = [lm.get_output_embeddings(), *([lm.get_input_embeddings()] if tied else [])]
        if any(id(end) in adapted for end in ends):
            # The policy head reads the output layer's weight as it is, and chunk by chunk.
            raise ConfigError(
                f"lora.target_modules={self.target_modules} adapts the output layer (or an "
                "embedding tied to it), which packed scoring does not compute; leave it out"
            )
        self._unfreeze(lm)

    def _unfreeze(self, lm: PreTrainedModel) -> None:
        """Train ``modules_to_save`` in place: peft would train a copy, which engines never get."""
        for wanted in self.options.get("modules_to_save") or ():
            found = [m for n, m in lm.named_modules() if f".{n}".endswith(f".{wanted}")]
            if not found:
                raise ConfigError(
                    f"lora.options.modules_to_save has {wanted!r}, but the model has no such module"
                )
            for module in found:
                if quantized_layers(module):
                    raise ConfigError(
                        f"lora.options.modules_to_save has {wanted!r}, whose weights "
                        f"lora.quantization={type(self.quantization).__name__} packs and freezes; "
                        "leave out one of the two"
                    )
                module.requires_grad_(True)


def as_lora(given: Any) -> Any:
    """Convert a ``peft.LoraConfig`` to our LoRA; return anything else unchanged."""
    return LoRA.from_peft(given) if hasattr(given, "peft_type") else given


def adapter_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield factors of each adapted layer: ``X.lora_A`` (rank, in) and ``X.lora_B`` (out, rank).

    The effective weight is ``X.weight + lora_B @ lora_A``: the scale is in B, and layers with a
    transposed weight (embeddings, GPT-2's) get factors that fit it.
    """
    state = lm.state_dict()  # not the modules: it brings sharded weights into their sharded state
    for name, module in adapted_layers(lm).items():
        embeds = ADAPTER in module.lora_embedding_A
        kind, leaf = ("lora_embedding_", "") if embeds else ("lora_", ".weight")
        a, b = (full_tensor(state[f"{name}.{kind}{x}.{ADAPTER}{leaf}"].detach()) for x in "AB")
        b = b * module.scaling[ADAPTER]
        transposed = embeds or module.fan_in_fan_out
        yield f"{name}.lora_A", b.T if transposed else a
        yield f"{name}.lora_B", a.T if transposed else b


def base_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield the base weights, under the names of the model without LoRA."""
    for name, weight in unpacked_state(lm):
        if ".lora_" not in name:
            yield name.replace(".base_layer.", "."), weight.detach()


@torch.no_grad()
def merged_weights(lm: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Yield merged weights under the names of the model without LoRA, one layer at a time."""
    adapted = adapted_layers(lm)
    for name, weight in base_weights(lm):
        owner, _, leaf = name.rpartition(".")
        if owner in adapted and leaf == "weight":
            weight = _merged(adapted[owner], weight)
        yield name, weight.detach()


def divide_frozen(lm: PreTrainedModel) -> tuple[dict[str, nn.Parameter], set[str]]:
    """Return parameters that are neither trained nor adapted, and the names of all other weights.

    Names are those of the model without LoRA. Buffers and quantised weights count as others.
    """
    state, adapted = lm.state_dict(keep_vars=True), adapted_layers(lm)
    frozen, others = dict[str, nn.Parameter](), set[str]()
    for full_name, weight in state.items():
        name = full_name.replace(".base_layer.", ".")
        trained = weight.requires_grad or name.rpartition(".")[0] in adapted
        if ".lora_" in name:
            continue
        if isinstance(weight, nn.Parameter) and not trained:
            frozen[name] = weight
        else:
            others.add(name)
    return frozen, others


def _merged(layer: Any, weight: Tensor) -> Tensor:
    """Return a layer's weight with its adapter merged."""
    variant = layer.lora_variant.get(ADAPTER)
    if variant is None:
        delta = layer.get_delta_weight(ADAPTER).to(weight.dtype)
        return weight + (delta if isinstance(weight, DTensor) else full_tensor(delta))
    if isinstance(layer.lora_A[ADAPTER].weight, DTensor):
        raise ConfigError(
            "lora.options.use_dora cannot be merged if weights are sharded; leave it out, or use "
            "DDP"
        )
    merged: Tensor = variant.merge_safe(layer, ADAPTER, weight.clone())
    return merged


def adapted_layers(lm: PreTrainedModel) -> dict[str, Any]:
    """Return the layers with an adapter, by their original names."""
    modules = lm.named_modules()
    return {name: module for name, module in modules if hasattr(module, "get_delta_weight")}


def switch_adapters(lm: PreTrainedModel, on: bool) -> None:
    """Switch the adapters on or off."""
    for layer in adapted_layers(lm).values():
        layer.enable_adapters(on)


MERGED = (
    "use_rslora",
    "use_dora",
    "rank_pattern",
    "alpha_pattern",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "modules_to_save",
    "bias",
    "fan_in_fan_out",
    "init_lora_weights",
    "lora_dropout",
)
_KEEP_BASE = (True, False, "gaussian", "orthogonal")
"""Ways to initialise adapters that leave the model's own weights as they are."""
_OUR_NAMES = {"r": "rank", "lora_alpha": "alpha", "target_modules": "target_modules"}
_NO_SETTINGS = {
    "task_type",
    "peft_type",
    "auto_mapping",
    "peft_version",
    "base_model_name_or_path",
    "revision",
    "inference_mode",
}
"""Fields of peft's configuration that change nothing in training."""


def require_mergeable(options: Mapping[str, Any]) -> None:
    """Check options for ``peft.LoraConfig``.

    Raises:
        ConfigError: if an option cannot be used; names the first, and why.
    """
    for name, value in options.items():
        option = f"lora.options.{name}={value!r}"
        if name in _OUR_NAMES:
            raise ConfigError(f"{option}: set lora.{_OUR_NAMES[name]} instead")
        if name not in MERGED:
            raise ConfigError(
                f"{option} cannot be merged into the weights that engines get, or is no option of "
                f"peft.LoraConfig; there are {', '.join(MERGED)}"
            )
    if options.get("lora_dropout"):
        raise ConfigError(
            f"lora.options.lora_dropout={options['lora_dropout']}: the trainer's logprobs would "
            "differ at random from the engine's on the same weights; leave it out"
        )
    if (start := options.get("init_lora_weights", True)) not in _KEEP_BASE:
        raise ConfigError(
            f"lora.options.init_lora_weights={start!r} changes the model's own weights; choose "
            "true, false, gaussian or orthogonal"
        )


def options_of(config: Any) -> dict[str, Any]:
    """Return the options that a ``peft.LoraConfig`` sets besides rank, alpha and layers."""
    options = {}
    for f in fields(config):
        if f.name in _OUR_NAMES or f.name in _NO_SETTINGS:
            continue
        default = f.default if f.default_factory is MISSING else f.default_factory()
        if (value := getattr(config, f.name)) != default:
            options[f.name] = value
    return options

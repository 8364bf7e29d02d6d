"""The policy: a Hugging Face causal LM that scores packed rollouts."""

import math
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from tensordict import TensorDict
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from lightning_rl.config.arguments import configurable
from lightning_rl.data.batch import host_of, select, tokens_of_rows, with_host
from lightning_rl.data.end_tokens import end_tokens_of
from lightning_rl.data.routing import UNKNOWN
from lightning_rl.data.splitting import SHARED, Filling
from lightning_rl.data.teacher_logprobs import TeacherLogprobs
from lightning_rl.errors import ConfigError
from lightning_rl.models.attention.packed import PackLayout, build_layout, of_all_tokens
from lightning_rl.models.exact_passes import agreed, exact_pass, exact_pass_of_body, own_logprobs
from lightning_rl.models.export import ModelExport, StoredDtypes
from lightning_rl.models.heads import ValueHead, likeliest_tokens, token_logprobs
from lightning_rl.models.logit_map import logit_map_of
from lightning_rl.models.lora import (
    LoRA,
    adapter_weights,
    as_lora,
    base_weights,
    divide_frozen,
    merged_weights,
)
from lightning_rl.models.memory import each_micro_batch
from lightning_rl.models.model_checks import require_embedded
from lightning_rl.models.parallel.sequence import MicroBatchRanks, Scores as Scores
from lightning_rl.models.parallel.sharding import full_tensor, shape_of
from lightning_rl.models.parallel.tensor import TensorRanks, split
from lightning_rl.models.parallel.vocabulary import WHOLE, SplitVocabulary, Vocabulary
from lightning_rl.models.passes import PACKED, BodyPass
from lightning_rl.models.preparation import (
    compile_each_layer,
    compiles_by_default,
    disable_dropout,
)
from lightning_rl.models.pretrained import Loading, load_lm, model_of
from lightning_rl.models.recompute import as_recompute
from lightning_rl.models.routing import routing_of
from lightning_rl.models.sampling import penalties_of, settings_in_use
from lightning_rl.models.stacked import FileNames
from lightning_rl.models.tensor_limits import require_splittable
from lightning_rl.models.tokenizer import load_tokenizer, require_rows
from lightning_rl.run.processes.dist import rank, world_size
from lightning_rl.vision.batch import NAME as PICTURES, with_sight
from lightning_rl.vision.embedding import scored_states
from lightning_rl.vision.reader import reader_of, supported
from lightning_rl.vision.training import Vision, seeing_parameters


@configurable(model=model_of, lora=as_lora)
class Policy(nn.Module):
    """A causal LM with a policy head and, if asked for, a value head.

    Args:
        model: a directory (or hub name) that ``AutoModelForCausalLM.from_pretrained`` loads.
        value_head: critic, for PPO; None: without.
        lora: train adapters only; None: all weights.
        vision: which parts of an image-text model's vision tower are trained; None: none.
        compile_layers: let ``torch.compile`` make the model's layers and its output faster;
            needs a C++ compiler, on CUDA Triton. None: on CUDA, where that is proven
            (:func:`lightning_rl.models.preparation.compiles_by_default`).
        loading: how the model is loaded.
        lm: the model if it has been read already; None: it is read here.
    """

    def __init__(
        self,
        model: str,
        value_head: ValueHead | None = None,
        lora: LoRA | None = None,
        compile_layers: bool | None = False,
        loading: Loading = Loading(),
        lm: PreTrainedModel | None = None,
        vision: Vision | None = None,
    ) -> None:
        super().__init__()
        self.model = model
        self.loading = loading
        quantization = None if lora is None else lora.quantization
        if compile_layers and quantization is not None:
            raise ConfigError(
                "compile_layers: quantised weights (lora.quantization) are unpacked by kernels "
                "that are not tested with torch.compile; leave out one of the two"
            )
        self.lm = load_lm(model, loading, quantization) if lm is None else lm
        self.lora = lora
        self.sequence: MicroBatchRanks | None = None
        """Ranks that compute micro-batches together with this one; None: it computes alone."""
        self.tensor: TensorRanks | None = None
        """Ranks that share the matrices with this one; None: it has all of them."""
        self.vocabulary: Vocabulary = WHOLE
        self.logit_map = logit_map_of(self.lm.config)
        self.compiled = False
        self.body_pass: BodyPass = PACKED
        self.tokenizer = load_tokenizer(model, loading)
        require_embedded(model, self.tokenizer, self.rows)
        self.ends = end_tokens_of(self.tokenizer).token_ids
        self.stored = StoredDtypes.of(model, loading)
        if self.lm.can_generate():  # so that who generates with an export stops there, too
            self.lm.generation_config.eos_token_id = list(self.ends)
        self.reader = reader_of(self.tokenizer)
        self.vision = self._seeing(vision)
        disable_dropout(self.lm)
        # transformers recomputes activations in training mode only, and without dropout the mode
        # decides nothing else.
        self.lm.train()
        self.recompute = as_recompute(loading.gradient_checkpointing)
        if self.recompute is not None:
            self.recompute.apply(self.lm)
        self.value_head = value_head
        if value_head is not None:
            value_head.configure(self.lm.base_model)
        if value_head is not None and (body := value_head.body) is not None:
            if self.vision is not None:
                assert self.reader is not None
                self.reader.require_alike(body, "value_head")
                self.vision.freeze(type(self.reader.family), body)
            rows = body.get_input_embeddings().weight.shape[0]
            require_rows(body.name_or_path, rows, self.tokenizer)
        if lora is not None:
            lora.attach(self.lm, self._adapted())
        self.routing = routing_of(self.lm)
        self.replays = False
        """True if passes replay the ``routed_experts`` of micro-batches where they are known."""
        self.follows_teacher = False
        """Whether gradients are due of the tokens that a teacher finds likeliest, too."""
        critic = self._critic
        self.critic_pass = PACKED if critic is None else exact_pass_of_body(critic, self.reader)
        self.body_pass = exact_pass(self.lm, self._logprobs_by, own_logprobs, self.reader)
        if compile_layers:
            self._require_packed("compile_layers", True, False)
        if compile_layers is None:
            compile_layers = self.filling is SHARED and compiles_by_default(
                self.lm, self.recompute, quantization is not None
            )
        if compile_layers:
            self.compile_layers()

    def compile_layers(self) -> None:
        """Compile the layers of the model and of a critic's body, and the passes over logits."""
        bodies = [self.lm, None if self.value_head is None else self.value_head.body]
        for body in filter(None, bodies):
            family = None if self.reader is None else self.reader.family
            compile_each_layer(body if family is None else family.language_model(body))
        self.compiled = True

    def split(self, ranks: TensorRanks) -> None:
        """Keep only this rank's part of the matrices (:mod:`lightning_rl.models.parallel.tensor`).

        Raises:
            ConfigError: if the ranks cannot share them.
        """
        self._require_packed("tensor", ranks.size, 1)
        require_splittable(self.lm, self.lora, ranks.size)
        size = self.lm.get_output_embeddings().weight.shape[0]
        split(self.lm, ranks)
        if self.value_head is not None:
            self.value_head.split(ranks)
        self.tensor, self.vocabulary = ranks, SplitVocabulary(ranks, size)

    def share_micro_batches(self, ranks: int = 1) -> None:
        """Compute micro-batches together with as many neighbouring ranks, each with some of the
        tokens, and with those that have the other matrices; from now on, and all ranks call it.

        Raises:
            ConfigError: if the model's tokens, layers or losses cannot be shared so.
        """
        if self.routing is not None and self.routing.balanced:
            raise ConfigError(
                f"balance needs the routers' choices for a whole micro-batch, and sequence={ranks} "
                "leaves them on several processes; leave out balance, or set sequence: 1"
            )
        if ranks > 1:
            self._require_packed("sequence", ranks, 1)
        self.sequence = MicroBatchRanks(self.lm.config, ranks, self.tensor)

    def agree_on_passes(self) -> None:
        """Use rank 0's choice of passes over micro-batches; all ranks call it together."""
        self.body_pass, self.critic_pass = agreed(self.body_pass), agreed(self.critic_pass)
        self.body_pass.prepare(self.lm)
        if (critic := self._critic) is not None:
            self.critic_pass.prepare(critic)

    @property
    def rows(self) -> int:
        """Number of tokens in the model's vocabulary, unused ones included."""
        return int(self.lm.get_input_embeddings().weight.shape[0])

    @property
    def filling(self) -> Filling:
        """Counts the tokens of a micro-batch, for the model and a critic's own body."""
        return self.body_pass.filling if self.critic_pass.packed else self.critic_pass.filling

    @property
    def _critic(self) -> PreTrainedModel | None:
        """The critic's own body, if it has one."""
        return None if self.value_head is None else self.value_head.body

    def _logprobs_by(self, body_pass: BodyPass, micro_batch: TensorDict) -> Tensor:
        """Return a micro-batch's logprobs, computed by this pass."""
        self.body_pass = body_pass
        return self(micro_batch).logprobs

    def _require_packed(self, setting: str, value: int, instead: int) -> None:
        for lm, body_pass in ((self.lm, self.body_pass), (self._critic, self.critic_pass)):
            if lm is not None and not body_pass.packed:
                raise ConfigError(
                    f"{setting}={value}: {type(lm).__name__} cannot compute packed rows, "
                    f"and this is not supported without them; set {setting}: {instead}"
                )

    def forward(self, micro_batch: TensorDict) -> Scores:
        """Score the loss tokens of a micro-batch (:func:`lightning_rl.data.packing.pack_rollouts`).

        If weights are sharded, or several ranks compute micro-batches together, all ranks must call
        it.
        """
        micro_batch = with_host(self.with_sight(micro_batch))
        if self.sequence is not None:
            return self.sequence.scores(micro_batch, self._scores)
        return self._scores(micro_batch, build_layout(micro_batch))

    def _scores(self, micro_batch: TensorDict, layout: PackLayout) -> Scores:
        hidden = self._own_states(micro_batch, layout)
        cuts, min_p = settings_in_use(host_of(micro_batch)["rollouts"])
        rollouts = micro_batch["rollouts"][layout.rows]
        targets = micro_batch["tokens", "input_ids"][layout.live]
        teacher_ids = None
        if self.follows_teacher and torch.is_grad_enabled():
            teacher_ids = micro_batch["tokens"].get("teacher_ids", None)
        if teacher_ids is not None:
            _require_whole(cuts or min_p, micro_batch["tokens"])
            teacher_ids = teacher_ids[layout.live]
            lacking = (teacher_ids < 0) | (teacher_ids >= self.rows)
            targets = torch.cat([targets[:, None], teacher_ids.masked_fill(lacking, 0)], 1)
        logprobs, entropy = token_logprobs(
            hidden[layout.predictors],
            self.lm.get_output_embeddings(),
            targets,
            rollouts["temperature"],
            rollouts["top_k"] if cuts else None,
            rollouts["top_p"] if cuts else None,
            micro_batch["tokens", "no_end"][layout.live]
            if "no_end" in micro_batch["tokens"]
            else None,
            self.ends,
            rollouts["min_p"] if min_p else None,
            penalties_of(micro_batch, layout.live),
            self.loading.cast_lm_head_to_fp32,
            self.vocabulary,
            self.compiled,
            self.logit_map,
        )
        values = None
        if self.value_head is not None:
            if self.value_head.body is not None:
                hidden = self._states(micro_batch, layout, self.value_head.body, self.critic_pass)
            values = self.value_head(hidden, layout)
        router_outputs = None if self.routing is None else self.routing.router_outputs(layout.own)
        likeliest = None
        if teacher_ids is not None:
            logprobs, likeliest = logprobs[:, 0], logprobs[:, 1:].masked_fill(lacking, -math.inf)
        return Scores(layout.live, logprobs, entropy, values, router_outputs, likeliest)

    @torch.no_grad()
    def likeliest(
        self, micro_batch: TensorDict, count: int, rows: int | None = None
    ) -> tuple[Tensor, TeacherLogprobs]:
        """Return the indices (M,) of a micro-batch's loss tokens, and their logprobs, as a teacher.

        With them come the ``count`` likeliest tokens in each one's place, all at the temperature of
        its rollout, and among the first ``rows`` tokens of the vocabulary; None: among all.
        """
        micro_batch = with_host(self.with_sight(micro_batch))
        layout = build_layout(micro_batch)
        hidden = self._own_states(micro_batch, layout)[layout.predictors]
        return layout.live, likeliest_tokens(
            hidden,
            self.lm.get_output_embeddings(),
            micro_batch["tokens", "input_ids"][layout.live],
            micro_batch["rollouts", "temperature"][layout.rows],
            count,
            self.logit_map,
            rows,
        )

    def _own_states(self, micro_batch: TensorDict, layout: PackLayout) -> Tensor:
        """Return the last hidden states (S, D) of the language model for a micro-batch."""
        if self.routing is not None:
            known = micro_batch["tokens"].get("routed_experts", None) if self.replays else None
            known = None if known is None else known[layout.tokens]
            self.routing.begin(known, self.body_pass.lines(layout))
        return self._states(micro_batch, layout, self.lm, self.body_pass)

    def _states(
        self, micro_batch: TensorDict, layout: PackLayout, lm: PreTrainedModel, body_pass: BodyPass
    ) -> Tensor:
        """Return the last hidden states (S, D) of a model's body for a micro-batch."""
        if self.reader is not None and ("picture" in micro_batch["tokens"] or world_size() > 1):
            layout.prepare(lm)
            return scored_states(self.reader, lm, micro_batch, layout)
        return body_pass.states(lm, layout)

    def with_sight(self, batch: TensorDict) -> TensorDict:
        """Add columns for what a batch's tokens see, if it has pictures; return the batch.

        Raises:
            ConfigError: for pictures, if the model reads none.
            PictureError: if a row's pictures and placeholders do not agree.
        """
        if PICTURES not in batch:
            return batch
        if self.reader is None:
            raise ConfigError(
                f"model={self.model!r} ({type(self.lm).__name__}) reads no pictures, but the "
                f"training data has some; use one of {supported()}"
            )
        return with_sight(batch, self.reader)

    def _seeing(self, vision: Vision | None) -> Vision | None:
        """Freeze the untrained parts of the vision tower; return which parts are trained."""
        if self.reader is not None:
            vision = vision or Vision()
            vision.freeze(type(self.reader.family), self.lm)
        elif vision is not None:
            raise ConfigError(
                f"model={self.model!r} ({type(self.lm).__name__}) has no vision tower: leave out "
                f"vision, or use one of {supported()}"
            )
        return vision

    def _adapted(self) -> list[str] | None:
        """Return the layers that a LoRA on all linear layers adapts; None: all linear layers."""
        if self.vision is None or self.reader is None:
            return None
        return self.vision.adapted(type(self.reader.family), self.lm)

    @torch.no_grad()
    def score(
        self,
        batch: TensorDict,
        name: str,
        max_tokens: int,
        rows: Tensor | None = None,
        record_routing: bool = False,
    ) -> TensorDict:
        """Add the logprobs of a batch as ``name`` (T,), and ``values`` (T,) of a critic.

        ``rows`` (r,), ascending, are the rollouts to score; the others get 0. None: all. A
        micro-batch that does not fit into memory is split. With ``record_routing``, the experts
        chosen for each token become ``routed_experts`` (T, L, K), -1 where there are none.

        Raises:
            MicroBatchMemoryError: if a micro-batch cannot be split, or other ranks cannot take
                part.
        """
        hosted = with_host(self.with_sight(batch))
        tokens, length = batch["tokens"], host_of(hosted)["rollouts", "length"]
        rows = torch.arange(len(batch["rollouts"]), device="cpu") if rows is None else rows
        names = (name,) if self.value_head is None else (name, "values")
        outputs = {column: torch.zeros_like(tokens["rollout_logprobs"]) for column in names}
        for members, scores in each_micro_batch(
            self, hosted, rows, max_tokens, self.sharded, self.sequence, self.filling
        ):
            # Rows of a micro-batch ascend, so its tokens keep the batch's order.
            within = tokens_of_rows(length, members)
            live = within.to(scores.live.device, non_blocking=True)[scores.live]
            outputs[name][live] = scores.logprobs
            if scores.values is not None:
                outputs["values"][live] = scores.values
            if record_routing and scores.router_outputs is not None and self.sequence is None:
                spread = of_all_tokens(select(hosted, members), scores.router_outputs.experts)
                if "routed_experts" not in outputs:
                    shape = len(tokens), *spread.shape[1:]
                    outputs["routed_experts"] = spread.new_full(shape, UNKNOWN)
                outputs["routed_experts"][within.to(spread.device)] = spread
        tokens.update(outputs)
        return batch

    @property
    def sharded(self) -> bool:
        """True if ranks hold shards of the weights, which they gather together."""
        return any(isinstance(parameter, DTensor) for parameter in self.lm.parameters())

    def parameter_groups(self, value_lr: float | None) -> list[dict[str, Any]]:
        """Return the parameters to optimize: the LM, and the critic in its own group.

        ``value_lr`` is the critic's learning rate; None: the LM's. The vision tower has its own
        group if it has a learning rate.
        """
        trained = [p for p in self.lm.parameters() if p.requires_grad]
        groups: list[dict[str, Any]] = [{"params": trained}]
        if self.vision is not None and self.vision.tower_lr is not None:
            assert self.reader is not None
            seeing = seeing_parameters(type(self.reader.family), self.lm)
            groups[0]["params"] = [p for p in trained if id(p) not in seeing]
            rest = [p for p in trained if id(p) in seeing]
            groups.append({"params": rest, "lr": self.vision.tower_lr})
        if self.value_head is not None:
            own = {} if value_lr is None else {"lr": value_lr}
            critic = [p for p in self.value_head.parameters() if p.requires_grad]
            groups.append({"params": critic} | own)
        return groups

    def named_weights(self, skipped: Collection[str] = ()) -> Iterator[tuple[str, Tensor]]:
        """The LM's weights under their Hugging Face names; a tied output head comes twice, a LoRA
        merged. Experts have names of their own, as in files.

        If they are sharded, all ranks have to go through them together. Those of
        :meth:`frozen_weights` that are in ``skipped`` do not come.
        """
        weights = self.lm.state_dict().items() if self.lora is None else merged_weights(self.lm)
        file_names = FileNames(self.lm)
        for name, weight in weights:
            if name not in skipped:
                yield from file_names.parts(name, full_tensor(weight.detach()))

    def file_names(self, weights: Mapping[str, nn.Parameter]) -> set[str]:
        """Return the names that some of :meth:`frozen_weights` have in :meth:`named_weights`."""
        file_names = FileNames(self.lm)
        shapes = ((name, shape_of(weight)) for name, weight in weights.items())
        return {part for name, shape in shapes for part, _ in file_names.parts(name, shape)}

    def frozen_weights(self) -> tuple[dict[str, nn.Parameter], set[str]]:
        """Return the LM's parameters that are neither trained nor adapted, and all other names."""
        return divide_frozen(self.lm)

    def named_adapter_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LoRA alone: ``X.lora_A`` and ``X.lora_B`` of each weight ``X.weight``.

        :meth:`named_weights` has ``X.weight + lora_B @ lora_A``, where :meth:`named_base_weights`
        has ``X.weight``.

        Raises:
            ConfigError: if the policy has no LoRA.
        """
        if self.lora is None:
            raise ConfigError(
                "pushing adapters alone needs a LoRA policy; set lora, or leave out adapters_only "
                "(with VLLMAdapters, use MultiPolicyEngine)"
            )
        self.lora.require_adapters_alone()
        return adapter_weights(self.lm)

    def named_base_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the LM's weights without the LoRA, under their Hugging Face names."""
        file_names = FileNames(self.lm)
        for name, weight in base_weights(self.lm):
            yield from file_names.parts(name, full_tensor(weight))

    def save_pretrained(self, directory: str | Path, merge_adapters: bool = True) -> None:
        """Write a directory that transformers and vLLM load; a LoRA is merged into it.

        Call it on all ranks, since sharded weights are gathered by all; rank 0 writes. Weights have
        the dtype that they have in the model's files, or the policy's if that has fewer bits. With
        ``merge_adapters=False`` it holds a LoRA's adapters alone, in peft's format.
        """
        export = ModelExport(self, merge_adapters)
        if rank() == 0:
            export.write(directory)


def _require_whole(cut: bool, tokens: TensorDict) -> None:
    """Refuse to compare a teacher's likeliest tokens with a distribution that is not the model's.

    Raises:
        ConfigError: if it leaves tokens out, or depends on those before by more than the model.
    """
    if cut or "no_end" in tokens or "turn_start" in tokens:
        raise ConfigError(
            "loss=TeacherDivergence compares whole distributions, but rollouts were sampled with "
            "top_k, top_p, min_p, min_tokens or penalties; set sampling.top_k: 0, top_p: 1, "
            "min_p: 0, min_tokens: 0, repetition_penalty: 1, presence_penalty: 0 and "
            "frequency_penalty: 0"
        )

"""Try pushes that arrive stale or torn, and tell whether each is caught."""

import random
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Qwen2Config

from benchmarks.ledger.faults import FAULTS, Torn, TornTransport
from lightning_rl.engines import TransformersEngine, VLLMServer
from lightning_rl.engines.base import Engine
from lightning_rl.errors import WrongWeightsError
from lightning_rl.models.lora import LoRA
from lightning_rl.models.model_files import save_skeleton
from lightning_rl.models.policy import Policy
from lightning_rl.run.clock import StageClock
from lightning_rl.sync.base import compare, push
from lightning_rl.sync.sent import SentWeights
from recipes.sort_digits.prepare import make_tokenizer

SMALL = Qwen2Config(
    vocab_size=16, hidden_size=64, intermediate_size=64, num_hidden_layers=2,
    num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=128,
    tie_word_embeddings=False, bos_token_id=None, eos_token_id=1, pad_token_id=0,
)  # fmt: skip


class Pushes:
    """A policy that moves, an engine, and pushes to it that may be torn.

    Args:
        policy: whose weights are pushed.
        engine: running.
        adapters_only: of a LoRA.
    """

    def __init__(self, policy: Policy, engine: Engine, adapters_only: bool = False) -> None:
        self.policy, self.engine = policy, engine
        self.transport = TornTransport(adapters_only=adapters_only)
        self.transport.connect(engine)
        self.clock = StageClock()
        self.sent = SentWeights(self.clock)
        self.draw = random.Random(0)
        self.version = self.clean = self.alarms = 0
        self.old: dict[str, Tensor] = {}

    def move(self) -> None:
        """Move to another version of the weights."""
        self.old = {name: weight.clone() for name, weight in self.policy.named_weights()}
        with torch.no_grad():
            for parameter in self.policy.parameters():
                if parameter.requires_grad:
                    # Relative, so that it shows in 16 bits, too.
                    parameter.mul_(1 + 0.02 * torch.randn_like(parameter)).add_(1e-4)
        self.version += 1

    def good(self) -> None:
        """Push without a fault; count false alarms."""
        self.move()
        self.clean += 1
        try:
            self.send()
        except WrongWeightsError as error:
            print(f"FALSE ALARM: {error}", flush=True)
            self.alarms += 1

    def send(self) -> None:
        """Push what there is."""
        push(self.transport, self.engine, self.policy, self.version, self.sent)

    def caught(self, name: str) -> bool:
        """Tell whether a push with this fault is caught."""
        self.move()
        torn = Torn(self.old, getattr(torch, self.engine.dtype), self.draw)
        self.transport.tear = lambda arriving: FAULTS[name](torn, arriving)
        try:
            return raises(self.send)
        finally:
            self.transport.tear = None

    def old_after_sleep(self) -> bool:
        """Wake the engine with what it had before the last push."""
        self.good()
        self.engine.load_weights(iter(self.old.items()), self.version)
        return raises(lambda: compare(self.transport, self.engine, self.sent))


def raises(act: Callable[[], Any]) -> bool:
    """Tell whether a call raises that the weights are wrong."""
    try:
        act()
    except WrongWeightsError:
        return True
    return False


def one_replica_stale(pushes: Pushes) -> bool:
    """Drop on one of several replicas what it is told to load, while it claims the version."""
    pushes.good()
    pushes.move()
    engine: Any = pushes.engine
    replica = pushes.draw.choice(engine.replicas)
    transfer = replica.transfer

    async def told(step: str, timeout_s: float, **arguments: Any) -> Any:
        if arguments.get("update_info", {}).get("bucket") is not None:
            return {}
        if step == "update_weights":
            arguments["update_info"]["complete"] = False  # else it would notice by itself
        return await transfer(step, timeout_s, **arguments)

    with patch.object(replica, "transfer", told):
        return raises(pushes.send)


def stale_adapters(pushes: Pushes) -> bool:
    """Deliver a LoRA alone as it was before."""
    before = {n: w.detach().clone() for n, w in pushes.policy.named_adapter_weights()}
    pushes.move()
    name = pushes.draw.choice(list(before))
    pushes.transport.tear = lambda arriving: arriving.update({name: before[name]})
    try:
        return raises(pushes.send)
    finally:
        pushes.transport.tear = None


@contextmanager
def prepared(config: Any, lora: LoRA | None = None) -> Iterator[tuple[Policy, Path]]:
    """Yield a policy of a random model, and what an engine needs to start."""
    with tempfile.TemporaryDirectory() as folder:
        model, skeleton = Path(folder, "model"), Path(folder, "skeleton")
        AutoModelForCausalLM.from_config(config).save_pretrained(model)
        make_tokenizer().save_pretrained(model)
        save_skeleton(str(model), skeleton)
        policy = Policy(str(model), lora=lora)
        if lora is not None:
            for name, parameter in policy.named_parameters():
                if ".lora_" in name:
                    torch.nn.init.normal_(parameter, std=0.1)
        yield policy, skeleton


def run_faults(pushes: Pushes, trials: int, goods: int) -> dict[str, Any]:
    """Count for each fault how many trials caught it, and the false alarms of good pushes."""
    quick = isinstance(pushes.engine, TransformersEngine)
    servers = isinstance(pushes.engine, VLLMServer)
    kinds: dict[str, Callable[[], bool]] = {
        name: lambda name=name: pushes.caught(name)  # type: ignore[misc]
        for name in FAULTS
    }
    kinds["old_after_sleep"] = pushes.old_after_sleep
    if servers:
        kinds["one_replica_stale"] = lambda: one_replica_stale(pushes)
    pushes.good()
    found = {}
    for name, kind in kinds.items():
        found[name] = 0
        for _ in range(trials):
            found[name] += kind()
            if quick:
                pushes.good()
        print(f"  {name}: {found[name]} of {trials}", flush=True)
    for _ in range(goods):
        pushes.good()
    return {"caught": found, "pushes": pushes.clean, "false_alarms": pushes.alarms}


def run_adapters(make: Callable[[], Engine], trials: int) -> dict[str, Any]:
    """Do the same for adapters that go alone."""
    with prepared(SMALL, LoRA(rank=4, alpha=8.0)) as (policy, skeleton), closing(make()) as engine:
        engine.start(skeleton)
        pushes, caught = Pushes(policy, engine, adapters_only=True), 0
        pushes.good()
        for _ in range(trials):
            caught += stale_adapters(pushes)
            pushes.good()
        pushes.transport.close()
    print(f"  stale_adapters: {caught} of {trials}", flush=True)
    found = {"stale_adapters": caught}
    return {"caught": found, "pushes": pushes.clean, "false_alarms": pushes.alarms}

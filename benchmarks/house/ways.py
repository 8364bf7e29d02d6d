"""Count the library's files that are entered on five ways through it.

    python benchmarks/house/ways.py     (in the folder of the checkout that is to be looked at)

Runs three tiny trainings with the transformers engine: on prompts, on an environment, and on what a
client asks by HTTP. A file is on a way if a function of it is called in any thread between the
way's two ends, each time that it is gone. Neither its import counts, nor that it waits on
the stack, or is gone on with after it has waited.

    prompt_to_token     from the epoch's start to the engine's first completion
    batch_to_backward   from ``training_step`` to the first backward pass
    step_to_engine      from the end of ``training_step`` until the engine has its weights
    env_step_to_loss    from an environment's first step to the first backward pass
    call_to_row         from a client's request until it has the answer, which is then in a row

It names what it uses by bare names only, so that it runs wherever modules are. The last line is
JSON: the files of each way, in the order in which they are entered.
"""

import asyncio
import inspect
import json
import sys
import tempfile
import threading
from collections.abc import Iterable
from dis import opmap
from importlib import import_module
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

sys.path.insert(0, str(Path.cwd()))

import gymnasium
import numpy as np
import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lightning_rl

LIBRARY = Path(lightning_rl.__file__).parent
PLACES = ("", ".serving", ".envs", ".games", ".extend", ".callbacks")
"""The places of public names."""


def named(name: str) -> Any:
    """Return the library's object of this name, wherever it is public."""
    for place in PLACES:
        try:
            return getattr(import_module(f"lightning_rl{place}"), name)
        except (ImportError, AttributeError):
            continue
    raise LookupError(f"{name} is public in none of lightning_rl{', lightning_rl'.join(PLACES)}")


class Way:
    """The files that are entered between its two ends, each time that it is gone."""

    watched: "ClassVar[Way | None]" = None

    def __init__(self, threads: bool = True) -> None:
        """Follow all ``threads``; False: the main one, which others do not help here."""
        self.threads = threads
        self.called: dict[str, None] = {}
        self.passes: list[list[str]] = []

    def begin(self) -> None:
        """Watch from here on, unless it is being gone."""
        if Way.watched is not self:
            self.called.clear()
            Way.watched = self

    def end(self) -> None:
        """Watch no more, if it had begun."""
        if Way.watched is self:
            Way.watched = None
            self.passes.append(_in_library(self.called))

    def files(self) -> list[str]:
        """Return the files entered on every pass: now and then one thread has to wait for another.

        Raises:
            RuntimeError: if it was not gone several times.
        """
        if len(self.passes) < PASSES:
            raise RuntimeError(f"gone {len(self.passes)} times to its end, not {PASSES}")
        return [file for file in self.passes[0] if all(file in one for one in self.passes)]


def note(frame: FrameType, event: str, argument: Any) -> None:
    """Note the file of every function that is called."""
    way = Way.watched
    if way is None or event != "call" or not _is_called(frame):
        return
    if way.threads or threading.get_ident() == threading.main_thread().ident:
        way.called[frame.f_code.co_filename] = None


def _is_called(frame: FrameType) -> bool:
    """Tell whether a function begins: no module or class body, nor a coroutine that goes on."""
    code, place = frame.f_code, frame.f_lasti
    at_start = code.co_code[place] == opmap["RESUME"] and code.co_code[place + 1] & 3 == 0
    return at_start and bool(code.co_flags & inspect.CO_OPTIMIZED)


def _in_library(names: Iterable[str]) -> list[str]:
    """Return the library's files among them, each once, in order; callbacks/ is a part of it."""
    places = (Path(name).resolve() for name in names)
    root = LIBRARY.resolve().parent
    found = (p.relative_to(root) for p in places if p.is_relative_to(root))
    return [str(p).removeprefix("lightning_rl/") for p in found if p.parts[0] in _FOLDERS]


_FOLDERS = ("lightning_rl", "callbacks")
PASSES = 4
TOKEN, BACKWARD, ENGINE, LOSS, ROW = Way(), Way(threads=False), Way(), Way(), Way()
WAYS = {
    "prompt_to_token": TOKEN,
    "batch_to_backward": BACKWARD,
    "step_to_engine": ENGINE,
    "env_step_to_loss": LOSS,
    "call_to_row": ROW,
}
GROUPS, SIZE = 2, 2
EVERYONE, ALONE = asyncio.Barrier(GROUPS * SIZE), asyncio.Lock()


class Engine(named("TransformersEngine")):  # type: ignore[misc]
    """Ends the ways that lead to an engine."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        completion = await super().generate(*args, **kwargs)
        TOKEN.end()
        return completion

    def load_weights(self, *args: Any, **kwargs: Any) -> None:
        super().load_weights(*args, **kwargs)
        ENGINE.end()


class Module(named("PolicyModule")):  # type: ignore[misc]
    """Has the ends of three ways."""

    def on_train_epoch_start(self) -> None:
        super().on_train_epoch_start()
        TOKEN.begin()

    def training_step(self, batch: Any, batch_idx: int) -> None:
        BACKWARD.begin()
        super().training_step(batch, batch_idx)
        ENGINE.begin()

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        BACKWARD.end()
        super().manual_backward(loss, *args, **kwargs)


class EnvModule(named("ActorCriticModule")):  # type: ignore[misc]
    """Ends the way from the environment."""

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        LOSS.end()
        super().manual_backward(loss, *args, **kwargs)


class TinyEnv(gymnasium.Env[Any, Any]):
    """Pays 1 for action 1; an episode has four steps."""

    observation_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.steps = 0
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        LOSS.begin()
        self.steps += 1
        return np.zeros(2, np.float32), float(action), self.steps == 4, False, {}


async def ask(client: Any, prompt: Any) -> float:
    """Ask a model by HTTP, as any agent would."""
    host, _, port = client.base_url.removeprefix("http://").partition("/")[0].partition(":")
    body = json.dumps({"model": "policy", "messages": [{"role": "user", "content": prompt.prompt}]})
    await EVERYONE.wait()  # what else the others do is not on the way
    async with ALONE:
        reader, writer = await asyncio.open_connection(host, int(port))
        ROW.begin()
        writer.write(
            f"POST /v1/chat/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
            f"Authorization: Bearer {client.api_key}\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(body)}\r\n\r\n{body}".encode()
        )
        answer = await reader.read()
        ROW.end()
        writer.close()
    if b"200 OK" not in answer.partition(b"\r\n")[0]:
        raise RuntimeError(answer.decode())
    return 1.0


def make_model(folder: Path) -> str:
    """Make a tiny Llama with a tokenizer of words, as a directory."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: number for number, word in enumerate(["<eos>", "<unk>", *"abcdefgh"])}
    tokens = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return str(folder)


def fit(folder: Path, module: LightningModule, data: Any, *callbacks: Any) -> None:
    """Fit one iteration in each epoch."""
    Trainer(
        max_epochs=PASSES,
        accelerator="cpu",
        logger=False,
        callbacks=list(callbacks),
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=False,
        default_root_dir=folder,
    ).fit(module, data)


def prompts_data(folder: Path, **options: Any) -> Any:
    """Make a data module of four prompts."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("\n".join(json.dumps({"prompt": word}) for word in "abcd"))
    return named("RLDataModule")(
        named("JSONLPrompts")(str(prompts)),
        rewards=[lambda prompts, completions, **_: [float(len(c)) for c in completions]],
        engine=Engine(),
        sampling=named("Sampling")(max_tokens=4),
        groups_per_iteration=GROUPS,
        group_size=SIZE,
        iterations_per_epoch=1,
        **options,
    )


def main() -> None:
    threading.setprofile(note)
    sys.setprofile(note)
    gymnasium.register("TinyHouse-v0", entry_point=TinyEnv)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        model = make_model(folder / "model")
        fit(folder, Module(model), prompts_data(folder), named("WeightSync")())
        steps = named("EnvDataModule")(
            named("Gym")("TinyHouse-v0"),
            num_envs=2,
            frames_per_iteration=16,
            iterations_per_epoch=1,
            eval_episodes=0,
        )
        fit(folder, EnvModule(), steps)
        asked = prompts_data(folder, agent=named("FunctionAgent")(ask))
        fit(folder, named("PolicyModule")(model), asked, named("WeightSync")())
    sys.setprofile(None)
    print(json.dumps({name: way.files() for name, way in WAYS.items()}))


if __name__ == "__main__":
    main()

"""Which files lie on the way to the first token, and to the first backward pass.

    python benchmarks/house_paths.py     (in the folder of the checkout that is to be looked at)

Runs one iteration with a tiny model and the transformers engine. A file is *on the way* if a
function of it has begun and not ended: on the main thread's stack, or in one of the coroutines that
it waits for. It was *called* if a function of it began at all since the collecting, or the training
step, did. The last line is JSON.
"""

import asyncio
import json
import sys
import tempfile
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

sys.path.insert(0, str(Path.cwd()))

import torch
from lightning.pytorch import LightningModule, Trainer
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import lightning_rl
from lightning_rl import (
    JSONLPrompts,
    PolicyModule,
    RLDataModule,
    Sampling,
    TransformersEngine,
)
from lightning_rl.callbacks import RLCallback, WeightSync

LIBRARY = Path(lightning_rl.__file__).parent
WAYS: dict[str, list[str]] = {}
CALLED: list[str] = []
watching = False


def note(frame: FrameType, event: str, argument: Any) -> None:
    """The file of every function that begins, in all threads."""
    if watching and event == "call":
        CALLED.append(frame.f_code.co_filename)


def begin() -> None:
    """Watch from here on."""
    global watching
    CALLED.clear()
    watching = True


def end(name: str, frames: Iterable[FrameType]) -> None:
    """What was called since ``begin``, and what is on the way."""
    global watching
    if watching:
        watching = False
        WAYS[name] = _files(f.f_code.co_filename for f in frames)
        WAYS[f"{name}_called"] = _files(CALLED)


class WatchCollecting(RLCallback):
    """From where a batch is asked for."""

    def on_collect_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        begin()


class Engine(TransformersEngine):
    """Looks around when it is first asked for tokens of a batch."""

    async def generate(self, *args: Any, **kwargs: Any) -> Any:
        main = sys._current_frames()[threading.main_thread().ident or 0]
        # The main thread waits in the loop for what the coroutines do, the outermost first.
        end("first_token", [*_stack(main), *_waiting_coroutines(), *_stack(sys._getframe())])
        return await super().generate(*args, **kwargs)


class Module(PolicyModule):
    """Looks around when it is first told to go backward."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        begin()
        super().training_step(batch, batch_idx)

    def manual_backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        frames = list(_stack(sys._getframe()))
        steps = [n for n, f in enumerate(frames) if f.f_code.co_name == "training_step"]
        end("backward", frames[steps[-1] :])
        super().manual_backward(loss, *args, **kwargs)


def _stack(frame: FrameType | None) -> Iterator[FrameType]:
    """From the outermost frame to the one given."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return reversed(frames)


def _waiting_coroutines() -> Iterator[FrameType]:
    """Frames of the coroutines that wait for this one: of every task, the first begun first."""
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in sorted(tasks, key=lambda task: int(task.get_name().rpartition("-")[2])):
        coroutine: Any = task.get_coro()
        while getattr(coroutine, "cr_frame", None) is not None:
            if coroutine.cr_await is not None:  # others have not begun
                yield coroutine.cr_frame
            coroutine = coroutine.cr_await


def _files(names: Iterable[str]) -> list[str]:
    """The library's files among them, each once, in order."""
    places = [Path(name) for name in dict.fromkeys(names)]
    return [str(p.relative_to(LIBRARY)) for p in places if p.is_relative_to(LIBRARY)]


def make_model(folder: Path) -> str:
    """A tiny Llama with a tokenizer of words, as a directory."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace

    words = {word: number for number, word in enumerate(["<eos>", "<unk>", *"abcdefgh"])}
    tokens = Tokenizer(WordLevel(words, unk_token="<unk>"))
    tokens.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<eos>", unk_token="<unk>", pad_token="<eos>"
    )
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


def main() -> None:
    threading.setprofile(note)
    sys.setprofile(note)
    with tempfile.TemporaryDirectory() as folder:
        model = make_model(Path(folder) / "model")
        prompts = Path(folder) / "prompts.jsonl"
        prompts.write_text("\n".join(json.dumps({"prompt": word}) for word in "abcd"))
        data = RLDataModule(
            JSONLPrompts(str(prompts)),
            rewards=[lambda prompts, completions, **_: [float(len(c)) for c in completions]],
            engine=Engine(),
            sampling=Sampling(max_tokens=4),
            groups_per_iteration=2,
            group_size=2,
            iterations_per_epoch=1,
        )
        trainer = Trainer(
            max_epochs=1,
            accelerator="cpu",
            logger=False,
            callbacks=[WeightSync(), WatchCollecting()],
            enable_progress_bar=False,
            enable_model_summary=False,
            enable_checkpointing=False,
            default_root_dir=folder,
        )
        trainer.fit(Module(model), data)
    for name, files in WAYS.items():
        print(f"to {name}: {' > '.join(files)}")
    print(json.dumps({f"files_to_{name}": len(files) for name, files in WAYS.items()}))


if __name__ == "__main__":
    main()

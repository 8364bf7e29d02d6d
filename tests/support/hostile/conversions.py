"""Provide hostile calls: conversions."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.support.hostile.call import Call, command
from tests.support.hostile.conversion_scripts import SCRIPTS


def file(
    name: str, kind: str, content: str | bytes, *says: str, right: bool = False, options: str = ""
) -> Call:
    """Call ``lightning-rl convert theirs.KIND`` on a file with this content."""

    def play(folder: Path) -> None:
        path = folder / f"theirs.{kind}"
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        command("convert", str(path), *options.split())(folder)

    return Call(name, play, says, right)


def trl(name: str, *says: str, right: bool = False, **values: Any) -> Call:
    """Return values of a GRPOConfig, as JSON."""
    return file(name, "json", json.dumps(values), *says, right=right, options="--trainer grpo")


def verl(name: str, *says: str, right: bool = False, **values: Any) -> Call:
    """Return values of verl's configuration, nested, as JSON."""
    return file(name, "json", json.dumps(values), *says, right=right, options="--from verl")


def with_command(name: str, play: Callable[[Path], object], *says: str) -> Call:
    return Call(name, play, says)


def _aliases(depth: int) -> str:
    nine = [", ".join([f"*a{i}"] * 9) for i in range(depth)]
    return "\n".join(["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [{of}]" for i, of in enumerate(nine))])


def _fit_of_aliases(folder: Path) -> None:
    (folder / "c.yaml").write_text(_aliases(12))
    command("fit", "--config", "{folder}/c.yaml")(folder)


def _fit_of_itself(folder: Path) -> None:
    (folder / "c.yaml").write_text("model: &m {class_path: PolicyModule, init_args: *m}")
    command("fit", "--config", "{folder}/c.yaml")(folder)


def _folder(folder: Path) -> None:
    (folder / "theirs.yaml").mkdir()
    command("convert", "{folder}/theirs.yaml")(folder)


def _pipe(folder: Path) -> None:
    os.mkfifo(folder / "theirs.yaml")
    command("convert", "{folder}/theirs.yaml")(folder)


def _output_is_a_folder(folder: Path) -> None:
    (folder / "theirs.json").write_text('{"loss_type": "grpo"}')
    command("convert", "{folder}/theirs.json", "--output", "{folder}")(folder)


ZEROS = (
    "num_generations", "per_device_train_batch_size", "gradient_accumulation_steps",
    "max_completion_length", "ref_model_sync_steps",
)  # fmt: skip

CALLS: list[Call] = [
    *(
        file(f"{n} is {v}", "json", f'{{"{n}": {v}}}', f"{n}={v}: it", options="--trainer grpo")
        for n in ZEROS
        for v in ("0", "null")
    ),
    file("no trainer's own option", "json", '{"learning_rate": 1e-5}', "say whose they are"),
    file("a trainer that is not read", "sh", "trl rloo --beta 0.1", "rloo: convert reads"),
    file("SFT of shared options", "sh", "trl sft --learning_rate 1e-5", "SFTModule", right=True),
    file("a beta of 0 for DPO", "sh", "trl dpo --beta 0", "beta='0': it takes a number > 0"),
    file("a cast that is none", "yaml", "- data.seed=int(x)", "x is no int"),
    file("references in a circle", "yaml", "- data.seed=${a}\n- a=${data.seed}", "refers to",
         right=True),
    file("a key that is removed", "yaml", "- ~trainer.logger", "~trainer.logger", right=True),
    trl("a learning rate of words", "learning_rate='fast'", learning_rate="fast"),
    trl("a number of 5,000 digits", "num_generations=", num_generations="9" * 5000),
    trl("a list where a number belongs", "epsilon=[0.2]: it takes a number", epsilon=[0.2]),
    trl("a mapping where a flag belongs", "use_peft={'a': 1}", use_peft={"a": 1}),
    trl("weights in a mapping", "reward_weights={'a': 1}", reward_weights={"a": 1}),
    trl("fewer weights than rewards", "1 for 2", reward_funcs=["a.b", "a.c"], reward_weights=[1]),
    trl("a mapping in broken JSON", "generation_kwargs='{'", generation_kwargs="{"),
    trl("clipping at 150 %", "are refused: clip_low=1.5", epsilon=1.5),
    trl("a path with a zero byte", "dataset_name=", dataset_name="a\0b"),
    trl("a path of 10,000 characters", "does not exist here", dataset_name="a/" * 5000, right=True),
    trl("names that nobody has", "no parameter of TRL's trainers", colour="red"),
    trl("sections of NeMo-RL", "it looks like NeMo-RL's", grpo={}, policy={}, data={}, cluster={}),
    trl("infinity", "learning_rate=inf", learning_rate=float("inf")),
    trl("a kind of correction that is none", "it is not one of sequence_mask", use_vllm=True,
        vllm_importance_sampling_mode="all_mask", right=True),
    trl("numbers in quotes", "group_size: 4", num_generations="4", right=True),
    verl("zero prompts", "train_batch_size=0: it takes", data={"train_batch_size": 0}),
    verl("a horizon of 0", "horizon=0: it takes",
         algorithm={"use_kl_in_reward": True, "kl_ctrl": {"type": "adaptive", "horizon": 0}}),
    verl("a rejection threshold of 0", "rollout_rs_threshold=0: it takes", algorithm={
        "rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 0}}),
    verl("a threshold upside down", "rollout_rs_threshold='2_1'", algorithm={
        "rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": "2_1"}}),
    verl("one beta for Adam", "betas=[0.9]: it takes two",
         actor_rollout_ref={"actor": {"optim": {"betas": [0.9]}}}),
    verl("a section that is a number", "in no table", actor_rollout_ref=5, right=True),
    verl("numbers of verl in quotes", "group_size: 4",
         actor_rollout_ref={"rollout": {"n": "4"}}, right=True),
    verl("weights and bypass at once", "use_rollout_logprobs: true", algorithm={
        "rollout_correction": {"bypass_mode": True, "rollout_is": "token"}}, right=True),
    file("an empty file", "yaml", "", "holds nothing"),
    file("a list of numbers", "yaml", "[1, 2]", "holds list"),
    file("a list of sentences", "yaml", "- not an override", "not an override of the form"),
    file("names that are numbers", "yaml", "1: 2", "not a parameter name"),
    file("bytes that are no text", "yaml", bytes(range(256)), "cannot be read"),
    file("a picture", "png", b"\x89PNG", "convert reads .yaml"),
    file("a tensor file", "bin", b"\x80\x02", "json.dump(config.to_dict"),
    file("a script of Python", "py", "GRPOTrainer('m', 'f', GRPOConfig(beta=rate()))",
         "beta: rate(...) (line 1) could not be read", right=True),
    file("Python that does not end", "py", "x = (", "not valid Python"),
    file("Python without a trainer", "py", "import os; os.abort()", "no call of GRPOTrainer"),
    file("50,000 terms", "py", "x = " + "1 + " * 50_000 + "1", "cannot be read"),
    file("a zero byte", "yaml", b"a: \x00", "not valid YAML"),
    file("aliases of aliases", "yaml", _aliases(12), "more than 100,000 keys and values"),
    file("an alias of itself", "yaml", "loss_type: &a [*a]", "contains itself"),
    file("10,000 brackets", "yaml", "a: " + "[" * 10_000, "levels deep"),
    file("10,000 brackets of JSON", "json", "[" * 10_000, "levels deep"),
    file("half a JSON", "json", '{"loss_type": ', "cannot be read"),
    file("a date of no calendar", "yaml", "seed: 2024-13-01", "month must be in"),
    file("Python in YAML", "yaml", "a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    file("TRL's file as verl's list", "yaml", "- a=1", "is for verl", options="--from trl"),
    file("no devices", "json", '{"seed": 1}', "devices=0", options="--devices 0"),
    with_command("a folder", _folder, "is not a file"),
    with_command("a pipe that nobody writes", _pipe, "is not a file"),
    with_command("an output that is a folder", _output_is_a_folder, "cannot be written"),
    with_command("fit of aliases of aliases", _fit_of_aliases, "more than 100,000 keys"),
    with_command("fit of an alias of itself", _fit_of_itself, "contains itself"),
    *(file(name, "sh", text, *says, right=right) for name, text, says, right in SCRIPTS),
]  # fmt: skip

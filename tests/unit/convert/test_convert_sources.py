"""What convert reads: values of the wrong kind, Hydra's overrides, shell scripts, broken files."""

import json
import os

import pytest
import yaml

from lightning_rl.config.layers import read_sources
from lightning_rl.config.yaml_text import parse_yaml
from lightning_rl.convert.hydra import parse_overrides
from lightning_rl.convert.main import main, notes
from lightning_rl.convert.shell import read_script
from lightning_rl.convert.sources import read
from lightning_rl.convert.trl import TRL, convert_trl
from lightning_rl.convert.verl import VERL, convert_verl
from lightning_rl.errors import ConfigError

WRONG = [
    None, 0, -1.5, float("nan"), "", "sixteen\0", True, [], [None, 2], {"a": {"b": None}},
    10**400, "9" * 5000,
]  # fmt: skip


def refusals(convert, beside, name):
    """What is said of values of all kinds that are not carried."""
    for value in WRONG:
        try:
            notes(convert(beside | {name: value}))
        except ConfigError as error:
            yield str(error)


@pytest.mark.parametrize("name", TRL)
def test_a_value_of_any_kind_is_carried_or_refused_in_one_line(name):
    beside = {"beta": 0.1, "use_peft": True, "use_vllm": True, "max_steps": 100,
              "eval_strategy": "steps", "eval_steps": 4, "loss_type": "sapo"}  # fmt: skip
    assert "\n" not in "".join(refusals(convert_trl, beside, name))


@pytest.mark.parametrize("name", VERL)
def test_a_value_of_verl_of_any_kind_is_carried_or_refused_in_one_line(name):
    correction = "algorithm.rollout_correction."
    beside = {
        "algorithm.use_kl_in_reward": True,
        "algorithm.kl_ctrl.type": "adaptive",
        correction + "rollout_is": "token",
        correction + "rollout_rs": "token_k1",
        correction + "rollout_rs_threshold": 2.0,
    }
    assert "\n" not in "".join(refusals(convert_verl, beside, name))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"num_generations": 0}, "num_generations=0: it takes a whole number >= 1"),
        ({"gradient_accumulation_steps": None}, "gradient_accumulation_steps=null: it takes a num"),
        ({"learning_rate": "fast"}, "learning_rate='fast': it takes a number >= 0"),
        ({"reward_weights": {"a": 1}}, "reward_weights=.* it takes a list of numbers"),
        ({"generation_kwargs": "{"}, "generation_kwargs='{': it takes names and values"),
        ({"epsilon": 1.5}, "these values convert to settings that are refused: clip_low=1.5"),
        ({"reward_funcs": ["a.b", "a.c"], "reward_weights": [1]}, "1 for 2 reward_funcs"),
        ({"colour": "red"}, "no parameter of TRL's trainers among these"),
        ({"colour": "red", "size": 3, "seed": 1}, "colour, size: few parameters of TRL's"),
    ],
)
def test_the_message_names_value_and_bound(values, message):
    with pytest.raises(ConfigError, match=message):
        convert_trl(values)


def test_numbers_in_quotes_are_numbers():
    quoted = {"num_generations": "4", "learning_rate": "1e-6", "bf16": "false", "top_k": "-1"}
    plain = {"num_generations": 4, "learning_rate": 1e-6, "bf16": False, "top_k": -1}
    assert convert_trl(quoted).config == convert_trl(plain).config
    ours = convert_verl({"actor_rollout_ref.rollout.n": "4", "data.train_batch_size": "64"}).config
    assert ours["data"]["init_args"]["group_size"] == 4
    assert ours["data"]["init_args"]["groups_per_iteration"] == 64


def test_no_in_yaml_is_no_strategy(tmp_path):
    (tmp_path / "c.yaml").write_text("eval_strategy: no\nsave_strategy: no\n")
    callbacks = convert_trl(read(tmp_path / "c.yaml").values).config["trainer"]["callbacks"]
    names = [callback["class_path"] for callback in callbacks]
    assert not {"Evaluate", "IterationCheckpoint"} & set(names)


def test_overrides_by_hydras_own_grammar():
    lines = [
        "a.b=16", "+a.c=1e-6", "++a.d=null", "a.e='16'", 'a.f="x y"', "a.g=[1,'b c',[2,3]]",
        "a.h={x:1,y:[2,z],url:http://h:1}", "a.i=no", "a.j=True", "a.k=/p/q=r.parquet",
        "a.l=", "a.m=it's", "a.n=${a.b}", "a.o=[]", "gone=1", "~gone", "a.b=17", r"a.q='it\'s'",
        r"a.r=b\,c\=d", "a.s=str(16)", "a.t=[int(3.7),float(2)]", "a.u=json_str([1,x])",
        "a.v.x=5", "a.v={x:6,y:7}", "a.v.y=8", "b.c.d=1", "b.c.e=2", "~b.c", "b.cc=3", "~a.w=9",
    ]  # fmt: skip
    assert parse_overrides(lines) == {
        "a.b": 17, "a.c": 1e-6, "a.d": None, "a.e": "16", "a.f": "x y", "a.g": [1, "b c", [2, 3]],
        "a.h.x": 1, "a.h.y": [2, "z"], "a.h.url": "http://h:1", "a.i": "no", "a.j": True,
        "a.k": "/p/q=r.parquet", "a.l": "", "a.m": "it's", "a.n": "${a.b}", "a.o": [],
        "a.q": "it's", "a.r": "b,c=d", "a.s": "16", "a.t": [3, 2.0], "a.u": '[1, "x"]',
        "a.v.x": 6, "a.v.y": 8, "b.cc": 3, "~gone": None, "~b.c": None, "~a.w": "9",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("a.b", "not an override of the form"),
        ("a.b=1,2", "a sweep"),
        ("a.b=choice(1,2)", "a sweep"),
        ("a.b=[1,2", "do not close"),
        ("a.b='x", "do not close"),
        ("a.b={x}", "names and values"),
        ("a.b=" + "[" * 50 + "]" * 50, "levels deep"),
        ("", "not an override"),
        ("a.b=int(x)", "x is no int"),
    ],
)
def test_an_override_that_cannot_be_read_is_named(line, message):
    with pytest.raises(ConfigError, match=message):
        parse_overrides([line])


@pytest.mark.parametrize(
    "override",
    [
        "{0}=8",
        "+{0}=8",
        "++{0}=8",
        "{0}=int(8.5)",
        "{1}={{{2}:8}}",
        "~{1} ++{0}=8",
        "{0}=${{max}} max=8",
    ],
)
@pytest.mark.parametrize("written", ["command line", "script", "overrides.yaml"])
def test_an_override_is_what_verl_makes_of_it_wherever_it_stands(
    tmp_path, capsys, override, written
):
    """They count more than the file, in whatever order options stand beside them."""
    name = "actor_rollout_ref.rollout.n"
    values = {"algorithm.adv_estimator": "grpo", name: 4}
    said = override.format(name, *name.rsplit(".", 1)).split()
    lines = [*(f"{key}={value}" for key, value in values.items()), *said]
    file, more = tmp_path / "config.yaml", []
    if written == "command line":
        file.write_text(yaml.safe_dump(values))
        more = said
    elif written == "script":
        file = tmp_path / "run.sh"
        quoted = " ".join(f"'{line}'" for line in lines)
        file.write_text(f"python3 -m verl.trainer.main_ppo {quoted}\n")
    else:
        file.write_text(yaml.safe_dump(lines))
    assert main([str(file), "--model", "m", *more, "--rewards", "a.b"]) == 0
    assert yaml.safe_load(capsys.readouterr().out)["data"]["init_args"]["group_size"] == 8


def test_what_is_removed_or_refers_to_another_is_put_in_or_named():
    actor = "actor_rollout_ref.actor."
    done = convert_verl(
        [
            *(actor + "clip_ratio_c=5", f"~{actor}clip_ratio_c", "algorithm.adv_estimator=grpo"),
            *("trainer.default_local_dir=out/${trainer.project_name}", "trainer.project_name=p"),
            *(actor + "ppo_mini_batch_size=${data.train_batch_size}", "data.train_batch_size=64"),
            *(actor + "optim.lr=${oc.select:mine.lr,2e-6}", "critic.optim.lr=${there}", "~gone"),
            *("trainer.save_freq=${trainer.test_freq}", "trainer.test_freq=${trainer.save_freq}"),
        ]
    )
    model, trainer = done.config["model"]["init_args"], done.config["trainer"]
    assert model["loss"]["init_args"]["dual_clip"] == 3.0  # verl's own
    assert trainer["default_root_dir"] == "out/p"
    assert (model["minibatches"], model["optimizer"]["init_args"]["lr"]) == (1, 2e-6)
    assert {f"~{actor}clip_ratio_c", "~gone"} <= {item.key for item in done.left}
    told = [line.partition(":")[0] for line in done.missing if "refers to" in line]
    assert told == ["critic.optim.lr", "trainer.save_freq", "trainer.test_freq"]


VERL_SCRIPT = r"""#!/usr/bin/env bash
set -xeuo pipefail
# python3 -m verl.trainer.main_ppo data.train_batch_size=1
export MODEL=${MODEL:-"org/model"}; N=8
bsz=$((N * 4))
data_path='data/train set.parquet'
DATA=(
    data.train_files="['$data_path']"   # a comment
    data.train_batch_size=${bsz}
)
DATA+=(data.max_prompt_length="128")
cat <<EOF
python3 -m verl.trainer.main_ppo trainer.nnodes=7
EOF
if [ -n "$WANDB" ]; then LOGGER="['console','wandb']"; else LOGGER="['console']"; fi
python3 -m verl.trainer.main_ppo --config-path=config --config-name dapo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.rollout.n="$N" \
    actor_rollout_ref.actor.ppo_mini_batch_size=$bsz \
    +actor_rollout_ref.actor.optim.lr=1e-6 \
    '~trainer.critic_warmup' \
    trainer.logger="$LOGGER" trainer.default_local_dir=$HOME/runs \
    algorithm.adv_estimator=grpo "$@" 2>&1 | tee log.txt
"""


def test_a_script_of_verl(tmp_path, capsys):
    (tmp_path / "run.sh").write_text(VERL_SCRIPT)
    assert main([str(tmp_path / "run.sh"), "--rewards", "a.b"]) == 0
    printed = capsys.readouterr()
    ours = yaml.safe_load(printed.out)
    data, model = ours["data"]["init_args"], ours["model"]["init_args"]
    assert (data["groups_per_iteration"], data["group_size"]) == (32, 8)
    assert data["train_prompts"]["init_args"]["path"] == "data/train set.parquet"
    assert (model["model"], model["optimizer"]["init_args"]["lr"]) == ("org/model", 1e-6)
    assert model["advantage"]["class_path"] == "GRPO"
    for unknown in (
        "$@: only a run",
        "$HOME: only a run",
        "--config-name dapo: the settings of the file",
    ):
        assert unknown in printed.err
    assert "num_nodes" not in ours["trainer"]  # what stands in a text is no command


BRANCHES = r"""
DEVICE=${DEVICE:-$(python3 -c 'import torch_npu' && echo npu || echo gpu)}  # only a run would tell
devices=${NDEVICES_PER_NODE:-8}
case "${DEVICE}" in
    gpu) ;;
    npu) devices=16; other=1 ;;
    *) echo "unsupported" >&2; exit 1 ;;
esac
MODE=grpo
case $MODE in
    ppo) estimator=gae; n=1 ;;
    gr*|rloo) estimator=grpo; n=4 ;;
    *) estimator=rloo; n=2 ;;
esac
if [ $MODE = ppo ]; then lr=1; elif [[ -n "$MODE" ]]; then lr=2e-6; else lr=3; fi
[ "$MODE" != grpo ] && lr=4
[ -z "$MODE" ] || epochs=5
batch=32
if [ -n "$SMALL" ]; then batch=8; fi
if [ -n "$FILES" ]; then files=$FILES; else files=a.parquet; fi
is_false() { case "$1" in no) return 1 ;; esac; }
mkdir -p out && size=16 || size=17
echo $devices $estimator $n $lr $epochs $batch $files $size
"""


def test_of_branches_the_one_is_read_that_the_values_decide_for():
    words = read_script(BRANCHES, "s").commands[-1]
    assert words == ["echo", "8", "grpo", "4", "2e-6", "5", "32", "a.parquet", "16"]
    doubts = {str(word): word.doubts for word in words if word.doubts}
    assert list(doubts) == ["8", "32", "a.parquet"]
    assert doubts["8"][0].startswith("devices=8: only a run of the script would tell what 'case")
    assert doubts["8"][0].endswith("decides; it may be 16")
    assert "it may be $FILES" in doubts["a.parquet"][0]


def test_commands_of_all_branches_are_read_where_only_a_run_would_decide(tmp_path, capsys):
    start = "python3 -m verl.trainer.main_ppo trainer.n_gpus_per_node=$N_GPUS"
    (tmp_path / "run.sh").write_text(
        f"case $1 in ppo) {start} data.seed=1 ;; grpo) {start} data.seed=2 ;; esac\n"
    )
    message = r"n_gpus_per_node='\$N_GPUS': it takes a whole number >= 1, and only a run of"
    with pytest.raises(ConfigError, match=message):
        main([str(tmp_path / "run.sh")])
    # The command line counts more than the script, and what it replaces is not asked for.
    assert main([str(tmp_path / "run.sh"), "--devices", "2"]) == 0
    printed = capsys.readouterr()
    ours = yaml.safe_load(printed.out)
    assert ours["trainer"]["devices"] == 2
    assert ours["data"]["init_args"]["train_prompts"]["init_args"]["seed"] == 1
    assert "2 commands start a trainer" in printed.err
    assert "N_GPUS" not in printed.err


def test_branches_and_defaults_within_each_other_have_a_bound():
    for text in ("x=" + "${A:-" * 5000 + "}" * 5000, "if a; then " * 5000, "case a in a) " * 5000):
        with pytest.raises(ConfigError, match="more than 50 nested branches or defaults"):
            read_script(text, "s")


TRL_SCRIPT = """accelerate launch --num_processes 4 examples/scripts/grpo.py \\
  --config base.yaml --use_peft --lora_r 8 --reward_funcs my.f my.g --learning_rate=2e-6 \\
  --model_init_kwargs '{"subfolder": "x"}'
"""


def test_a_script_of_trl(tmp_path):
    (tmp_path / "base.yaml").write_text("num_generations: 4\nlearning_rate: 1\n")
    (tmp_path / "run.sh").write_text(TRL_SCRIPT)
    model = convert_trl(read(tmp_path / "run.sh").values).config["model"]["init_args"]
    data = convert_trl(read(tmp_path / "run.sh").values).config["data"]["init_args"]
    assert (model["lora"]["rank"], model["optimizer"]["init_args"]["lr"]) == (8, 2e-6)
    assert (data["group_size"], data["rewards"]) == (4, ["my.f", "my.g"])
    assert model["model_kwargs"] == {"subfolder": "x"}
    assert read(tmp_path / "run.sh").devices == 4
    (tmp_path / "run.sh").write_text("trl grpo --num_processes 2 --learning_rate 1e-6\n")
    source = read(tmp_path / "run.sh")
    assert (source.devices, source.values) == (2, {"learning_rate": "1e-6"})


def test_a_script_is_read_and_never_run(tmp_path):
    there = tmp_path / "there"
    script = read_script(f"x=$(touch {there}); `touch {there}`; echo $((1+1)) $((9**99999))", "s")
    assert not there.exists()
    assert script.commands[-1] == ["echo", "2", "$((...))"]
    assert script.commands[-1][2].doubts == ("$((9**99999)): only a run of the script would tell",)


def test_a_script_that_doubles_a_variable_ends(tmp_path):
    text = "a=xxxxxxxx\n" + "a=$a$a\n" * 200 + "b=($a)\n" + 'b=("${b[@]}" "${b[@]}")\n' * 60
    script = read_script(text + 'echo "${b[@]}"\n', "s")
    assert max(len(word) for words in script.commands for word in words) <= 10_000


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.sh", "python3 -m verl.trainer.main_ppo a='", "an opening ' is not closed"),
        ("a.sh", "python3 -m verl.trainer.main_ppo a=$(x", "is not closed"),
        ("a.sh", "A=(1 2", "is not closed"),
        ("a.sh", "ls -l", "no command in it starts verl"),
        ("a.sh", "", "no command in it starts verl"),
        ("a.yaml", "", "holds nothing"),
        ("a.json", "[]", "holds nothing"),
        ("a.json", "3", "holds int"),
        ("a.json", '{"a": ' + "[" * 500 + "]" * 500 + "}", "levels deep"),
        ("a.json", "[" * 100_000, "levels deep"),
        ("a.json", '{"a": ' + "1" * 5000 + "}", "cannot be read: Exceeds the limit"),
        ("a.json", "{", "cannot be read"),
        ("a.yaml", "1: 2", "1 is not a parameter name"),
        ("a.yaml", "- a=1\n- {b: 2}", "holds list"),
        ("a.yaml", "a: &a [*a]", "contains itself"),
        ("a.yaml", "a: !!python/object/apply:os.system [ls]", "not valid YAML"),
    ],
)
def test_a_broken_file_is_refused_in_one_line(tmp_path, name, content, message):
    (tmp_path / name).write_text(content)
    with pytest.raises(ConfigError, match=message) as error:
        main([str(tmp_path / name)])
    assert "\n" not in str(error.value) or name.endswith("{")


def test_aliases_of_aliases_are_refused_and_plain_ones_are_not(tmp_path):
    nine = [", ".join([f"*a{i}"] * 9) for i in range(11)]
    lines = ["a0: &a0 [x]", *(f"a{i + 1}: &a{i + 1} [{of}]" for i, of in enumerate(nine))]
    with pytest.raises(ConfigError, match=r"p:6: .* more than 100,000 keys and values"):
        parse_yaml("\n".join(lines), "p")
    (tmp_path / "c.yaml").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"c.yaml:6: .* more than 100,000 keys and values"):
        read_sources(["--config", str(tmp_path / "c.yaml")])  # as fit does
    assert parse_yaml("a: &a {b: 1}\nc: {<<: *a, d: *a}", "p")["c"] == {"b": 1, "d": {"b": 1}}
    with pytest.raises(ConfigError, match="more than 100 levels deep"):
        parse_yaml("[" * 5000, "p")
    with pytest.raises(ConfigError, match="month must be in"):
        parse_yaml("a: 2024-13-01", "p")


def test_what_overrides_a_merge_is_set_once_and_what_is_written_twice_is_refused(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("a: &a {x: 1, y: 2}\nb: {<<: *a, x: 3}\nc:\n  <<: [*a, {z: 4}]\n  y: 5\n")
    sources = read_sources(["--config", str(path)])
    assert sources.tree["b"] == {"x": 3, "y": 2}
    assert sources.tree["c"] == {"x": 1, "y": 5, "z": 4}
    assert sources.place(("b", "x")) == f"{path}:2"
    assert sources.place(("c", "y")) == f"{path}:5"
    path.write_text("a: &a {x: 1}\nb:\n  <<: *a\n  x: 3\n  x: 4\n")
    with pytest.raises(ConfigError, match=r"c.yaml:5: b.x is set twice \(also in line 4\)"):
        read_sources(["--config", str(path)])


def test_what_is_no_file_or_has_no_bounds_is_refused_before_it_is_read(tmp_path):
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zeros").symlink_to("/dev/zero")
    (tmp_path / "empty").write_text("# nothing\n")
    for name, words in (("folder", "is a folder"), ("pipe", "is a named pipe"),
                        ("zeros", "is a device"), ("empty", "the file is empty")):  # fmt: skip
        with pytest.raises(ConfigError, match=words):
            read_sources(["--config", str(tmp_path / name)])
    with pytest.raises(ConfigError, match=r"option --data.x:1: an alias contains itself"):
        read_sources(["--data.x", "&a [*a]"])
    assert read_sources(["--data.x", "*a: ["]).tree == {"data": {"x": "*a: ["}}  # just a text


@pytest.mark.parametrize(
    ("options", "expected", "left"),
    [
        ("--load_in_8bit", {"class_path": "Int8"}, []),
        ("--load_in_4bit", {"class_path": "NF4", "init_args": {"double": False}}, []),
        (
            "--load_in_4bit --use_bnb_nested_quant --bnb_4bit_quant_type fp4",
            {"class_path": "NF4", "init_args": {"double": True}},
            ["bnb_4bit_quant_type"],
        ),
    ],
)
def test_a_quantised_base_of_trl(tmp_path, options, expected, left):
    (tmp_path / "run.sh").write_text(f"python grpo.py --use_peft --lora_dropout 0 {options}\n")
    result = convert_trl(read(tmp_path / "run.sh").values)
    assert result.config["model"]["init_args"]["lora"]["quantization"] == expected
    assert [item.key for item in result.left if item.key.startswith("bnb")] == left


def test_a_configuration_of_nemo_rl_is_not_trls(tmp_path):
    (tmp_path / "nemo.yaml").write_text(
        "grpo: {num_prompts_per_step: 32}\npolicy: {model_name: m}\ndata: {}\ncluster: {}\n"
    )
    options = ["--model", "m", "--prompts", "p.jsonl", "--rewards", "a.b"]
    with pytest.raises(ConfigError, match=r"no parameter of .* \(it looks like NeMo-RL's\)"):
        main([str(tmp_path / "nemo.yaml"), *options])


def test_what_a_lora_config_says_by_default_is_not_reported():
    peft_config = pytest.importorskip("peft").LoraConfig(r=4).to_dict()
    values = json.loads(json.dumps({"peft_config": peft_config}, default=list))
    assert [item.key for item in convert_trl(values).left] == ["lora_target_modules"]


def test_adapters_of_peft_beside_a_config():
    peft = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"],
            "bias": "none", "lora_dropout": 0.0, "init_lora_weights": True,
            "fan_in_fan_out": True}  # fmt: skip
    result = convert_trl({"beta": 0.1, "peft_config": json.loads(json.dumps(peft))})
    model = result.config["model"]["init_args"]
    assert model["lora"] == {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj"]}
    assert model["reference"]["class_path"] == "BaseReference"
    assert [item.key for item in result.left] == ["peft_config.fan_in_fan_out"]
    with pytest.raises(ConfigError, match="only LoRA"):
        convert_trl({"peft_config": {"peft_type": "PROMPT_TUNING"}})

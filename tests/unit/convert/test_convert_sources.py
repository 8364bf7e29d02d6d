"""Test what convert reads: values of the wrong kind, Hydra's overrides, broken files."""

import json
import os

import pytest
import yaml

from lightning_rl.config.layers import read_sources
from lightning_rl.config.yaml_text import parse_yaml
from lightning_rl.convert.hydra import parse_overrides
from lightning_rl.convert.main import main, notes
from lightning_rl.convert.shell import Word
from lightning_rl.convert.sources import from_command, read
from lightning_rl.convert.trl import TRL, convert_trl
from lightning_rl.convert.verl import VERL, convert_verl
from lightning_rl.errors import ConfigError
from tests.support.sandbox import need_sandbox

WRONG = [
    None, 0, -1.5, float("nan"), "", "sixteen\0", True, [], [None, 2], {"a": {"b": None}},
    10**400, "9" * 5000,
]  # fmt: skip


def refusals(convert, beside, name):
    """Return what is said of values of all kinds that are not carried."""
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
    if written == "script":
        need_sandbox()
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
    assert (model["update"]["minibatches"], model["optimizer"]["init_args"]["lr"]) == (1, 2e-6)
    assert {f"~{actor}clip_ratio_c", "~gone"} <= {item.key for item in done.left}
    told = [line.partition(":")[0] for line in done.missing if "refers to" in line]
    assert told == ["critic.optim.lr", "trainer.save_freq", "trainer.test_freq"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
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
    command = f"python grpo.py --use_peft --lora_dropout 0 {options}"
    result = convert_trl(from_command([Word(word) for word in command.split()], tmp_path).values)
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

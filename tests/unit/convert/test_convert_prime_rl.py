"""Test how prime-rl's rl.toml is converted."""

import tomllib

import pytest
import yaml

from lightning_rl.convert.main import main
from lightning_rl.convert.prime_rl import PRIME_RL, convert_prime_rl
from lightning_rl.errors import ConfigError
from tests.support.command_parser import read
from tests.unit.convert.vanishing import as_written, vanished

RL = """
max_steps = 20
seq_len = 4096
[model]
name = "Qwen/Qwen3-0.6B"
[deployment]
num_train_gpus = 2
num_infer_gpus = 4
[monitors.wandb]
project = "reverse"
[ckpt]
interval = 10
[trainer.optim]
lr = 3e-6
[trainer.loss]
dppo_mask_high = 0.3
[trainer.scheduler]
type = "cosine"
warmup_steps = 2
min_lr = 3e-7
[trainer.model]
compile = "None"
[trainer.model.lora]
rank = 8
[orchestrator]
batch_size = 128
group_size = 16
max_off_policy_steps = 4
[orchestrator.train.sampling]
max_completion_tokens = 256
[[orchestrator.train.source]]
curriculum = { gates = { zero = { type = "advantage_range" } } }
[orchestrator.train.source.env.taskset]
id = "reverse-text"
min_turns = 3
[orchestrator.train.source.env.agent.harness]
id = "null"
[orchestrator.eval]
interval = 5
num_examples = 64
[[orchestrator.eval.source]]
name = "held"
[orchestrator.eval.source.env.taskset]
id = "aime25"
[inference.vllm]
tensor_parallel_size = 2
made_up = 1
"""


def converted(text=RL, **over):
    result = convert_prime_rl(tomllib.loads(text), over)
    return result, result.config["model"]["init_args"], result.config["data"]["init_args"]


def test_a_whole_file_is_a_configuration_that_the_parser_accepts(tmp_path, capsys):
    (tmp_path / "rl.toml").write_text(RL)
    ours = tmp_path / "ours.yaml"
    assert main([str(tmp_path / "rl.toml"), "--output", str(ours), "--model", "m"]) == 0
    said = capsys.readouterr().err
    assert "inference.vllm.made_up=1: write it in `VLLMServer.options`" in said
    assert "python build/reverse-text" in said
    read(["fit", "--config", str(ours)])
    written = yaml.safe_load(ours.read_text())
    model, data = written["model"]["init_args"], written["data"]["init_args"]
    assert model["model"] == "m"
    assert model["loss"]["init_args"] == {"low": 0.2, "high": 0.3, "square": 0.001}
    assert model["update"]["use_rollout_logprobs"] is True
    assert model["lora"]["rank"] == 8
    assert "compile" not in model
    final = {"warmup_steps": 2, "total_steps": 20, "final": pytest.approx(0.1)}
    assert model["lr_scheduler"]["init_args"] == final
    assert (data["group_size"], data["groups_per_iteration"]) == (16, 8)
    ahead = {"max_staleness": 4, "abort_stale": True, "max_groups_in_flight": 64}
    assert data["collector"] == {"class_path": "AsyncCollector", "init_args": ahead}
    assert data["engine"]["init_args"]["devices"] == ["2,3", "4,5"]  # after the trainer's two
    options = {"taskset": {"min_turns": 3}, "agent": {"harness": {"id": "null"}}}
    hosted = {"environment": "reverse-text", "python": "build/reverse-text", "options": options}
    assert data["agent"] == {"class_path": "VerifiersAgent", "init_args": hosted}
    assert data["selection"]["filters"] == [{"class_path": "RewardSpread"}]
    assert "filter_zero_advantages" not in said  # no such group is in a batch
    [held] = data["evaluation"]["prompts"]["init_args"]["sets"]
    assert (held["name"], held["prompts"]["init_args"]["limit"]) == ("held", 64)


def test_teachers():
    teacher = '[orchestrator.algo]\ntype = "opd"\n[orchestrator.algo.teacher]\nname = "a/large"\n'
    with pytest.raises(ConfigError, match="opd needs its name and base_url"):
        converted(RL + teacher)
    result, model, data = converted(RL + teacher + 'base_url = "http://localhost:8001/v1"')
    served = {"base_url": "http://localhost:8001/v1", "model": "a/large"}
    expected = {"class_path": "lightning_rl.ServedTeacher", "init_args": served}
    assert data["rewards"] == ["lightning_rl.EnvironmentReward", expected]
    assert data["reward_weights"] == [1.0, 0.0]
    assert model["advantage"] == {"class_path": "Distillation"}
    assert model["loss"]["init_args"] == {"low": 0.2, "high": 1.0, "square": 0.001}
    assert "orchestrator.algo.type" in {item.key for item in result.left}
    own = {"orchestrator.algo.type": "opsd", "orchestrator.algo.template": "So: {demonstration}",
           "orchestrator.algo.demo_key": "answer"}  # fmt: skip
    _, _, data = converted(**own)
    taught = {"model": "Qwen/Qwen3-0.6B", "hint": "So: {answer}"}
    assert data["rewards"][1] == {"class_path": "lightning_rl.ModelTeacher", "init_args": taught}


def test_several_environments_are_a_mixture_and_what_a_component_says_counts_more():
    more = '[[orchestrator.train.source]]\nname = "b"\nratio = 2\ngroup_size = 8\nmade_up = 1\n'
    more += '[orchestrator.train.source.env.taskset]\nid = "math"\n'
    more += (
        '[trainer.ckpt]\ninterval = 3\n[orchestrator.model.client]\nbase_url = "http://h:1/v1"\n'
    )
    result, _, data = converted(RL.partition("[inference.vllm]")[0] + more)
    first, second = data["train_prompts"]["init_args"]["sets"]
    assert (first["name"], first["weight"], "group_size" in first) == ("reverse-text", 1.0, False)
    assert (second["name"], second["weight"], second["group_size"]) == ("b", 2.0, 8)
    assert data["engine"] == {"class_path": "VLLMServer", "init_args": {"urls": ["http://h:1"]}}
    saved = {"class_path": "IterationCheckpoint", "init_args": {"every_n_iterations": 3}}
    assert saved in result.config["trainer"]["callbacks"]
    assert "orchestrator.train.source.made_up" in {item.key for item in result.left}


OLDER = """
max_steps = 20
[wandb]
project = "reverse"
[ckpt]
resume_step = 5
[trainer]
[orchestrator]
batch_size = 64
rollouts_per_example = 8
oversampling_factor = 2.0
[orchestrator.sampling]
max_tokens = 256
[[orchestrator.pre_batch_filters]]
type = "zero_advantage"
enforce = true
[[orchestrator.post_batch_filters]]
type = "gibberish"
[[orchestrator.train.env]]
taskset = { id = "reverse-text", min_turns = 3 }
harness = { id = "null", runtime = { type = "docker" } }
[[orchestrator.train.env]]
id = "wordle"
args = { words = 5 }
[[orchestrator.eval.env]]
taskset = { id = "aime25" }
[inference]
gpu_memory_utilization = 0.5
[inference.model]
max_model_len = 4096
tool_call_parser = "hermes"
[inference.parallel]
tp = 2
[inference.server]
port = 8000
[trainer.log]
level = "debug"
"""
NEWER = """
max_steps = 20
[monitors.wandb]
project = "reverse"
[resume]
step = 5
[orchestrator]
batch_size = 64
group_size = 8
concurrency = { max_inflight = 128 }
[orchestrator.train.sampling]
max_completion_tokens = 256
[[orchestrator.train.source]]
curriculum = { gates = { zero_advantage = { type = "advantage_range" } } }
[orchestrator.train.source.env]
taskset = { id = "reverse-text", min_turns = 3 }
agent = { harness = { id = "null" }, runtime = { type = "docker" } }
[[orchestrator.train.source]]
id = "wordle"
env = { taskset = { id = "wordle", words = 5 } }
curriculum = { gates = { zero_advantage = { type = "advantage_range" } } }
[[orchestrator.eval.source]]
env = { taskset = { id = "aime25" } }
[inference.vllm]
gpu_memory_utilization = 0.5
tool_call_parser = "hermes"
max_model_len = 4096
tensor_parallel_size = 2
[inference]
server = { port = 8000 }
[log]
level = "debug"
"""


def test_a_file_of_an_older_version_is_the_same_configuration():
    older, newer = converted(OLDER)[0], converted(NEWER)[0]
    assert older.config == newer.config
    assert older.config["data"]["init_args"]["selection"]["filters"] == [
        {"class_path": "RewardSpread"}
    ]
    said = {item.key: item.reason for item in older.left}
    assert said == {item.key: item.reason for item in newer.left}
    assert said["inference.vllm.tool_call_parser"] == "write it in `VLLMServer.options`"
    assert {"resume.step", "orchestrator.train.source.id", "inference.server.port"} < said.keys()
    assert not any("in no table" in reason for reason in said.values())
    enforced = OLDER.replace('"gibberish"', '"gibberish"\nenforce = true')
    assert "orchestrator.post_batch_filters" in {i.key for i in converted(enforced)[0].left}
    # Not enforced, it was on by default in 0.7 as now.
    off = OLDER.replace('"gibberish"', '"zero_advantage"\nenforce = false')
    kept = {i.key for i in older.left} - {i.key for i in converted(off)[0].left}
    assert kept <= {"orchestrator.train.filter_zero_advantages"}


OTHER = {
    "trainer.loss.type": "ipo", "orchestrator.algo.type": "max_rl", "trainer.optim.type": "sgd",
    "trainer.scheduler.type": "linear", "deployment.type": "multi_node", "trainer.model.ac": None,
    "orchestrator.algo.teacher.base_url": "http://a:1/v1", "orchestrator.batch_size": 256,
    "orchestrator.group_size": 32, "trainer.model.compile": {"fullgraph": True},
    "inference.vllm.dtype": "float16", "inference.vllm.enable_prefix_caching": False,
    "trainer.model.lora.target_modules": ["q_proj"], "trainer.scheduler.decay_steps": 18,
    "deployment.num_infer_gpus": 8, "trainer.loss.dppo_mask_high": 0.4,
}  # fmt: skip
TAUGHT = {
    "orchestrator.algo.teacher.name": "a/b",
    "orchestrator.algo.teacher.base_url": "http://a:1",
}
BESIDE = {
    "orchestrator.algo.teacher": {"orchestrator.algo.type": "opd"} | TAUGHT,
    "orchestrator.algo.demo_key": {"orchestrator.algo.type": "opsd"},
    "orchestrator.algo.template": {"orchestrator.algo.type": "opsd"},
    "orchestrator.algo.decay": {"orchestrator.algo.type": "rae"},
    **{f"trainer.optim.{key}": {"trainer.optim.type": "sgd"} for key in ("momentum", "nesterov")},
    "trainer.scheduler.decay": {"trainer.scheduler.type": "linear"},
}  # fmt: skip


@pytest.mark.parametrize("name", [n for n in PRIME_RL if ".source" not in n])
def test_no_key_is_dropped_in_silence(name):
    beside = next((said for prefix, said in BESIDE.items() if name.startswith(prefix)), {})
    row = PRIME_RL[name]
    other = OTHER.get(name)
    if name not in OTHER:
        kinds = {"mapping": {"x": 1}, "text": f"other_{name}", "texts": ["other"], "flag": True}
        other = kinds.get(row.kind, 3 if row.kind.startswith("integer") else 0.25)
        other = not row.default if isinstance(row.default, bool) else other
    for start in (beside, {}):
        # This is what is written for all others where a row has a single known value.
        values = (as_written(row) if len(row.values) != 1 else ..., other)
        assert vanished(lambda over: converted(**over)[0], start, name, values) == []


@pytest.mark.parametrize(
    ("over", "message"),
    [
        ({"trainer.loss.kl_tau": -1.0}, "kl_tau=-1.0: it takes a number >= 0"),
        ({"trainer.loss.dppo_mask_low": 0.0}, r"refused: DPPO\(low=0.0"),
        ({"orchestrator.batch_size": 100}, "batch_size=100 is not a multiple of group_size=16"),
        ({"orchestrator.train.source": [1]}, "it takes a list of tables"),
        ({"orchestrator.train.source": [{"env": {}}]}, "name its environment"),
        ({"orchestrator.train.source": []}, "name an environment to train on"),
        ({"max_steps": None}, "type=cosine: it needs max_steps"),
    ],
)
def test_what_cannot_run_is_refused(over, message):
    with pytest.raises(ConfigError, match=message):
        converted(**over)


def test_other_files_of_prime_rl_are_refused(tmp_path):
    (tmp_path / "train.toml").write_text("[optim]\nlr = 1e-6\n")
    with pytest.raises(ConfigError, match=r"has \[trainer\] and \[orchestrator\]"):
        main([str(tmp_path / "train.toml")])
    (tmp_path / "deep.toml").write_text("trainer = " + "[" * 2000 + "]" * 2000)
    with pytest.raises(ConfigError, match="levels deep"):
        main([str(tmp_path / "deep.toml")])
    (tmp_path / "rl.toml").write_text(RL)
    with pytest.raises(ConfigError, match="those of prime-rl are its environments'"):
        main([str(tmp_path / "rl.toml"), "--rewards", "a.b"])

"""Test shell scripts and commands that start a trainer: what Bash makes of them is converted."""

import re

import pytest
import yaml

from lightning_rl.convert import shell
from lightning_rl.convert.main import main
from lightning_rl.convert.shell import run_script
from lightning_rl.convert.sources import read
from lightning_rl.convert.trl import convert_trl
from lightning_rl.errors import ConfigError
from tests.support.sandbox import need_sandbox

PPO = "python3 -m verl.trainer.main_ppo"
PYTHON = re.compile(r"python3?$")


@pytest.fixture
def script(tmp_path):
    """Run this text by bash; return what it did, of whose commands Python's were asked for."""
    need_sandbox()

    def run(text):
        (tmp_path / "run.sh").write_text(text)
        return run_script(tmp_path / "run.sh", lambda words: PYTHON.search("".join(words[:1])))

    return run


@pytest.fixture
def converted(tmp_path, capsys):
    """Return what convert writes for a script, and what it says beside it in one line."""
    need_sandbox()

    def convert(text, *options):
        (tmp_path / "run.sh").write_text(text)
        assert main([str(tmp_path / "run.sh"), *options]) == 0
        printed = capsys.readouterr()
        return yaml.safe_load(printed.out), " ".join(printed.err.split())

    return convert


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
if [ -n "${WANDB:-}" ]; then LOGGER="['console','wandb']"; else LOGGER="['console']"; fi
mkdir -p logs/today
python3 -m verl.trainer.main_ppo --config-path=config --config-name dapo \
    "${DATA[@]}" \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.rollout.n="$N" \
    actor_rollout_ref.actor.ppo_mini_batch_size=$bsz \
    +actor_rollout_ref.actor.optim.lr=1e-6 \
    '~trainer.critic_warmup' trainer.experiment_name=run-$(date +%F) \
    trainer.logger="$LOGGER" trainer.default_local_dir=$HOME/runs \
    algorithm.adv_estimator=grpo "$@" 2>&1 | tee logs/today/train.log
"""


def test_a_script_of_verl(converted, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", "/home/me")
    ours, said = converted(VERL_SCRIPT, "--rewards", "a.b")
    data, model = ours["data"]["init_args"], ours["model"]["init_args"]
    assert (data["groups_per_iteration"], data["group_size"]) == (32, 8)
    assert data["train_prompts"]["init_args"]["path"] == "data/train set.parquet"
    assert (model["model"], model["optimizer"]["init_args"]["lr"]) == ("org/model", 1e-6)
    assert model["advantage"]["class_path"] == "GRPO"
    assert ours["trainer"]["default_root_dir"] == "/home/me/runs"
    for unknown in (
        "$(date): only a run of the script would tell",
        "--config-name dapo: the settings of the file",
        "commands that did not run, and count as successful: cat, date, tee",
    ):
        assert unknown in said, said
    assert "num_nodes" not in ours["trainer"]  # what stands in a text is no command
    assert not (tmp_path / "logs").exists()


def test_a_script_of_trl(converted, tmp_path):
    (tmp_path / "base.yaml").write_text("num_generations: 4\nlearning_rate: 1\n")
    command = (
        "accelerate launch --num_processes 4 examples/scripts/grpo.py \\\n"
        "  --config base.yaml --use_peft --lora_r 8 --reward_funcs my.f my.g \\\n"
        '  --learning_rate=2e-6 --model_init_kwargs \'{"subfolder": "x"}\'\n'
    )
    ours, _ = converted(command)
    source = read(tmp_path / "run.sh")
    assert (source.devices, source.trainer) == (4, "grpo")
    model, data = ours["model"]["init_args"], ours["data"]["init_args"]
    assert convert_trl(source.values).config["model"]["init_args"] == model
    assert (model["lora"]["rank"], model["optimizer"]["init_args"]["lr"]) == (8, 2e-6)
    assert (data["group_size"], data["rewards"]) == (4, ["my.f", "my.g"])
    assert model["loading"]["model_kwargs"] == {"subfolder": "x"}


def test_a_command_is_converted_as_a_script_that_consists_of_it(capsys):
    words = "trl grpo --num_processes 2 --num_generations 4 --learning_rate 1e-6"
    assert main(["--rewards", "a.b", "--prompts", "p.jsonl", "--", *words.split()]) == 0
    ours = yaml.safe_load(capsys.readouterr().out)
    assert (ours["trainer"]["devices"], ours["data"]["init_args"]["group_size"]) == (2, 4)
    for arguments, message in (
        (["--", "ls", "-l"], "'ls -l' starts neither verl"),
        (["run.sh", "--", "trl", "grpo"], "a file, or -- and a command"),
        ([], "a file, or -- and a command"),
    ):
        with pytest.raises(ConfigError, match=message):
            main(arguments)


def test_where_bash_or_a_sandbox_is_missing_a_script_is_refused(tmp_path, monkeypatch):
    (tmp_path / "run.sh").write_text(f"{PPO} a=1\n")
    way_out = r"lightning-rl convert -- python3 -m verl"
    with monkeypatch.context() as patch:
        patch.setattr(shell.shutil, "which", lambda name: None)
        with pytest.raises(ConfigError, match=f"Bash evaluates it, and there is none.*{way_out}"):
            main([str(tmp_path / "run.sh")])

    def refuse(*_):
        raise ConfigError("there is no bwrap: apt-get install bubblewrap")

    monkeypatch.setattr(shell, "emptied", refuse)
    with pytest.raises(ConfigError, match=f"run.sh: .* apt-get install bubblewrap; or .*{way_out}"):
        main([str(tmp_path / "run.sh")])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("case ${MODE:-grpo} in ppo) n=1 ;; gr*) n=4 ;; *) n=2 ;; esac; t $n", "4"),
        ("f() { local x=$1; t $((x * 2)) \"${@:2}\"; }; f 4 'a b'", "8|a b"),
        ("declare -A m=([x]=1 [y]=2); t ${m[y]} ${#m[@]}", "2|2"),
        ("a=(1 '2 3'); a+=(4); t \"${a[@]}\" ${a[@]:1:1}", "1|2 3|4|2|3"),
        ("t $(seq 1 3) $(basename /a/b.py .py) {1..2}", "1|2|3|b|1|2"),
        ("for i in 1 2; do [ $i = 1 ] && continue; t $i; done", "2"),
        ("set -- --lr 3; while [ $# -gt 0 ]; do case $1 in --lr) lr=$2; shift;; esac; shift; done;"
         "t $lr", "3"),
        ("mkdir out && t 1 > out/log 2>&1", "1"),
        ("t 1 > /data/new/log", "1"),
        ("echo x > old.log; t 1 >> old.log", "1"),
        ("exec t 1", "1"),
        ("export PATH=/usr/bin:/bin; t 1", "1"),
        ("/opt/conda/bin/t 1", "1"),
        ("t 1 & wait", "1"),
        ("(t 1) &", "1"),
        ("set -e; source inc/env.sh; cd /a/b; t $FROM_FILE", "7"),
        ("[ -f inc/env.sh ] && . \"$(dirname \"$0\")/inc/env.sh\"; t $FROM_FILE", "7"),
        ("bash inner.sh 1 'x y'", "1|x y"),
        ("sh ./inner.sh 1", "1"),
        ("./inner.sh 1", "1"),
        ("trap 'echo done' EXIT; until curl up; do sleep 1; done; t 1", "1"),
        ("exec > >(tee log) 2>&1; t 1", "1"),
        ("set -exo pipefail; x=$(echo a | sed s/a/b/); t 1 2>&1 | tee log", "1"),
        ("printf '%s\\n' 1 2 | while read x; do t $x; break; done", "1"),
    ],
)  # fmt: skip
def test_bash_decides_what_a_script_means(script, tmp_path, text, words):
    (tmp_path / "old.log").write_text("old")
    (tmp_path / "inc").mkdir()
    (tmp_path / "inc" / "env.sh").write_text("FROM_FILE=7\n")
    (tmp_path / "inner.sh").write_text('#!/usr/bin/env bash\npython "$@"\n')
    (tmp_path / "inner.sh").chmod(0o755)
    commands = script(re.sub(r"\bt ", "python3 ", text)).commands
    assert [words[1:] for words in commands] == [words.split("|")]
    assert (tmp_path / "old.log").read_text() == "old"


def test_what_depends_on_a_missing_program_or_an_unset_variable_is_named(script, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")  # of this process, no script gets any
    found = script(
        "n=$(nvidia-smi -L | wc -l)\nm=$((n * 2))\n[ -n \"$WANDB\" ] && x=1\n"
        "python a=$n b=$m c=$WANDB_API_KEY d=${E:-5} e=$(</etc/shadow)\n"
    )  # fmt: skip
    words = found.commands[-1]
    assert words == ["python", "a=$(wc)", "b=$m", "c=$WANDB_API_KEY", "d=5", "e="]
    assert [word.doubts for word in words[1:4]] == [
        (f"{mark}: only a run of the script would tell",)
        for mark in ("$(wc)", "$m", "$WANDB_API_KEY")
    ]
    assert {"m", "WANDB", "WANDB_API_KEY"} == set(found.unset)
    assert any("line 2: $(wc)" in message for message in found.messages)
    assert any("/etc/shadow: No such file" in message for message in found.messages)
    differs = script("if [ $X ]; then a=1; else a=2; fi\npython $a\n")
    assert differs.commands == [["python", "2"]]
    assert differs.messages == ["it does something else where these are set: $X"]


def test_the_trainers_command_is_found_among_others(converted):
    ours, said = converted(
        f"python prep.py --seed 3\n{PPO} data.seed=1 trainer.n_gpus_per_node=$N_GPUS || exit 1\n"
        f"nohup {PPO} data.seed=2 > log &\nwait\n",
        *("--devices", "2"),
    )
    assert ours["data"]["init_args"]["train_prompts"]["init_args"]["seed"] == 1
    # The command line counts more than the script, and what it replaces is not asked for.
    assert ours["trainer"]["devices"] == 2
    assert "N_GPUS" not in said
    assert "2 commands start a trainer" in said
    assert "count as successful: python" in said


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (f"{PPO} a='", "unexpected EOF while looking for matching"),
        (f"{PPO} a=$(x", "unexpected EOF"),
        ("A=(1 2", "unexpected EOF|syntax error"),
        ("ls -l", r"no command in it starts verl .*; give the command itself"),
        ("", "no command in it starts verl"),
        (f"case $1 in ppo) {PPO} data.seed=1 ;; esac", r"these are not set: \$1"),
        (f"{PPO} trainer.n_gpus_per_node=$N", r"='\$N': it takes .*, and only a run of the script"),
        (f"{PPO} data.seed=1 \\\r\n data.seed=2", "dos2unix"),
        ("a=xxxxxxxx\n" + "a=$a$a\n" * 200 + f"{PPO} data.seed=$a", "cannot allocate|limit"),
    ],
)
def test_a_script_that_starts_no_trainer_is_refused_in_one_line(tmp_path, text, message):
    need_sandbox()
    (tmp_path / "run.sh").write_bytes(text.encode())
    with pytest.raises(ConfigError, match=message) as error:
        main([str(tmp_path / "run.sh")])
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "ends", ["while :; do :; done", "while :; do : & done", "(while :; do :; done) &", "exit 3"]
)
def test_a_script_that_does_not_end_by_itself_is_ended(script, monkeypatch, ends):
    monkeypatch.setattr(shell, "_SECONDS", 3.0)
    found = script(f"python 1\n{ends}\n")
    assert found.commands[0] == ["python", "1"]
    assert found.messages or not ends.startswith("while")

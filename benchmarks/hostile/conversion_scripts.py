"""Hostile calls: shell scripts to be converted, with what has to be said of each."""

PPO = "python3 -m verl.trainer.main_ppo"

SCRIPTS: list[tuple[str, str, tuple[str, ...], bool]] = [
    (
        "a script with all that a shell has",
        "N=8\nA=(data.train_batch_size=$((N * 4)) \"+trainer.x=[1, 'two']\")\n"
        f"{PPO} \\\n  \"${{A[@]}}\" actor_rollout_ref.rollout.n='4' \\\n"
        '  actor_rollout_ref.actor.ppo_mini_batch_size="$N" ~trainer.logger "$@" 2>&1 | tee log\n',
        ("groups_per_iteration: 32", "group_size: 4", "$@: only a run of the script"),
        True,
    ),
    ("a script without a trainer", "ls -l\n", ("no command in it starts verl",), False),
    ("an empty script", "", ("no command in it starts verl",), False),
    (
        "a case that only a run would decide",
        "n=8\ncase $(uname) in Linux) ;; npu) n=16 ;; *) exit 1 ;; esac\n"
        f"{PPO} trainer.n_gpus_per_node=$n",
        ("devices: 8", "it may be 16"),
        True,
    ),
    ("5,000 defaults", "x=" + "${A:-" * 5000 + "}" * 5000, ("50 nested branches",), False),
    ("5,000 branches", "if a; then " * 5000, ("50 nested branches",), False),
    ("a quote that stays open", f"{PPO} a='b", ("is not closed",), False),
    ("a list that stays open", "A=(1 2", ("is not closed",), False),
    ("a command that stays open", f"{PPO} a=$(date", ("is not closed",), False),
    ("words that are no overrides", f"{PPO} hello", ("'hello' is not an override",), False),
    ("a sweep", f"{PPO} data.seed=1,2", ("which is a sweep",), False),
    ("a list of Hydra that stays open", f"{PPO} 'data.val_files=[a'", ("do not close",), False),
    (
        "a number that only a run would tell",
        f"{PPO} data.train_batch_size=$BATCH",
        ("data.train_batch_size='$BATCH': it takes a whole number",),
        False,
    ),
    (
        "a script that would write",
        f"touch here\n{PPO} data.train_batch_size=$(touch there; echo 4)",
        ("data.train_batch_size=",),
        False,
    ),
    (
        "a variable that doubles itself",
        "a=xxxxxxxx\n" + "a=$a$a\n" * 500 + f"{PPO} trainer.project_name=$a data.seed=a",
        ("data.seed='a'",),
        False,
    ),
    (
        "a list that doubles itself",
        "a=(1 2)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 100 + f'{PPO} "${{a[@]}}"',
        ("is not an override",),
        False,
    ),
    ("a sum of 9 to the 9 to the 9", f"{PPO} data.seed=$((9**9**9))", ("data.seed=",), False),
    ("half a character", "\x00\x01" + PPO + " =", ("is not an override",), False),
]

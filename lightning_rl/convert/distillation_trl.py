"""Convert TRL's distillation trainers: their teacher, and the divergence from it."""

from collections.abc import Mapping
from typing import Any

from lightning_rl.convert.conversion import Conversion, Given, Left, instance
from lightning_rl.models.pretrained import DTYPES, REFUSED

LIKELIEST = 16
"""Number of the teacher's likeliest tokens to compare, where TRL compares all or one."""
_TEACHER, _SERVER = "teacher_model_name_or_path", "teacher_model_server_url"
_OURS: dict[str, Any] = {_TEACHER: None, "num_generations": 1, "beta": 1.0}
_OF_ANSWERS = _OURS | {"beta": 0.5, "lmbda": 0.5, "temperature": 0.9, "learning_rate": 2e-5}
DEFAULTS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "distillation": _OURS,
    "serverdistillation": _OURS | {_SERVER: None, "vllm_server_port": 8001},
    "gkd": _OF_ANSWERS | {"max_new_tokens": 128},
    "gold": _OF_ANSWERS
    | {
        "learning_rate": 1e-7,
        "top_p": 0.95,
        "max_completion_length": 128,
        "vllm_server_port": 8001,
        "vllm_gpu_memory_utilization": 0.9,
    },
}
"""Where a trainer's configuration has other defaults than a GRPOConfig, by the trainer's name."""
_TELLING = {
    "gold": {"use_uld_loss", "teacher_tokenizer_name_or_path"},
    "gkd": {"lmbda", "seq_kd", "max_new_tokens"},
    "serverdistillation": {_SERVER},
    "distillation": {_TEACHER},
}
"""Names that only one trainer's configuration has, or those that stand below it."""
_CUTS = ("top_k", "top_p", "min_p")


def with_teacher(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values with the defaults of the distillation trainer whose names are among them.

    Values of a GRPOConfig, which has no teacher, stay as they are.
    """
    trainer = next((name for name, telling in _TELLING.items() if telling & values.keys()), "grpo")
    return DEFAULTS[trainer] | dict(values)


def names_trainer(values: Mapping[str, Any]) -> bool:
    """Return True if a name is among the values that only a distillation's configuration has."""
    return any(telling & values.keys() for telling in _TELLING.values())


def distils(given: Given) -> bool:
    """Return True if the values belong to a trainer that learns from a teacher."""
    return given.says(_TEACHER)


def carry(given: Given, result: Conversion) -> None:
    """Set the teacher as the only reward, and the divergence from it as the loss."""
    result.put_class("model.loss", "TeacherDivergence", beta=float(given["beta"]))
    result.put_class("model.advantage", "Distillation")
    result.put_class("model.aggregation", "TokenMean")
    result.put("data.rewards", [_teacher(given, result)])
    if given["reward_funcs"]:
        result.leave(
            given,
            "reward_funcs",
            "a distillation of TRL has no rewards: set TeacherDivergence.base_loss",
        )
    sampling = result.config["data"]["init_args"]["sampling"]
    for name in [name for name in _CUTS if name in sampling]:
        del sampling[name]
        result.leave(
            given, name, "TeacherDivergence needs rollouts of the policy's whole distribution"
        )
    if given.says("max_new_tokens"):  # GKD's
        sampling["max_tokens"] = given["max_new_tokens"]
        if given["temperature"] != 1:
            result.leave(
                given,
                "temperature",
                "GKDTrainer compares distributions at temperature 1; here it is that of sampling",
            )


def _teacher(given: Given, result: Conversion) -> dict[str, Any]:
    name, url = given[_TEACHER], given[_SERVER]
    if name is None:
        result.missing.append("data.rewards: the teacher's directory or hub name, for TEACHER")
    if given.says(_SERVER):
        if url is None:
            result.missing.append("data.rewards: the base_url of the server of the teacher")
        top_k = _served_top_k(given, result)
        url_of_api = f"{(url or 'http://HOST:8000').rstrip('/')}/v1"
        return instance(
            "lightning_rl.ServedTeacher", base_url=url_of_api, model=name or "TEACHER", top_k=top_k
        )
    result.leave(
        given,
        "beta",
        f"TRL compares all tokens; here the teacher's {LIKELIEST} likeliest (top_k), and all "
        "others as one",
    )
    options = _loading(given, result)
    return instance(
        "lightning_rl.ModelTeacher", model=name or "TEACHER", top_k=LIKELIEST, **options
    )


def _served_top_k(given: Given, result: Conversion) -> int:
    if given["beta"] == 0:
        return int(given["loss_top_k"])
    result.leave(
        given,
        "beta",
        "TRL compares the written token, and all others as one, as does Distillation in "
        f"expectation at beta 1; here it is the teacher's {LIKELIEST} likeliest, and all others",
    )
    return LIKELIEST


def _loading(given: Given, result: Conversion) -> dict[str, Any]:
    """Return the arguments by which a ModelTeacher is loaded."""
    kwargs = dict(given["teacher_model_init_kwargs"] or {})
    if given["teacher_model_revision"] is not None:
        kwargs.setdefault("revision", given["teacher_model_revision"])
    asked = kwargs.pop("dtype", kwargs.pop("torch_dtype", given.look("dtype")))
    dtype = str(asked).removeprefix("torch.")
    if dtype not in DTYPES:
        key, reason = "teacher_model_init_kwargs.dtype", f"it is one of {', '.join(DTYPES)}"
        result.left.append(Left(key, asked, f"{reason}; float32 is written"))
        dtype = "float32"
    for name in [name for name in kwargs if name in REFUSED]:
        key, value = f"teacher_model_init_kwargs.{name}", kwargs.pop(name)
        result.left.append(Left(key, value, REFUSED[name]))
    options: dict[str, Any] = {"dtype": dtype}
    if given.look("trust_remote_code"):
        options["trust_remote_code"] = True
    return options | ({"model_kwargs": kwargs} if kwargs else {})

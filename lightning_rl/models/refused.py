"""Arguments of ``from_pretrained`` that the library decides itself, and why."""

REFUSED = {
    "attn_implementation": "packed rollouts are computed by an attention of the library's own, "
    "which takes a fused kernel where there is one",
    "dtype": "master weights stay in float32; trainer.precision decides what computes",
    "torch_dtype": "master weights stay in float32; trainer.precision decides what computes",
    "device_map": "the Trainer's strategy decides where weights are",
    "quantization_config": "quantised weights can neither be trained nor pushed to an engine",
    "load_in_4bit": "quantised weights can neither be trained nor pushed to an engine",
    "load_in_8bit": "quantised weights can neither be trained nor pushed to an engine",
    "trust_remote_code": "it is a key of its own, beside model_kwargs",
    "config": "name the settings of the configuration themselves, such as rope_theta",
    "state_dict": "weights come from the model's files",
}

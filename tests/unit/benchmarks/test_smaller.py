"""benchmarks.smaller cuts those layers from a model that change its hidden states least."""

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from benchmarks.smaller import cut, influences
from tests.support.tiny_models import chatml_tokenizer, save_random_model


def test_layers_that_change_nothing_go_first(tmp_path):
    tokenizer = chatml_tokenizer()
    sizes = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2}
    vocabulary = len(tokenizer)
    save_random_model(
        tmp_path, tokenizer, LlamaConfig, vocab_size=vocabulary, num_hidden_layers=5, **sizes
    )
    whole = AutoModelForCausalLM.from_pretrained(tmp_path)
    with torch.no_grad():
        for layer in (1, 3):  # what they add to the hidden states is zero
            whole.model.layers[layer].self_attn.o_proj.weight.zero_()
            whole.model.layers[layer].mlp.down_proj.weight.zero_()
    whole.save_pretrained(tmp_path)
    text = torch.tensor([[5, 9, 11, 7]])
    found = influences(whole, [text])
    assert max(found[1], found[3]) < 1e-6 < min(found[0], found[2], found[4])
    chats = [[{"role": "user", "content": "3 times 4?"}]]
    assert cut(tmp_path, tmp_path / "cut", 3, chats) == [0, 2, 4]
    smaller = AutoModelForCausalLM.from_pretrained(tmp_path / "cut")
    assert smaller.config.num_hidden_layers == 3
    with torch.no_grad():
        torch.testing.assert_close(smaller(text).logits, whole(text).logits)

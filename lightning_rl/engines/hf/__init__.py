"""TransformersEngine: batched decoding with a Hugging Face model, one token per row and step."""

"""The ``config.json`` of a model that nobody recorded: the shape of a dense decoder with 24 layers."""

CONFIG = {
    "hidden_size": 2048,
    "intermediate_size": 5504,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "torch_dtype": "bfloat16",
    "vocab_size": 32000,
}

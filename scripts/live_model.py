"""Make the tiny model of `make live`: ``python live_model.py FOLDER``, in the environment of the server.

A Llama of 8 layers whose weights the server makes up (``--load-format dummy``), and a byte-level BPE tokenizer trained
on words that are made up here, equal on every machine.
"""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 1408,
    "vocab_size": 4096,
    "max_position_embeddings": 8192,
    "torch_dtype": "bfloat16",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def main(folder: Path) -> None:
    """Write ``config.json`` and the tokenizer's files."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    drawn = random.Random(0)  # noqa: S311 (words, not secrets)
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["".join(drawn.choices(letters, k=drawn.randint(2, 9))) for _ in range(6_000)]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=CONFIG["vocab_size"],
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator((" ".join(drawn.choices(words, k=40)) for _ in range(4_000)), trainer)
    folder.mkdir(parents=True, exist_ok=True)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>")  # noqa: S106
    fast.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(CONFIG, indent=1), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

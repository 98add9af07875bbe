"""A tokenizer for the tiny models: one token for each character, no file and no hub."""

from __future__ import annotations

import string

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<pad>", "<s>", "</s>", "<unk>")
"""Their numbers are those of `tiny.SIZES`."""


def letters() -> PreTrainedTokenizerFast:
    """A tokenizer whose 104 tokens are the special ones and the printable ASCII characters."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL, *string.printable))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )

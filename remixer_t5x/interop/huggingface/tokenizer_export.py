"""Writes the tokenizer files that transformers loads: SentencePiece (T5), bytes (ByT5), or a tokenizer.json."""

import json
import pathlib
from collections.abc import Sequence
from typing import Any

from etils import epath

from remixer_t5x import base_vocabulary, tokenizer_files

TOKENIZER_OUTPUTS = ('input_ids', 'attention_mask')


def has_tokenizer(vocabulary: Any, shifted: bool = False) -> bool:
    """Returns whether a Hugging Face tokenizer has the ids of `vocabulary`, minus one if `shifted` is true."""
    is_t5 = hasattr(vocabulary, 'sentencepiece_model_file') or base_vocabulary.is_byte_vocabulary(vocabulary)
    return is_t5 and not shifted or getattr(vocabulary, 'shifted', None) is shifted


def write_tokenizer(
    vocabulary: Any, folder: pathlib.Path, shifted: bool = False, outputs: Sequence[str] = TOKENIZER_OUTPUTS
) -> str:
    """Writes the tokenizer files for `vocabulary`, and returns a description of the files.

    Writes no files unless `has_tokenizer` is true. `outputs` names the arrays that a tokenizer.json returns, because
    the default depends on the version of transformers.
    """
    if not has_tokenizer(vocabulary, shifted):
        return f'no tokenizer: Hugging Face has none with the ids of this {type(vocabulary).__name__}'
    if hasattr(vocabulary, 'shifted'):
        vocabulary.save(folder)
        names = {'tokenizer_class': 'PreTrainedTokenizerFast', 'model_input_names': [*outputs]}
        config = {**names, **vocabulary.special_token_names}
        description = f'{tokenizer_files.TOKENIZER} and {tokenizer_files.CONFIG}'
    else:
        sentinels = vocabulary.extra_ids
        tokens = [f'<extra_id_{i}>' for i in range(sentinels)]
        config = {'eos_token': '</s>', 'unk_token': '<unk>', 'pad_token': '<pad>', 'extra_ids': sentinels}
        if model := getattr(vocabulary, 'sentencepiece_model_file', None):
            # Copies the original file, because seqio adds sentinels to the model in memory.
            (folder / tokenizer_files.SENTENCEPIECE).write_bytes(epath.Path(model).expanduser().read_bytes())
            config |= {'tokenizer_class': 'T5Tokenizer', 'additional_special_tokens': tokens}
            counts = f'{vocabulary.vocab_size:,} ids, {sentinels} of them sentinels'
            description = f'{tokenizer_files.SENTENCEPIECE} and {tokenizer_files.CONFIG} ({counts})'
        else:
            # ByT5Tokenizer assigns ids in list order, and <extra_id_0> has the last id of the vocabulary. Published
            # models, without sentinels in the vocabulary, have 384 ids, which ByT5Tokenizer only decodes with names.
            tokens = tokens[::-1] or [f'<extra_id_{i}>' for i in range(125)]
            config |= {'tokenizer_class': tokenizer_files.BYTES_TOKENIZER, 'extra_ids': len(tokens)}
            config |= {'extra_special_tokens': tokens}
            description = f'{tokenizer_files.CONFIG} (bytes, {sentinels} sentinels)'
    (folder / tokenizer_files.CONFIG).write_text(json.dumps(config, indent=2) + '\n', encoding='utf-8')
    return description

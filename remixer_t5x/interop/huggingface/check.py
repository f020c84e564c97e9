"""Checks that a converted model computes the same as the original: logits of both on a random batch."""

import importlib.util
import pathlib
import warnings
from typing import Any

import jax
import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.config import UMT5
from remixer_t5x.interop.huggingface.folders import read_config
from remixer_t5x.models.seq2seq import Seq2Seq

# Inputs are longer than the distance beyond which T5's distances share one bucket.
ROWS, INPUT_LENGTH, TARGET_LENGTH = 2, 160, 24
# Largest allowed difference of logits, as a share of the largest logit.
TOLERANCE = 1e-3
# Texts to compare tokenizers with; for each added token there is one more.
TEXTS = (
    'Thank you for inviting me to your party last week.',
    'Ça va? Über 1,234.50 €; "quoted" (x_1 = 2).',
    " Tabs\tand\u00a0\u2028lines\n\n e\u0301 ﬁ ｗｉｄｅ 你好 don't  ",
)
MOST_TOKENS = 200
NEEDED = ('torch', 'transformers')


def missing_packages() -> list[str]:
    """The packages that Hugging Face's model needs and that are not installed."""
    return [name for name in NEEDED if importlib.util.find_spec(name) is None]


def not_compared(missing: list[str]) -> str:
    """The message for the user if logits cannot be compared."""
    verb = 'are' if len(missing) > 1 else 'is'
    return f"{' and '.join(missing)} {verb} not installed, so logits are not compared: pip install 'remixer-t5x[hf]'"


def random_batch(vocab_size: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Ids under seqio's names, [ROWS, length] int32; the last row is padded."""
    rng = np.random.default_rng(seed)
    inputs = rng.integers(2, vocab_size, (ROWS, INPUT_LENGTH), dtype=np.int32)
    targets = rng.integers(2, vocab_size, (ROWS, TARGET_LENGTH), dtype=np.int32)
    inputs[-1, INPUT_LENGTH // 2 :] = 0
    targets[-1, TARGET_LENGTH // 2 :] = 0
    shifted = np.pad(targets[:, :-1], ((0, 0), (1, 0)))
    return {'encoder_input_tokens': inputs, 'decoder_input_tokens': shifted, 'decoder_target_tokens': targets}


def our_logits(model: Seq2Seq, params: Any, batch: dict[str, np.ndarray]) -> np.ndarray:
    """Our logits of the batch's targets, float32 [targets, vocab]."""
    module = model.module.clone(dtype='float32')

    @jax.jit
    def logits(params, batch):
        tokens = (batch['encoder_input_tokens'], batch['decoder_input_tokens'])
        return module.apply({'params': params}, *tokens, enable_dropout=False)

    return np.asarray(logits(params, batch))[batch['decoder_target_tokens'] > 0]


def their_logits(folder: pathlib.Path, batch: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of Hugging Face's own T5 in `folder`, float32 [targets, vocab], computed in float32."""
    read = {'input_ids': batch['encoder_input_tokens'], 'decoder_input_ids': batch['decoder_input_tokens']}
    return logits_of_transformers('AutoModelForSeq2SeqLM', folder, read)[batch['decoder_target_tokens'] > 0]


def logits_of_transformers(kind: str, folder: pathlib.Path, read: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of transformers' class `kind` for the arrays that it reads, [rows, length, vocab] float32.

    Only safetensors are read, without a network and without code of the folder. 0 in `input_ids` is padding.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    given = {name: torch.from_numpy(array).long() for name, array in read.items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        model = getattr(transformers, kind).from_pretrained(
            folder, use_safetensors=True, local_files_only=True, trust_remote_code=False
        )
        # Version 5 ignores what a umT5's config.json says, and scales the decoder's output of every one.
        if model.config.model_type == UMT5:
            model.config.tie_word_embeddings = bool(read_config(str(folder))[1].get('tie_word_embeddings', True))
        found = model.float().eval()(attention_mask=(given['input_ids'] > 0).long(), **given)
    return found.logits.numpy()


def compared_ids(folder: pathlib.Path, vocabulary: Any) -> str:
    """A sentence that says whether the tokenizer in `folder` gives the ids of `vocabulary`."""
    import transformers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        # The library raises many kinds of errors for missing or unknown files.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f'ids are not compared: transformers cannot load a tokenizer from {folder} ({reason})'
    ids_of = getattr(vocabulary, 'huggingface_ids', vocabulary.encode)
    texts = [*TEXTS, *_with_added_tokens(tokenizer, vocabulary)]
    for text in texts:
        if tokenizer(text, add_special_tokens=False).input_ids != [int(token) for token in ids_of(text)]:
            return f"Hugging Face's tokenizer gives DIFFERENT ids for {text!r}; use our tokenizer with this model"
    return f"Hugging Face's tokenizer and ours give the same ids for {len(texts)} texts"


def _with_added_tokens(tokenizer: Any, vocabulary: Any) -> list[str]:
    """Texts with the tokens that the tokenizer has in addition to the pieces of its model.

    Left out are those that stand for no text, which are pieces of text to T5's vocabulary of ours, and the sentinels of
    ByT5: it was pretrained with the last bytes, and its tokenizer has further ids.
    """
    special = ('pad', 'eos', 'bos', 'unk', 'cls', 'sep', 'mask')
    names = {getattr(tokenizer, f'{name}_token', None) for name in special}
    if type(vocabulary).__name__ == 'ByteVocabulary' and not vocabulary.extra_ids:
        names |= {name for name in tokenizer.get_added_vocab() if name.startswith('<extra_id_')}
    return [f'to ({name}) {name}s' for name in tokenizer.get_added_vocab() if name not in names][:MOST_TOKENS]


def compared(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The largest difference, in words. Raises UserError if it is larger than rounding."""
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    words = f'{difference:.2g} at most, of logits up to {largest:.3g}'
    # This form also refuses NaN.
    if not difference <= TOLERANCE * largest:
        raise UserError(
            f'the converted model does not compute the same: its logits differ by {words}; do not use the '
            'converted files, and report the problem with the config.json'
        )
    return words

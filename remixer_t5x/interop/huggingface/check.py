"""Checks that a converted model computes the same as the original: logits of both, and ids of texts."""

import importlib.util
import pathlib
import warnings
from typing import Any

import jax
import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface import pytorch_export
from remixer_t5x.interop.huggingface.folders import Source
from remixer_t5x.interop.huggingface.table import Params

# Largest allowed difference of logits, as a share of the largest logit.
TOLERANCE = 1e-3
# Texts to compare tokenizers with; for each added token there is one more.
TEXTS = (
    'Thank you for inviting me to your party last week.',
    'Ça va? Über 1,234.50 €; "quoted" (x_1 = 2).',
    " Tabs\tand\u00a0\u2028lines\n\n e\u0301 ﬁ ｗｉｄｅ 你好 don't  ",
)
MAX_ADDED_TOKENS = 200
PACKAGES = ('torch', 'transformers')
LOCAL = {'local_files_only': True, 'trust_remote_code': False}


def missing_packages() -> list[str]:
    """The packages that Hugging Face's model needs and that are not installed."""
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def compare_logits(source: Source, model: Any, params: Params) -> str:
    """Describes the largest difference of logits between our model and transformers', on a random batch in float32.

    Raises UserError if it is larger than rounding.
    """
    family = source.family
    inputs = family.random_inputs(np.random.default_rng(0))
    theirs = _reference_logits(source, inputs)
    ours = np.asarray(jax.jit(lambda params: family.our_logits(model, params, inputs))(params))
    if 'decoder_input_ids' not in inputs:
        ours, theirs = (logits[inputs['input_ids'] > 0] for logits in (ours, theirs))
    return _difference(ours, theirs)


def _reference_logits(source: Source, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """The logits of transformers' model in the folder, [rows, length, vocab] float32.

    Only safetensors are read, without a network and without code of the folder.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tensors = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        kind = getattr(transformers, source.family.auto_class)
        reference = kind.from_pretrained(source.folder, use_safetensors=True, **LOCAL)
        for name, value in source.family.reference_settings().items():
            setattr(reference.config, name, value)
        output = reference.float().eval()(attention_mask=(tensors['input_ids'] > 0).long(), **tensors)
    return output.logits.numpy()


def compare_exported_code(folder: pathlib.Path, model: Any, params: Params) -> str:
    """Describes the largest difference of logits between our model and the PyTorch code that `pytorch_export` wrote to
    `folder`, on random ids in float32.

    Raises UserError if it is larger than rounding.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    length = min(16, pytorch_export.longest_row(pytorch_export.module_tree(model)) - 1)
    tokens = np.random.default_rng(0).integers(2, model.vocab_size, (2, length), dtype=np.int32)
    ids = torch.from_numpy(tokens).long()
    module = model.module.clone(dtype='float32')
    arguments: dict[str, Any] = {'input_ids': ids}
    if model.frame == 'encoder_decoder':
        targets = np.pad(tokens[:, 1:], ((0, 0), (1, 0)))
        arguments['decoder_input_ids'] = torch.from_numpy(targets).long()
        call = lambda params: module.apply({'params': params}, tokens, targets, enable_dropout=False)  # noqa: E731
    elif model.frame == 'decoder_only':
        shifted = np.pad(tokens, ((0, 0), (1, 0)))
        call = lambda params: module.apply({'params': params}, shifted, enable_dropout=False)[:, 1:]  # noqa: E731
    else:
        method = 'classify' if model.frame == 'classifier' else 'predict_tokens'
        call = lambda params: module.apply({'params': params}, tokens, enable_dropout=False, method=method)  # noqa: E731
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        # The code of this folder is ours: it was written a moment ago.
        kind = getattr(transformers, pytorch_export.CLASSES[model.frame][1])
        reference = kind.from_pretrained(folder, local_files_only=True, trust_remote_code=True).float().eval()
        theirs = reference(**arguments).logits.numpy()
    return _difference(np.asarray(jax.jit(call)(params)), theirs)


def _difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The largest difference of logits, in words. Raises UserError if it is larger than rounding."""
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    text = f'{difference:.2g} at most, of logits up to {largest:.3g}'
    # This form also rejects NaN.
    if not difference <= TOLERANCE * largest:
        raise UserError(
            f'the converted model does not compute the same: its logits differ by {text}; do not use the '
            'converted files, and report the problem with the config.json'
        )
    return text


def compare_ids(folder: pathlib.Path, vocabulary: Any) -> str:
    """Describes whether the tokenizer in `folder` gives the ids of `vocabulary`."""
    import transformers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    except Exception as error:
        # The library raises many kinds of errors for missing or unknown files.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f'ids are not compared: transformers cannot load a tokenizer from {folder} ({reason})'
    ids_of = getattr(vocabulary, 'huggingface_ids', vocabulary.encode)
    texts = [*TEXTS, *_texts_with_added_tokens(tokenizer, vocabulary)]
    for text in texts:
        if tokenizer(text, add_special_tokens=False).input_ids != [int(token) for token in ids_of(text)]:
            return f"Hugging Face's tokenizer gives DIFFERENT ids for {text!r}; use our tokenizer with this model"
    return f"Hugging Face's tokenizer and ours give the same ids for {len(texts)} texts"


def _texts_with_added_tokens(tokenizer: Any, vocabulary: Any) -> list[str]:
    """Texts with the tokens that the tokenizer has in addition to the pieces of its model.

    Left out are those that stand for no text, which are pieces of text to T5's vocabulary of ours, and the sentinels of
    ByT5: it was pretrained with the last bytes, and its tokenizer has further ids.
    """
    special = ('pad', 'eos', 'bos', 'unk', 'cls', 'sep', 'mask')
    names = {getattr(tokenizer, f'{name}_token', None) for name in special}
    if type(vocabulary).__name__ == 'ByteVocabulary' and not vocabulary.extra_ids:
        names |= {name for name in tokenizer.get_added_vocab() if name.startswith('<extra_id_')}
    return [f'to ({name}) {name}s' for name in tokenizer.get_added_vocab() if name not in names][:MAX_ADDED_TOKENS]

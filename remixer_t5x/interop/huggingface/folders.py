"""Reads and writes folders of Hugging Face models, and verifies that both sides compute the same.

A folder has config.json, the weights as safetensors, in one file or in shards, and the files of a tokenizer.
"""

import dataclasses
import importlib.util
import json
import pathlib
import warnings
from typing import Any

import jax
import numpy as np

from remixer_t5x import safe_paths, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import table
from remixer_t5x.interop.huggingface.bert import Bert, BertClassifier
from remixer_t5x.interop.huggingface.family import Config, Family, Refusal
from remixer_t5x.interop.huggingface.gpt2 import Gpt2
from remixer_t5x.interop.huggingface.modern_bert import ModernBert, ModernBertClassifier
from remixer_t5x.interop.huggingface.sentence_t5 import MODULES, SentenceT5
from remixer_t5x.interop.huggingface.t5 import T5, T5Encoder
from remixer_t5x.interop.huggingface.t5gemma import T5Gemma
from remixer_t5x.interop.huggingface.table import Params, Runs

FAMILIES: tuple[type[Family], ...] = (
    *(T5, Bert, Gpt2, T5Encoder, SentenceT5, BertClassifier),
    *(ModernBert, ModernBertClassifier, T5Gemma),
)
CONFIG = 'config.json'
# Largest allowed difference of logits, as a share of the largest logit.
TOLERANCE = 1e-3
# Texts to compare tokenizers with, besides one for each added token.
TEXTS = (
    'Thank you for inviting me to your party last week.',
    'Ça va? Über 1,234.50 €; "quoted" (x_1 = 2).',
    " Tabs\tand\u00a0\u2028lines\n\n e\u0301 ﬁ ｗｉｄｅ 你好 don't  ",
)
MAX_ADDED_TOKENS = 200
LOCAL = {'local_files_only': True, 'trust_remote_code': False}


@dataclasses.dataclass(frozen=True)
class Source:
    """A folder with a model of a family; weights are read on demand."""

    folder: pathlib.Path
    family: Family
    tensors: safetensors_files.Tensors

    def params(self) -> Params:
        """Our parameters, numpy float32. Raises UserError if a weight is missing, has another shape, or is unknown."""
        return self.family.read(self.tensors, str(self.folder))

    def first_difference(self, params: Params, runs: Runs | None = None) -> str | None:
        """The name of a weight that differs in `params`, whose layers are grouped in `runs` (None: one run)."""
        tensors = self.tensors.renamed(self.family.canonical_names(self.tensors))
        arrays = table.write(self.family.rows(), runs or self.family.one_run(), params)
        return next((name for name, array in arrays.items() if not np.array_equal(array, tensors[name])), None)


def read(path: str) -> Source:
    """Opens the folder `path`. Raises UserError if it does not contain a model that one of ours can express."""
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        hint = 'for a model on the Hub type hf://NAME' if '/' in path else f'use a folder with {CONFIG}'
        raise UserError(f'{path} is not a folder; {hint}')
    safe_paths.check_inside(folder)
    if not (folder / CONFIG).is_file():
        raise UserError(f'{folder} has no {CONFIG}; use the folder of a Hugging Face model')
    config = Config(untrusted_files.read_object(folder / CONFIG), str(folder))
    model_type = config.values.get('model_type')
    families = [family for family in FAMILIES if model_type in family.model_types]
    if not families:
        model_types = dict.fromkeys(name for family in FAMILIES for name in family.model_types)
        raise config.error('model_type', f'it must be one of {", ".join(model_types)}')
    # Several classes of transformers have the same model type; the first one is the default.
    architectures = config.values.get('architectures')
    names = tuple(str(name) for name in architectures) if isinstance(architectures, list) else ()
    named = [family for family in families if any(name.endswith(family.hf_class) for name in names)]
    family = SentenceT5 if (folder / MODULES).is_file() else [*named, *families][0]
    tensors = family.read_tensors(folder)
    return Source(folder, family.from_config(config, tensors), tensors)


def describe(model: Any, vocabulary: Any) -> tuple[Family, Runs]:
    """Returns the family and sizes of a model, and the number of layers in each run of identical layers.

    Raises Refusal if no family has an equivalent; its reason names the first part that differs.
    """
    refusals = []
    for family in FAMILIES:
        if isinstance(model, family.model_class):
            try:
                return family.describe(model, vocabulary)
            except Refusal as refusal:
                refusals.append(refusal)
    if refusals:
        raise refusals[0]
    kinds = ', '.join(family.kind for family in FAMILIES)
    raise Refusal(f'transformers has {kinds}, and MODEL_TYPE is {model.model_type!r}')


def write(path: str, family: Family, params: Params, runs: Runs, dtype: str = 'float32') -> pathlib.Path:
    """Writes configuration and weights, in `dtype`, into the new or empty folder `path`, and returns it."""
    folder = check_free(path)
    files = {CONFIG: {**family.to_config(), 'dtype': dtype, 'torch_dtype': dtype}, **family.files()}
    try:
        for name, content in files.items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
    except OSError as error:
        raise UserError(f'{folder} cannot be written ({error.strerror}); check the space and rights there') from error
    arrays: dict[str, dict[str, np.ndarray]] = {}
    for name, array in family.write(params, runs).items():
        part, _, name_in_file = name.rpartition('/')
        arrays.setdefault(part, {})[name_in_file] = array.astype(np.dtype(dtype), copy=False)
    for part, contents in arrays.items():
        safetensors_files.write_file(folder / part / safetensors_files.WHOLE, contents, {'format': 'pt'})
    return folder


def check_free(path: str) -> pathlib.Path:
    """Returns the path of a folder to write into. Raises UserError if the folder is not empty."""
    folder = pathlib.Path(path).expanduser()
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f'{folder} is not empty; use a new or empty folder')
    return folder


def missing_packages() -> list[str]:
    """The packages that `compare_logits` needs and that are not installed."""
    return [name for name in ('torch', 'transformers') if importlib.util.find_spec(name) is None]


def compare_logits(source: Source, model: Any, params: Params) -> str:
    """Describes the largest difference between our logits and those of transformers, on a random batch in float32.

    Raises UserError if it exceeds rounding.
    """
    return describe_difference(*both_logits(source, model, params))


def both_logits(source: Source, model: Any, params: Params) -> tuple[np.ndarray, np.ndarray]:
    """Returns our logits and those of transformers for a random batch in float32.

    transformers reads only safetensors, without network access and without code from the folder.
    """
    import torch
    import transformers

    family, inputs = source.family, source.family.random_inputs(np.random.default_rng(0))
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tensors = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        auto_class = getattr(transformers, family.auto_class)
        reference = auto_class.from_pretrained(source.folder, use_safetensors=True, **LOCAL)
        for name, value in family.reference_settings().items():
            setattr(reference.config, name, value)
        output = reference.float().eval()(attention_mask=(tensors['input_ids'] > 0).long(), **tensors)
    # Logits, or the hidden states of an encoder.
    theirs = output[0].numpy()
    ours = np.asarray(jax.jit(lambda params: family.our_logits(model, params, inputs))(params))
    if ours.shape[:2] == inputs['input_ids'].shape:
        ours, theirs = (logits[inputs['input_ids'] > 0] for logits in (ours, theirs))
    return ours, theirs


def describe_difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """The largest difference of logits, in words. Raises UserError if it exceeds rounding."""
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    text = f'{difference:.2g} at most, of logits up to {largest:.3g}'
    # Negated, so that NaN fails.
    if not difference <= TOLERANCE * largest:
        raise UserError(
            f'the converted model computes different logits; they differ by {text}; do not use the '
            'converted files, and report the problem with the config.json'
        )
    return text


def compare_ids(folder: pathlib.Path, vocabulary: Any) -> str:
    """Returns a message that says whether the tokenizer in `folder` and `vocabulary` produce the same ids."""
    import transformers

    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
    except Exception as error:
        # transformers raises many types of errors for missing or unknown files.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        return f'ids are not compared: transformers cannot load a tokenizer from {folder} ({reason})'
    # Special tokens do not represent text. ByT5 was pretrained with the last bytes as sentinels, which its tokenizer
    # lacks.
    special = ('pad', 'eos', 'bos', 'unk', 'cls', 'sep', 'mask')
    skipped = {getattr(tokenizer, f'{name}_token', None) for name in special}
    added = tokenizer.get_added_vocab()
    if type(vocabulary).__name__ == 'ByteVocabulary' and not vocabulary.extra_ids:
        skipped |= {name for name in added if name.startswith('<extra_id_')}
    texts = [*TEXTS, *[f'to ({name}) {name}s' for name in added if name not in skipped][:MAX_ADDED_TOKENS]]
    ids_of = getattr(vocabulary, 'huggingface_ids', vocabulary.encode)
    for text in texts:
        if tokenizer(text, add_special_tokens=False).input_ids != [int(token) for token in ids_of(text)]:
            return f"Hugging Face's tokenizer gives DIFFERENT ids for {text!r}; use our tokenizer with this model"
    return f"Hugging Face's tokenizer and ours use the same ids for {len(texts)} texts"

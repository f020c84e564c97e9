"""Reads and writes Hugging Face model folders, and compares logits and token ids with transformers.

A folder contains config.json, the weights as safetensors (a single file or shards), and tokenizer files.
"""

import dataclasses
import importlib.util
import json
import os
import pathlib
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.data import batch_formats
from remixer_t5x.errors import UserError, to_one_line
from remixer_t5x.interop import converted_checkpoint, safetensors_files
from remixer_t5x.interop.huggingface.bert import Bert, BertClassifier
from remixer_t5x.interop.huggingface.gpt2 import Gpt2
from remixer_t5x.interop.huggingface.model_family import CONFIG, HuggingFaceConfig, ModelFamily
from remixer_t5x.interop.huggingface.modern_bert import ModernBert, ModernBertClassifier
from remixer_t5x.interop.huggingface.param_mapping import Params
from remixer_t5x.interop.huggingface.t5 import SENTENCE_MODULES, T5, SentenceT5, T5Encoder
from remixer_t5x.interop.huggingface.t5gemma import T5Gemma
from remixer_t5x.interop.huggingface.traced_modules import TracedModules, UnsupportedModelError

FAMILIES: tuple[type[ModelFamily], ...] = (
    *(T5, Bert, Gpt2, T5Encoder, SentenceT5, BertClassifier),
    *(ModernBert, ModernBertClassifier, T5Gemma),
)
# `model_type` of the folders that `pytorch_export` writes. It must differ from `shared_folder.MODEL_TYPE`, because
# shared folders contain gin text instead of PyTorch code.
PYTORCH_MODEL_TYPE = 'remixer_t5x_pytorch'
# Maximum difference between logits, as a fraction of the largest absolute logit.
TOLERANCE = 1e-3
# Texts for comparing tokenizers.
TOKENIZER_TEXTS = (
    'Thank you for inviting me to your party last week.',
    'Ça va? Über 1,234.50 €; "quoted" (x_1 = 2).',
    " Tabs\tand\u00a0\u2028lines\n\n e\u0301 ﬁ ｗｉｄｅ 你好 don't  ",
)
# Each tokenizer of transformers requires at least one of these files.
TOKENIZER_FILES = (
    *(tokenizer_files.TOKENIZER, tokenizer_files.CONFIG, tokenizer_files.SENTENCEPIECE),
    *('vocab.txt', 'vocab.json'),
)


@dataclasses.dataclass(frozen=True)
class HuggingFaceFolder:
    """A Hugging Face model folder, whose weights are read on demand."""

    folder: pathlib.Path
    family: ModelFamily
    tensors: safetensors_files.Tensors

    def read_params(self, abstract: Params) -> Params:
        """Reads the parameters (NumPy, float32) of the model whose parameter tree has the shapes of `abstract`.

        Raises UserError for a missing, unknown or misshapen weight.
        """
        return self.family.read_params(self.tensors, abstract, str(self.folder))

    def find_differing_weight(self, params: Params) -> str | None:
        """Returns the name of a weight that differs from `params`, or None if all weights are equal."""
        arrays = self.family.convert_to_huggingface(params)
        return next((name for name, array in arrays.items() if not np.array_equal(array, self.tensors[name])), None)


def open_model_folder(path: str | os.PathLike[str]) -> HuggingFaceFolder:
    """Opens the folder `path`. Raises UserError if the folder has no supported model."""
    folder = pathlib.Path(path).expanduser()
    if not folder.is_dir():
        hint = 'for a model on the Hub, use hf://NAME' if '/' in str(path) else f'use a folder with {CONFIG}'
        raise UserError(f'{path} is not a folder; {hint}')
    untrusted_files.check_links_inside(folder)
    family, config = read_family(folder)
    tensors = family.open_tensors(folder)
    return HuggingFaceFolder(folder, family.from_config(config), tensors)


def read_family(folder: pathlib.Path) -> tuple[type[ModelFamily], HuggingFaceConfig]:
    """Reads config.json, and returns it with the family of the model. Raises UserError if no family supports it."""
    if not (folder / CONFIG).is_file():
        raise UserError(f'{folder} has no {CONFIG}; use the folder of a Hugging Face model')
    config = HuggingFaceConfig(untrusted_files.read_json_object(folder / CONFIG), str(folder))
    model_type = config.values.get('model_type')
    families = [family for family in FAMILIES if model_type in family.model_types]
    if not families:
        if model_type == PYTORCH_MODEL_TYPE:
            raise UserError(f'{folder} is an export to PyTorch; use the MODEL_DIR from which `convert` wrote it')
        model_types = dict.fromkeys(name for family in FAMILIES for name in family.model_types)
        raise config.setting_error('model_type', f'it must be one of {", ".join(model_types)}')
    # Some classes of transformers share a model type; the first family is the default.
    names = config.values.get('architectures')
    names = names if isinstance(names, list) else []
    named = [family for family in families if any(str(name).endswith(family.hf_class) for name in names)]
    return (SentenceT5 if (folder / SENTENCE_MODULES).is_file() else [*named, *families][0]), config


def find_equivalent_model(model: Any, vocabulary: Any, build: Callable[[str], Any]) -> ModelFamily:
    """Returns the equivalent Hugging Face model.

    `build` builds a model from gin text. Raises UnsupportedModelError, with the first difference as the reason, if no
    family has an equivalent.
    """
    families = [family for family in FAMILIES if isinstance(model, family.model_class)]
    if not families:
        supported = ', '.join(dict.fromkeys(family.hf_class for family in FAMILIES))
        raise UnsupportedModelError(
            f'no Hugging Face model corresponds to MODEL_TYPE = {model.model_type!r} (supported: {supported})'
        )
    modules, refusals = TracedModules(model), []
    for family in families:
        try:
            equivalent = family.from_model(model, vocabulary, modules, build)
            _require_equivalent_config(equivalent)
            return equivalent
        except UnsupportedModelError as refusal:
            reason = f"Hugging Face's {family.hf_class} cannot represent this model: {refusal.reason}"
            refusals.append(UnsupportedModelError(reason))
    raise refusals[0]


def _require_equivalent_config(family: ModelFamily) -> None:
    """Raises UnsupportedModelError if the config.json that is written for `family` describes a different model."""
    with tempfile.TemporaryDirectory() as folder:
        write_files(pathlib.Path(folder), family.build_json_files(), {}, 'float32')
        try:
            written = type(family).from_config(read_family(pathlib.Path(folder))[1])
        except UserError as error:
            raise UnsupportedModelError(str(error).replace(f'{folder}/', '')) from error
    for name in [field.name for field in dataclasses.fields(family) if field.compare]:
        ours, theirs = getattr(family, name), getattr(written, name)
        if ours != theirs:
            raise UnsupportedModelError(f'{name} is {ours!r}, but transformers would use {theirs!r}')


def write_model_folder(
    path: str | os.PathLike[str], family: ModelFamily, params: Params, dtype: str = 'float32'
) -> pathlib.Path:
    """Writes config.json and the weights, converted to `dtype`, to a new or empty folder, and returns its path."""
    folder = converted_checkpoint.check_folder_is_empty(path)
    write_files(folder, family.build_json_files(), family.convert_to_huggingface(params), dtype)
    return folder


def write_files(folder: pathlib.Path, files: Mapping[str, Any], arrays: Mapping[str, np.ndarray], dtype: str) -> None:
    """Writes JSON files and weights to `folder`. `files` maps file names to contents.

    Converts the weights to `dtype`, which is added to config.json. The name of a weight in a subfolder starts with
    `subfolder/`.
    """
    for name, content in files.items():
        content = {**content, 'dtype': dtype, 'torch_dtype': dtype} if name == CONFIG else content
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(json.dumps(content, indent=2) + '\n', encoding='utf-8')
    weights: dict[str, dict[str, np.ndarray]] = {}
    for name, array in arrays.items():
        subfolder, _, name_in_file = name.rpartition('/')
        weights.setdefault(subfolder, {})[name_in_file] = array.astype(np.dtype(dtype), copy=False)
    for subfolder, contents in weights.items():
        file = folder / subfolder / safetensors_files.WEIGHTS_FILE
        safetensors_files.write_weights_file(file, contents, {'format': 'pt'})


def find_missing_packages() -> list[str]:
    """Returns the packages that a comparison with transformers requires but that are not installed."""
    return [name for name in ('torch', 'transformers') if importlib.util.find_spec(name) is None]


def compute_logits_pair(source: HuggingFaceFolder, model: Any, params: Params) -> tuple[np.ndarray, np.ndarray]:
    """Returns the float32 logits of the remixer_t5x model and of the transformers model for a random batch."""
    family, rng = source.family, np.random.default_rng(0)
    # Longer than T5's maximum distance and ModernBERT's window.
    tokens = rng.integers(3, family.vocab_size, (2, min(256, getattr(family, 'max_length', 256))), dtype=np.int32)
    # transformers does not compute BERT's token types.
    tokens[tokens == getattr(family, 'separator_id', None)] = 1
    is_token = np.ones_like(tokens, bool)
    is_token[-1, tokens.shape[1] // 2 :] = model.model_type == batch_formats.DECODER_ONLY
    arrays = {'input_ids': np.where(is_token, tokens, 0), 'attention_mask': is_token}
    ours = [np.where(is_token, tokens + family.id_offset, 0)]
    if model.model_type == batch_formats.DECODER_ONLY:
        arrays['input_ids'][:, 0], ours[0][:, 0] = getattr(family, 'bos_id', 0), 0
    if model.model_type == batch_formats.ENCODER_DECODER:
        targets = np.pad(rng.integers(3, family.vocab_size, (2, 23), dtype=np.int32), ((0, 0), (1, 0)))
        arrays['decoder_input_ids'] = np.where(targets > 0, targets, getattr(family, 'bos_id', 0))
        ours.append(targets)
    # transformers 5 sets this for every umT5, which scales the output.
    overrides = {'tie_word_embeddings': False} if getattr(family, 'layer_biases', False) else {}
    theirs = compute_reference_output(source.folder, family.auto_class, arrays, overrides)
    method = 'encode' if family.auto_class == 'AutoModelForTextEncoding' else None
    logits = apply_module(model, params, ours, method)[..., family.id_offset if theirs.ndim == 3 else 0 :]
    if logits.shape[:2] == is_token.shape:
        logits, theirs = (each[is_token] for each in (logits, theirs))
    return logits, theirs


def apply_module(model: Any, params: Params, inputs: Sequence[np.ndarray], method: str | None = None) -> np.ndarray:
    """Returns the output of `method` of the model's module, by default the logits, in float32 without dropout."""
    method = method or {'classifier': 'classify', 'encoder_only': 'predict_tokens'}.get(model.model_type, '__call__')
    module = model.module.clone(dtype='float32')
    call = jax.jit(lambda params: module.apply({'params': params}, *inputs, enable_dropout=False, method=method))
    return np.asarray(call(params))


def compute_reference_output(
    folder: pathlib.Path,
    auto_class: str,
    inputs: Mapping[str, np.ndarray],
    overrides: Mapping[str, Any] = {},
    trust_remote_code: bool = False,
) -> np.ndarray:
    """Returns the float32 logits of a transformers model, or the hidden states of a model without a head.

    transformers loads only safetensors files, does not access the network, and runs code from `folder` only if
    `trust_remote_code` is true. `overrides` override settings of config.json.
    """
    import torch
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    tensors = {name: torch.from_numpy(array).long() for name, array in inputs.items()}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter('ignore')
        reference = getattr(transformers, auto_class).from_pretrained(
            folder, use_safetensors=True, local_files_only=True, trust_remote_code=trust_remote_code
        )
        for name, value in overrides.items():
            setattr(reference.config, name, value)
        return reference.float().eval()(**tensors)[0].numpy()


def describe_logits_difference(ours: np.ndarray, theirs: np.ndarray) -> str:
    """Describes the largest difference between logits. Raises UserError if it exceeds the tolerance."""
    difference, largest = float(np.max(np.abs(ours - theirs))), float(np.max(np.abs(theirs)))
    text = f'up to {difference:.2g} (largest absolute logit: {largest:.3g})'
    # The condition is negated so that NaN fails.
    if not difference <= TOLERANCE * largest:
        raise UserError(
            f'logits of the converted model must equal those of the original, but differ by {text}; do not use the '
            'converted files, and report the problem together with config.json'
        )
    return text


def compare_token_ids(folder: pathlib.Path, vocabulary: Any) -> str:
    """Tokenizes texts with the tokenizer in `folder` and with `vocabulary`, and describes whether the ids are equal."""
    import transformers

    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return f'ids are not compared: {folder} has no tokenizer'
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except Exception as error:
        # transformers raises various exceptions for missing or unknown files.
        reason = to_one_line(str(error)) or type(error).__name__
        return f'ids are not compared: transformers cannot load a tokenizer from {folder} ({reason:.200})'
    ids_of = getattr(vocabulary, 'huggingface_ids', vocabulary.encode)
    for text in TOKENIZER_TEXTS:
        if tokenizer(text, add_special_tokens=False).input_ids != [int(token) for token in ids_of(text)]:
            return f"Hugging Face's tokenizer returns DIFFERENT ids for {text!r}; use our tokenizer with this model"
    return f"Hugging Face's tokenizer and ours use the same ids for {len(TOKENIZER_TEXTS)} texts"

"""Converts BERT masked language models and classifiers between Hugging Face and models/bert.gin.

Source: `BertConfig`, `BertForMaskedLM` and `BertForSequenceClassification` of transformers 4 and 5. Layers have
post-norm, biases and the exact GELU. A masked language model has an output projection tied to the embedding. It has no
pooler and no next-sentence head; weights of these modules in published BERT models are ignored.
"""

import dataclasses
import pathlib
import re
from typing import Any, ClassVar

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop.huggingface.model_family import HuggingFaceConfig, ModelFamily, Tokenizer
from remixer_t5x.interop.huggingface.param_mapping import ModuleNames
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.interop.safetensors_files import Tensors
from remixer_t5x.models.classifier import Classifier
from remixer_t5x.models.masked_lm import MaskedLM

# Tokenizer files in order of preference.
TOKENIZERS = (tokenizer_files.TOKENIZER, 'vocab.txt')
EMBEDDING_TABLE, HEAD = 'bert.embeddings.word_embeddings.weight', 'cls.predictions'
ATTENTION, LAYER = 'encoder/layer/scaled_attention', 'bert.encoder.layer.{}'
# Published BERT models use TensorFlow's names for the parameters of norms.
OLD_NORM_NAMES = {'LayerNorm.gamma': 'LayerNorm.weight', 'LayerNorm.beta': 'LayerNorm.bias'}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Bert(ModelFamily):
    """A BERT masked language model with `max_length` learned positions and `token_types` learned token types.

    Tokens after [SEP] have type 1. `separator_id` is the id of [SEP], or None if the folder has no tokenizer.
    """

    model_types = ('bert',)
    hf_class = 'BertForMaskedLM'
    auto_class = 'AutoModelForMaskedLM'
    model_class: ClassVar[type] = MaskedLM
    gin_files: ClassVar[tuple[str, ...]] = ('models/bert.gin',)
    sizes = {
        'vocab_size': 'vocab_size',
        'hidden_size': 'embed_dim',
        'intermediate_size': 'mlp_dim',
        'num_attention_heads': 'num_heads',
        'num_hidden_layers': 'num_encoder_layers',
        'max_position_embeddings': 'max_length',
        'type_vocab_size': 'token_types',
        'layer_norm_eps': 'epsilon',
    }
    allowed = {
        'hidden_act': ('gelu',),
        'position_embedding_type': ('absolute',),
        'tie_word_embeddings': (True,),
        'is_decoder': (False,),
        'pad_token_id': (0,),
    }
    copies = {f'{HEAD}.decoder.weight': EMBEDDING_TABLE, f'{HEAD}.decoder.bias': f'{HEAD}.bias'}
    ignored = r'bert\.pooler\..*|cls\.seq_relationship\..*|bert\.embeddings\.position_ids'

    tokenizer_outputs = ('input_ids', 'token_type_ids', 'attention_mask')
    attention_name = 'scaled_attention'
    module_names: ClassVar[ModuleNames] = {
        'token_embedder': 'bert.embeddings.word_embeddings',
        'input/positions': 'bert.embeddings.position_embeddings',
        'input/token_types': 'bert.embeddings.token_type_embeddings',
        'input/norm': 'bert.embeddings.LayerNorm',
        **{f'{ATTENTION}/{name}': f'{LAYER}.attention.self.{name}' for name in ('query', 'key', 'value')},
        f'{ATTENTION}/out': f'{LAYER}.attention.output.dense',
        f'{ATTENTION}_norm': f'{LAYER}.attention.output.LayerNorm',
        'encoder/layer/gelu_mlp/wi': f'{LAYER}.intermediate.dense',
        'encoder/layer/gelu_mlp/wo': f'{LAYER}.output.dense',
        'encoder/layer/gelu_mlp_norm': f'{LAYER}.output.LayerNorm',
        'head': HEAD,
        'head/dense': f'{HEAD}.transform.dense',
        'head/output_norm': f'{HEAD}.transform.LayerNorm',
    }

    num_encoder_layers: int
    max_length: int
    token_types: int = 2
    epsilon: float = 1e-12
    # Not compared for equality, because it is read from the tokenizer instead of config.json.
    separator_id: int | None = dataclasses.field(default=None, compare=False)

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        return {**super().read_fields(config), 'separator_id': _read_separator_id(config.folder)}

    @property
    def max_lengths(self) -> dict[str, int]:
        return {'inputs': self.max_length, 'targets': self.max_length}

    @staticmethod
    def map_canonical_names(tensors: Tensors) -> dict[str, str]:
        pattern = re.compile('|'.join(map(re.escape, OLD_NORM_NAMES)) + '$')
        return {pattern.sub(lambda match: OLD_NORM_NAMES[match[0]], name): name for name in tensors}

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        fields, embedding = super().read_model_fields(model, vocabulary, modules), modules.find_module('input')
        return fields | {
            'max_length': embedding.max_length,
            'token_types': embedding.token_types,
            'separator_id': model.module.separator_id,
        }

    def build_gin_settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            'MAX_INPUT_LENGTH': self.max_length,
            'encoder_only.BertInput.token_types': self.token_types,
            'bert/norms.LayerNorm.epsilon': self.epsilon,
        }
        if self.separator_id is not None:
            settings['encoder_only.EncoderOnly.separator_id'] = self.separator_id
        if self.max_length < 512:
            # The default length, 512 tokens, exceeds the number of positions.
            settings['TASK_FEATURE_LENGTHS'] = self.max_lengths
        return settings

    def find_tokenizer(self, folder: pathlib.Path, file: str | None) -> Tokenizer:
        files = [pathlib.Path(file)] if file else [folder / name for name in TOKENIZERS if (folder / name).is_file()]
        if not files:
            raise UserError(
                f'{folder} has no {" and no ".join(TOKENIZERS)}; pass vocabulary=/path/to/{TOKENIZERS[0]} '
                '(--vocabulary in commands)'
            )
        path = files[0]
        # The separator determines the token types.
        if self.token_types > 1 and _read_separator_id(path.parent) != self.separator_id:
            raise UserError(
                f'{folder} must contain a tokenizer in which [SEP] has the same id as in {path}; copy {path.name} to it'
            )
        return 'wordpiece', {'path': str(path)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class ClassifierFamily(ModelFamily):
    """Base class of the families of classifiers; `labels` is None for a regression model."""

    auto_class = 'AutoModelForSequenceClassification'
    model_class: ClassVar[type] = Classifier
    copies = {}

    labels: tuple[str, ...] | None

    @classmethod
    def read_fields(cls, config: HuggingFaceConfig) -> dict[str, Any]:
        return {**super().read_fields(config), 'labels': read_label_names(config)}

    def to_config(self) -> dict[str, Any]:
        names = self.labels or ('LABEL_0',)
        return {
            **super().to_config(),
            'id2label': {str(index): name for index, name in enumerate(names)},
            'label2id': {name: index for index, name in enumerate(names)},
            'problem_type': 'single_label_classification' if self.labels else 'regression',
        }

    @classmethod
    def read_model_fields(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        return super().read_model_fields(model, vocabulary, modules) | {'labels': model.labels and tuple(model.labels)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class BertClassifier(ClassifierFamily, Bert):
    """A BERT classifier or regression model with a pooler."""

    hf_class = 'BertForSequenceClassification'
    gin_files = ('models/bert.gin', 'model_types/classifier.gin')
    ignored = r'bert\.embeddings\.position_ids'
    module_names = {**Bert.module_names, 'head/dense': 'bert.pooler.dense', 'head/output': 'classifier'}

    def build_gin_settings(self) -> dict[str, Any]:
        return {**super().build_gin_settings(), 'POOLING': '@encoder_only.first_token', 'LABELS': self.labels}


def read_label_names(config: HuggingFaceConfig) -> tuple[str, ...] | None:
    """Returns the label names of a classifier in index order, or None for a regression model."""
    names = config.values.get('id2label', {'0': 'LABEL_0', '1': 'LABEL_1'})
    if not isinstance(names, dict) or set(names) != {str(index) for index in range(len(names))}:
        raise config.setting_error('id2label', 'it must map 0, 1, 2 ... to label names')
    labels = tuple(str(names[str(index)]) for index in range(len(names)))
    if len(labels) > 1 and len({*labels}) < len(labels):
        raise config.setting_error('id2label', 'its label names must be unique')
    expected = 'single_label_classification' if len(labels) > 1 else 'regression'
    if config.values.get('problem_type') not in (None, expected):
        raise config.setting_error('problem_type', f'with {len(labels)} labels, it must be {expected!r} or null')
    return labels if len(labels) > 1 else None


def _read_separator_id(folder: pathlib.Path) -> int | None:
    """Returns the id of [SEP] from the added tokens or vocab.txt in a folder, or None if neither has [SEP]."""
    added, file = tokenizer_files.read_added_tokens(folder), folder / TOKENIZERS[1]
    if '[SEP]' in added or not file.is_file():
        return added.get('[SEP]')
    pieces = untrusted_files.read_text(file).replace('\r\n', '\n').split('\n')
    return pieces.index('[SEP]') if '[SEP]' in pieces else None

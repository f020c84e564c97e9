"""Converts sentence-T5 (Ni et al. 2021), stored in the format of sentence-transformers.

The model consists of a T5 encoder, mean pooling over tokens, a linear projection, and L2 normalization.

    modules.json             the list of modules, in order
    config.json, ...         the T5 encoder (`T5EncoderModel`), including its weights and tokenizer
    1_Pooling, 2_Dense       config.json of each module, and model.safetensors with the projection

Source: `Pooling`, `Dense` and `Normalize` of sentence-transformers 2 to 6.
"""

import dataclasses
import pathlib
from collections.abc import Iterator
from typing import Any, Self

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface.family import MAX_NUMBER, Config
from remixer_t5x.interop.huggingface.parameter_table import ParamRow, kernel_row
from remixer_t5x.interop.huggingface.t5 import T5Encoder
from remixer_t5x.interop.huggingface.traced_modules import TracedModules
from remixer_t5x.interop.safetensors_files import Tensors

MODULES, SETTINGS, CONFIG = 'modules.json', 'sentence_bert_config.json', 'config.json'
POOLING, DENSE = '1_Pooling', '2_Dense'
# Maps the folder of each module in modules.json to its class name.
LAYOUT = {'': 'Transformer', POOLING: 'Pooling', DENSE: 'Dense', '3_Normalize': 'Normalize'}
IDENTITY = 'torch.nn.modules.linear.Identity'


@dataclasses.dataclass(frozen=True, kw_only=True)
class SentenceT5(T5Encoder):
    """A T5 encoder with mean pooling and a linear projection to `sentence_dim` features."""

    kind = 'sentence-T5'

    sentence_dim: int
    max_length: int = 512

    @classmethod
    def read_tensors(cls, folder: pathlib.Path) -> Tensors:
        modules = untrusted_files.read_list(folder / MODULES)
        entries = [module if isinstance(module, dict) else {} for module in modules]
        classes = [str(entry.get('type')).rpartition('.')[2] for entry in entries]
        if [(entry.get('path'), name) for entry, name in zip(entries, classes, strict=True)] != [*LAYOUT.items()]:
            raise UserError(
                f'{folder / MODULES} must list the modules {", ".join(LAYOUT.values())}, got '
                f'{", ".join(classes):.100}; use the folder of a sentence-T5 model'
            )
        return super().read_tensors(folder).join_folder(DENSE, safetensors_files.read_folder(folder / DENSE))

    @classmethod
    def from_config(cls, config: Config, tensors: Tensors) -> Self:
        folder = config.folder
        pooling, dense = (
            Config(untrusted_files.read_object(folder / name / CONFIG), str(folder / name)) for name in (POOLING, DENSE)
        )
        # Before version 6, sentence-transformers used a separate flag for each pooling mode.
        for name, value in pooling.values.items():
            if name.startswith('pooling_mode') and value not in ('mean', name == 'pooling_mode_mean_tokens'):
                raise pooling.error(name, 'the pooling mode must be mean')
        dense.check_values({'bias': (False,), 'activation_function': (IDENTITY,), 'use_residual': (False,)})
        settings = untrusted_files.read_object(folder / SETTINGS) if (folder / SETTINGS).is_file() else {}
        # sentence-transformers 6 does not write max_seq_length, and transformers writes 10**30 if there is no limit.
        longest = settings.get('max_seq_length') or tokenizer_files.read_config(folder).get('model_max_length')
        limits = {} if isinstance(longest, int) and longest > MAX_NUMBER else {'max_seq_length': longest}
        return cls(
            sentence_dim=dense.read_int('out_features'),
            max_length=Config(limits, str(folder)).read_int('max_seq_length', 512),
            **cls.read_sizes(config),
            **cls.read_other_fields(config),
        )

    def extra_files(self) -> dict[str, Any]:
        return {
            MODULES: [
                {'idx': index, 'name': str(index), 'path': path, 'type': f'sentence_transformers.models.{name}'}
                for index, (path, name) in enumerate(LAYOUT.items())
            ],
            SETTINGS: {'max_seq_length': self.max_length, 'do_lower_case': False},
            f'{POOLING}/{CONFIG}': {'word_embedding_dimension': self.embed_dim, 'pooling_mode_mean_tokens': True},
            f'{DENSE}/{CONFIG}': {
                'in_features': self.embed_dim,
                'out_features': self.sentence_dim,
                'bias': False,
                'activation_function': IDENTITY,
            },
        }

    @property
    def max_lengths(self) -> dict[str, int]:
        return {'inputs': self.max_length, 'targets': self.max_length}

    def param_rows(self) -> Iterator[ParamRow]:
        yield from super().param_rows()
        yield kernel_row('sentence/dense', f'{DENSE}/linear', self.embed_dim, self.sentence_dim)

    @classmethod
    def read_model(cls, model: Any, vocabulary: Any, modules: TracedModules) -> dict[str, Any]:
        projection = modules.find('sentence')
        sizes = {'sentence_dim': projection.outputs, 'max_length': projection.max_length}
        return super().read_model(model, vocabulary, modules) | sizes

    def settings(self) -> dict[str, Any]:
        return {
            **super().settings(),
            'TASK_FEATURE_LENGTHS': self.max_lengths,
            'encoder_only.EncoderOnly.sentence_layer': '@encoder_only.SentenceProjection',
            'encoder_only.SentenceProjection.outputs': self.sentence_dim,
            'encoder_only.SentenceProjection.max_length': self.max_length,
        }

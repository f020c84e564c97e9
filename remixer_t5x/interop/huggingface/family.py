"""A model family of Hugging Face: its sizes in config.json, parameter table, gin settings and tokenizer.

To add a family, subclass `Family` in a file of this folder, list it in `folders.FAMILIES`, and record a tiny model in
`tests/support/hf_folders.py`; tests/interop/test_families.py then tests it.
"""

import abc
import dataclasses
import pathlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from remixer_t5x.errors import UserError
from remixer_t5x.interop import safetensors_files
from remixer_t5x.interop.huggingface import table
from remixer_t5x.interop.huggingface.table import Params, Row, Runs
from remixer_t5x.interop.safetensors_files import Tensors
from remixer_t5x.models.architecture.layer import Block
from remixer_t5x.models.sublayers.attention import non_t5_options

# Reading looks up every layer, so layer counts from an untrusted file need a limit.
MAX_LAYERS = 4096
MAX_NUMBER = 2**31 - 1


class Config:
    """The untrusted content of the config.json in `folder`; each value is validated when it is read."""

    def __init__(self, values: Mapping[str, Any], folder: str):
        self.values, self.file = values, f'{folder}/config.json'

    def error(self, name: str, advice: str) -> UserError:
        """Returns the error for an invalid value of `name`."""
        value = ascii(self.values.get(name))
        return UserError(f'{self.file} says {name} {value if len(value) <= 60 else value[:60] + "..."}; {advice}')

    def number(self, name: str, default: int | None = None) -> int:
        """Reads a positive whole number, or an id. Raises UserError for anything else."""
        value = default if self.values.get(name) is None else self.values[name]
        lowest, limit = int(not name.endswith('token_id')), MAX_LAYERS if 'layer' in name else MAX_NUMBER
        if not isinstance(value, int) or isinstance(value, bool) or not lowest <= value <= limit:
            raise self.error(name, f'it must be a whole number from {lowest} to {limit:,}')
        return value

    def epsilon(self, name: str, default: float | None = None) -> float:
        """Reads a number between 0 and 1. Raises UserError for anything else."""
        value = self.values.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < 1:
            raise self.error(name, 'it must be a number between 0 and 1')
        return float(value)

    def rope_theta(self, parameters: Mapping[str, Any], name: str) -> float | None:
        """Reads the base of rotary wavelengths, from the `parameters` of version 5 or the value `name` of version 4.

        Returns None if neither has it. Raises UserError for another kind of rotary embedding or an invalid base.
        """
        if parameters.get('rope_type', 'default') != 'default':
            raise self.error('rope_parameters', "rope_type must be 'default'")
        theta = parameters.get('rope_theta', self.values.get(name))
        if theta is None:
            return None
        if not isinstance(theta, int | float) or not 1 < theta < 1e9:
            raise self.error('rope_parameters', 'rope_theta must be a number from 1 to 1e9')
        return float(theta)

    def check(self, allowed: Mapping[str, Sequence[Any]]) -> None:
        """Raises UserError for a value that is not in `allowed`; a missing value is the first."""
        for name, values in allowed.items():
            if self.values.get(name, values[0]) not in values:
                raise self.error(name, f'it must be {" or ".join(map(repr, values))}, as in published models')


class Refusal(UserError):
    """Raised if Hugging Face has no equivalent of a model of remixer_t5x; `reason` is the first difference."""

    def __init__(self, reason: str):
        self.reason = reason
        super().__init__(f'{reason}; --to_safetensors=FILE writes the parameters of any model')


class Description:
    """Collects the sizes of one of our models; Hugging Face has one value of each for the whole model."""

    def __init__(self, kind: str):
        self._kind = kind
        self.sizes: dict[str, Any] = {}

    def require(self, holds: bool, difference: str) -> None:
        """Raises Refusal with the `difference` unless `holds`."""
        if not holds:
            raise Refusal(f"Hugging Face's {self._kind} cannot represent this model: {difference}")

    def size(self, name: str, value: Any, where: str) -> None:
        """Sets a size. Raises Refusal if another part of the model has a different value."""
        previous = self.sizes.setdefault(name, value)
        texts = [getattr(number, '__name__', repr(number)) for number in (value, previous)]
        self.require(previous == value, f'{name} is {texts[0]} in {where} and {texts[1]} in an earlier part')

    def part(self, factory: Callable[..., Any] | None, allowed: type, where: str) -> Any:
        """Calls `factory`. Raises Refusal if the result is not an instance of `allowed`."""
        part = factory() if factory is not None else None
        self.require(isinstance(part, allowed), f'{where} is {None if part is None else type(part).__name__}')
        return part

    def norm(self, factory: Callable[..., Any] | None, allowed: type, where: str) -> None:
        """Sets `epsilon` to that of a norm."""
        self.size('epsilon', self.part(factory, allowed, where).epsilon, where)

    def stack(self, side: str, stack: Any, layout: type, norm: type, allowed: Sequence[Any]) -> Iterator[Any]:
        """Sets the sizes of the layers of a stack, and yields their sublayers.

        Args:
            side: 'encoder' or 'decoder', for errors.
            stack: a `Stack`.
            layout: class of every layer.
            norm: class of every norm.
            allowed: class, or tuple of classes, of each sublayer of a layer.
        """
        for factory, _ in stack.runs:
            layer = factory()
            sublayers = [sublayer() for sublayer in layer.sublayers]
            names = ', '.join(type(sublayer).__name__ for sublayer in sublayers)
            fits = len(sublayers) == len(allowed) and all(map(isinstance, sublayers, allowed))
            self.require(fits, f'a layer of the {side} has the sublayers {names}')
            self.require(isinstance(layer, layout), f'the layout of the {side} is {type(layer).__name__}')
            self.require(getattr(layer, 'first_norm', True), f'a layer of the {side} sets first_norm')
            self.norm(layer.norm, norm, f'the norm of the {side}')
            for sublayer in sublayers:
                later = ', '.join(name for name in non_t5_options(sublayer) if name != 'activation')
                self.require(not later, f'{type(sublayer).__name__} of the {side} sets {later}')
                for name in ('num_heads', 'head_dim', 'hidden_dim', 'approximate'):
                    if hasattr(sublayer, name):
                        self.size(name, getattr(sublayer, name), f'{type(sublayer).__name__} of the {side}')
                yield sublayer


def expand_layers(stack: Any) -> tuple[list[Any], list[int | tuple[int, int]]]:
    """Returns the layers of a `Stack` in order, without blocks, and its runs as in `table.Runs`."""
    layers: list[Any] = []
    runs: list[int | tuple[int, int]] = []
    for factory, count in stack.runs:
        layer = factory()
        block = [each() for each in layer.layers] if isinstance(layer, Block) else [layer]
        runs.append((count, len(block)) if isinstance(layer, Block) else count)
        layers += block * count
    return layers, runs


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A vocabulary: its function in `remixer_tasks.vocabularies`, the arguments, and a name for errors."""

    function: str
    arguments: Mapping[str, Any]
    name: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family(abc.ABC):
    """One model of a family.

    Attributes:
        vocab_size: rows of Hugging Face's embedding table.
        embed_dim: width of the residual stream.
        mlp_dim: hidden units of the feed-forward.
        num_heads: attention heads.
        head_dim: width of a head.
        epsilon: epsilon of the norms.
    """

    kind: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]]
    # The class of transformers, and its auto class.
    hf_class: ClassVar[str]
    auto_class: ClassVar[str]
    # The class of our model, and the modules of remixer_t5x.models that `settings` names.
    model_class: ClassVar[type]
    gin_modules: ClassVar[tuple[str, ...]]
    # By key of config.json: the name of our field; the supported values, of which the first is the default and is
    # written; further keys to write.
    sizes: ClassVar[Mapping[str, str]]
    allowed: ClassVar[Mapping[str, Sequence[Any]]]
    constants: ClassVar[Mapping[str, Any]] = {}
    # Further arrays that a file may have: names whose arrays must equal another one, and a pattern of names to ignore.
    copies: ClassVar[Mapping[str, str]] = {}
    ignored: ClassVar[str] = ''

    vocab_size: int
    embed_dim: int
    mlp_dim: int
    num_heads: int
    head_dim: int
    epsilon: float

    @classmethod
    def from_config(cls, config: Config, tensors: Tensors) -> Self:
        """Reads the sizes of the model in a folder. Raises UserError for a feature that remixer_t5x does not have."""
        return cls(**cls.read_sizes(config))

    @classmethod
    def read_sizes(cls, config: Config, **defaults: int) -> dict[str, Any]:
        """Checks `allowed` and reads the sizes by field. `defaults` override the defaults of the fields."""
        config.check(cls.allowed)
        fields = {field.name: field.default for field in dataclasses.fields(cls)}
        defaults = {name: value for name, value in fields.items() if value is not dataclasses.MISSING} | defaults
        sizes: dict[str, Any] = {}
        for name, field in cls.sizes.items():
            sizes[field] = (config.epsilon if field == 'epsilon' else config.number)(name, defaults.get(field))
        if 'head_dim' not in sizes:
            if sizes['embed_dim'] % sizes['num_heads']:
                heads = next(name for name, field in cls.sizes.items() if field == 'num_heads')
                raise config.error(heads, f'it must divide the width {sizes["embed_dim"]}')
            sizes['head_dim'] = sizes['embed_dim'] // sizes['num_heads']
        return sizes

    def to_config(self) -> dict[str, Any]:
        """The content of a config.json, for transformers 4.50 to 5."""
        return {
            'architectures': [self.hf_class],
            'model_type': self.model_types[0],
            **{name: getattr(self, field) for name, field in self.sizes.items()},
            **{name: values[0] for name, values in self.allowed.items()},
            **self.constants,
        }

    @classmethod
    @abc.abstractmethod
    def describe(cls, model: Any, vocabulary: Any) -> tuple[Self, Runs]:
        """Describes one of our models, and the lengths of its runs of layers. Raises Refusal if the family lacks it.

        Calls factories for their attributes, without tracing anything.
        """

    @property
    @abc.abstractmethod
    def layers(self) -> dict[str, int]:
        """Number of layers, by stack."""

    @abc.abstractmethod
    def rows(self) -> Iterator[Row]:
        """The parameter table."""

    @property
    @abc.abstractmethod
    def gin_files(self) -> tuple[str, ...]:
        """The shipped gin files of our model, in their order."""

    @abc.abstractmethod
    def settings(self) -> dict[str, Any]:
        """The gin settings that differ from `gin_files`, besides the common sizes; strings are gin expressions."""

    @abc.abstractmethod
    def tokenizer(self, folder: pathlib.Path, file: str | None) -> Tokenizer:
        """The tokenizer in `folder`, or `file` instead. Raises UserError if there is none that we can read."""

    @abc.abstractmethod
    def write_tokenizer(self, vocabulary: Any, folder: pathlib.Path) -> str:
        """Writes the files of the tokenizer, and returns a description of them."""

    @abc.abstractmethod
    def random_inputs(self, rng: np.random.Generator) -> dict[str, np.ndarray]:
        """Arguments of the model in transformers, [rows, length] int32; 0 in `input_ids` is padding."""

    @abc.abstractmethod
    def our_logits(self, model: Any, params: Params, inputs: Mapping[str, np.ndarray]) -> Any:
        """The logits of our model for `random_inputs`, [rows, length, vocab_size]."""

    @property
    def lengths(self) -> dict[str, int] | None:
        """Maximum lengths of inputs and targets, if the model limits them and `settings` does not set them."""
        return None

    @staticmethod
    def canonical_names(tensors: Tensors) -> dict[str, str]:
        """Maps the names in the table to the names in the file."""
        return {name: name for name in tensors}

    @classmethod
    def read_tensors(cls, folder: pathlib.Path) -> Tensors:
        """The weights in `folder`. A name before a slash is a folder in it."""
        return safetensors_files.read_folder(folder)

    def files(self) -> dict[str, Any]:
        """The content of further JSON files, by path."""
        return {}

    def reference_settings(self) -> dict[str, Any]:
        """Settings of transformers' configuration that override those of the folder."""
        return {}

    def one_run(self) -> Runs:
        """All layers of a stack in one run, as in models/*.gin."""
        return {stack: (count,) for stack, count in self.layers.items()}

    def read(self, tensors: Tensors, folder: str) -> Params:
        """Reads our parameters, float32.

        Raises UserError if a weight is missing, has another shape than in config.json, or would be ignored.
        """
        rows, runs, tensors = list(self.rows()), self.one_run(), tensors.renamed(self.canonical_names(tensors))
        shapes = {name: row.shape for row in rows for _, names in row.places(runs) for name in names}
        if missing := [name for name in shapes if name not in tensors]:
            raise UserError(f'{folder} lacks the weight {_first(missing)}; use a whole {self.hf_class}')
        if differing := [name for name, shape in shapes.items() if tensors.shape(name) != shape]:
            name = differing[0]
            raise UserError(
                f'{name} in {folder} has shape {tensors.shape(name)}, but config.json requires {shapes[name]}; '
                'use the config.json that belongs to the weights'
            )
        extra = [name for name in sorted({*tensors} - {*shapes, *self.copies}) if not re.fullmatch(self.ignored, name)]
        if extra:
            raise UserError(
                f'{folder} has the weight {_first(extra)}, which a {self.hf_class} of its config.json does not have; '
                'use the config.json that belongs to the weights'
            )
        for copy, name in self.copies.items():
            if copy in tensors and copy not in shapes and not np.array_equal(tensors[copy], tensors[name]):
                raise UserError(
                    f'{copy} differs from {name} in {folder}; a {self.hf_class} ties them, so they must be equal'
                )
        return table.read(rows, runs, tensors)

    def write(self, params: Params, runs: Runs) -> dict[str, np.ndarray]:
        """Returns Hugging Face's arrays by name, as views of `params` if possible."""
        return table.write(self.rows(), runs, params)

    def check_vocabulary(self, vocabulary: Any, name: str, folder: str) -> None:
        """Raises UserError if `vocabulary` cannot belong to the model in `folder`."""
        advice = 'pass the vocabulary of this model with --vocabulary'
        rows = self.settings().get('VOCAB_SIZE', self.vocab_size)
        if vocabulary.vocab_size > rows:
            raise UserError(f'{name} has {vocabulary.vocab_size} ids, but the model in {folder} has {rows}; {advice}')
        eos_id = getattr(self, 'eos_id', vocabulary.eos_id)
        if vocabulary.eos_id != eos_id:
            raise UserError(
                f'{folder}/config.json sets eos_token_id to {eos_id}, but {name} uses {vocabulary.eos_id}; {advice}'
            )

    def gin_text(self, origin: str) -> str:
        """The gin statements of MODEL and VOCAB_SIZE; `origin` is a comment on where the weights come from."""
        depth = max(self.layers.values())
        settings = {
            'VOCAB_SIZE': self.vocab_size,
            'EMBED_DIM': self.embed_dim,
            'MLP_DIM': self.mlp_dim,
            'NUM_HEADS': self.num_heads,
            'HEAD_DIM': self.head_dim,
            # models/*.gin set both, even for a model with one stack.
            'NUM_ENCODER_LAYERS': self.layers.get('encoder', depth),
            'NUM_DECODER_LAYERS': self.layers.get('decoder', depth),
            **self.settings(),
        }
        lines = [f'{name} = {value if isinstance(value, str) else repr(value)}' for name, value in settings.items()]
        modules = [name for name in self.gin_modules if f'{name.rpartition(".")[2]}.' in ' '.join(lines)]
        imports = [f'from remixer_t5x.models.{name.replace(".", " import ")}' for name in modules]
        return '\n'.join([
            f'# {" ".join(origin.split())}',
            '# Requires: nothing; give it after the data file, whose VOCABULARY it replaces.',
            '# Provides: MODEL, VOCAB_SIZE, VOCABULARY, and the dimensions.',
            *(f"include '{file}'" for file in self.gin_files),
            "include 'sizes/_common.gin'",
            'from __gin__ import dynamic_registration',
            *imports,
            '',
            *lines,
            '',
        ])  # fmt: skip


def _first(names: Sequence[str]) -> str:
    return names[0] + (f' (and {len(names) - 1} more)' if len(names) > 1 else '')

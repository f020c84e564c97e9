"""Defines SentencePiece vocabularies, which are loaded or trained at first use.

A unigram model is trained once per corpus and settings, and cached. Training is deterministic. Normalization is
SentencePiece's default, as in T5's model.
"""

from __future__ import annotations

import base64
import binascii
import functools
import io
import itertools
import os
import re
import string
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import sentencepiece
from etils import epath
from sentencepiece import sentencepiece_model_pb2

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.base_vocabulary import Vocabulary
from remixer_t5x.errors import UserError, root_cause_message
from remixer_t5x.lazy_imports import tf, tf_text
from remixer_tasks.corpora.text_corpus import Corpus
from remixer_tasks.files import cache
from remixer_tasks.files.cache import ProgressNotice

# Number of characters to train on, which is enough for about 10,000 pieces.
SAMPLE_CHARACTERS = 20_000_000
# Maximum number of characters in a training line; SentencePiece skips lines of more than 4,192 bytes.
LINE_CHARACTERS = 1000
# Fraction of the text's characters that the vocabulary covers; other characters are encoded as the unknown id.
CHARACTER_COVERAGE = 0.9995
# Number of training threads, which is fixed because it affects the sums in the EM steps.
THREADS = 4
# Every trained vocabulary contains these characters, because labels of tasks use them ('not_entailment').
REQUIRED = string.digits + string.ascii_letters + string.punctuation
# Replacement for matches of `sentinel_pattern`. The first space belongs to the sentinel's piece. SentencePiece treats
# the text after the second space as a new word.
SPACED_SENTINEL = r' <extra_id_\1> '
_PROTO: Any = sentencepiece_model_pb2.ModelProto  # type: ignore[attr-defined]  # made at run time
_PIECE = _PROTO.SentencePiece
_SPECIAL = {'<pad>': _PIECE.CONTROL, '</s>': _PIECE.CONTROL, '<s>': _PIECE.CONTROL}
# Preprocessing steps in a tokenizer.json that SentencePiece also performs.
_METASPACE = {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always'}
_NORMALIZERS = (
    {'type': 'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': '▁'},
    {'type': 'Strip', 'strip_left': False, 'strip_right': True},
)


def count_model_sentinels(model: bytes) -> int:
    """Returns the number of sentinels at the end of a SentencePiece model, in T5's order with <extra_id_0> last."""
    pieces = reversed(_PROTO.FromString(model).pieces)
    ordered = (re.fullmatch(f'▁?<extra_id_{index}>', piece.piece) for index, piece in enumerate(pieces))
    return len(list(itertools.takewhile(bool, ordered)))


def _train_model(sample: list[str], pieces: int, at_most: bool) -> bytes:
    writer = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(sample),
            model_writer=writer,
            model_type='unigram',
            vocab_size=pieces,
            character_coverage=CHARACTER_COVERAGE,
            required_chars=REQUIRED,
            pad_id=0,
            eos_id=1,
            unk_id=2,
            bos_id=-1,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        # The message contains the largest number of pieces that the text allows.
        limit = re.search(r'<= ?(\d+)', str(error))
        if at_most and limit:
            return _train_model(sample, int(limit[1]), at_most=False)
        reason = root_cause_message(error).rpartition('] ')[2]
        raise UserError(
            f'SentencePiece cannot train {pieces} pieces besides sentinels ({reason}); set another '
            'VOCAB_SIZE (pieces and sentinels), use more text, or use VOCABULARY = @vocabularies.byte()'
        ) from error
    return writer.getvalue()


def _sample_lines(documents: Iterator[str]) -> Iterator[str]:
    """Yields the lines of the first documents, cut to lengths that SentencePiece accepts."""
    characters = 0
    for document in documents:
        for line in document.splitlines():
            for start in range(0, len(line), LINE_CHARACTERS):
                yield line[start : start + LINE_CHARACTERS]
        characters += len(document)
        if characters > SAMPLE_CHARACTERS:
            return


class SentencePiece(Vocabulary):
    """Vocabulary of a SentencePiece model, loaded at first use, followed by `extra_ids` sentinels, <extra_id_0> last.

    The string <extra_id_N> always encodes to a sentinel; the text before and after it is encoded separately.
    """

    def __init__(self, sentencepiece_model_file: str, extra_ids: int = 0):
        super().__init__(extra_ids)
        self.sentencepiece_model_file = sentencepiece_model_file

    def _loaded_model(self) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
        return _load_model(self.sentencepiece_model_file, self.extra_ids)

    @property
    def tokenizer(self) -> sentencepiece.SentencePieceProcessor:
        """The SentencePiece processor, with the sentinels as pieces."""
        return self._loaded_model()[0]

    @property
    def sp_model(self) -> bytes:
        """The serialized model, with the sentinels as pieces."""
        return self._loaded_model()[1]

    @property
    def sentinels(self) -> int:
        """The number of sentinels: `extra_ids`, or the number of sentinels among the pieces of the model, as in mT5."""
        return self.extra_ids or count_model_sentinels(self.sp_model)

    @property
    def bos_id(self) -> int | None:
        return self.tokenizer.bos_id()

    @property
    def eos_id(self) -> int:
        return self.tokenizer.eos_id()

    @property
    def unk_id(self) -> int:
        return self.tokenizer.unk_id()

    @property
    def vocab_size(self) -> int:
        return self.tokenizer.GetPieceSize()

    def encode(self, text: str) -> list[int]:
        pattern = self.sentinel_pattern
        return self.tokenizer.EncodeAsIds(re.sub(pattern, SPACED_SENTINEL, text) if pattern else text)

    def _decode(self, ids: Sequence[int]) -> str:
        return self.tokenizer.DecodeIds(list(ids))

    @property
    def tf_tokenizer(self) -> Any:
        """The TensorFlow Text tokenizer, which can be used in a tf.data graph."""
        return tf_text.SentencepieceTokenizer(model=self.sp_model)

    def encode_tf(self, text: tf.Tensor) -> tf.Tensor:
        pattern = self.sentinel_pattern
        return self.tf_tokenizer.tokenize(tf.strings.regex_replace(text, pattern, SPACED_SENTINEL) if pattern else text)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, SentencePiece):
            return False
        return self.sentencepiece_model_file == other.sentencepiece_model_file and self.extra_ids == other.extra_ids

    def __hash__(self) -> int:
        return hash((self.sentencepiece_model_file, self.extra_ids))


class TrainedSentencePiece(SentencePiece):
    """A vocabulary of `pieces` ids and the sentinels, whose model is trained on a corpus at first use, and cached.

    The first use raises UserError if the text is too small for `pieces` ids, unless `at_most` allows fewer ids.
    """

    def __init__(self, corpus: Corpus, pieces: int, at_most: bool, extra_ids: int):
        self._corpus, self._pieces, self._at_most = corpus, pieces, at_most
        values = (pieces, CHARACTER_COVERAGE, *([True] if at_most else []))
        name = cache.hash_cache_key('vocabulary 2', corpus.training_data_key, values, SAMPLE_CHARACTERS)
        super().__init__(str(cache.get_cache_root() / 'vocabularies' / f'{name}.model'), extra_ids)

    def _loaded_model(self) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
        if not os.path.exists(self.sentencepiece_model_file):
            # seqio needs the model while tracing a graph, but reading the documents requires eager execution.
            with tf.init_scope():
                sample = list(_sample_lines(self._corpus.read_training_documents()))
            size = f'{sum(map(len, sample)) / 1e6:.1f} M characters of {self._corpus.name}'
            notice = ProgressNotice(f'training a vocabulary of {self._pieces} pieces on {size}')
            with cache.create_cache_entry(Path(self.sentencepiece_model_file)) as temporary:
                temporary.write_bytes(_train_model(sample, self._pieces, self._at_most))
            notice.print_result(f'saved to {self.sentencepiece_model_file}')
        return super()._loaded_model()


@functools.lru_cache(maxsize=16)
def _load_model(path: str, extra_ids: int) -> tuple[sentencepiece.SentencePieceProcessor, bytes]:
    """Returns the processor and the serialized model at `path`, both with `extra_ids` sentinels added as pieces.

    Raises UserError for an invalid model, or for a model with sentinels if `extra_ids` is not 0.
    """
    try:
        model = epath.Path(path).read_bytes()
        proto = _PROTO.FromString(model)
        if not proto.pieces:
            raise ValueError('it has no pieces')
        processor = sentencepiece.SentencePieceProcessor(model_proto=model)
    except Exception as error:
        # Possible errors include those of files and buckets, protobuf's DecodeError and RuntimeError.
        raise UserError(
            f'vocabulary {path} cannot be read as a SentencePiece model ({root_cause_message(error)}); use a local '
            'file: --gin.vocabularies.sentencepiece.path=/path/to/sentencepiece.model'
        ) from error
    if not processor.IsControl(0) or processor.eos_id() <= 0:
        raise UserError(
            f'vocabulary {path}: id 0 must be padding and eos_id above 0, got {processor.IdToPiece(0)!a:.40} and '
            f'{processor.eos_id()}; train the model with --pad_id=0 --eos_id=1 --unk_id=2'
        )
    if extra_ids and (count := count_model_sentinels(model)):
        raise UserError(
            f'vocabulary {path}: extra_ids must be 0, got {extra_ids}: the model already has {count} sentinels; '
            'set extra_ids to 0'
        )
    for index in reversed(range(extra_ids)):
        proto.pieces.add(piece=f'▁<extra_id_{index}>', score=0.0, type=_PIECE.USER_DEFINED)
    content = proto.SerializeToString()
    return sentencepiece.SentencePieceProcessor(model_proto=content), content


def convert_unigram_tokenizer(path: str) -> Path:
    """Converts the tokenizer.json of a T5 model to a SentencePiece model; returns its path in the cache."""
    model = build_unigram_model(untrusted_files.read_json_object(Path(path)), path)
    file = cache.get_cache_root() / 'vocabularies' / f'{cache.hash_cache_key("tokenizer.json", model.hex())}.model'
    if not file.exists():
        with cache.create_cache_entry(file) as temporary:
            temporary.write_bytes(model)
    return file


def build_unigram_model(tokenizer: dict[str, Any], where: str) -> bytes:
    """Converts `tokenizer`, the content of the file `where`, to a SentencePiece model without sentinels.

    Raises UserError if the tokenizer is not a Unigram model like T5's.
    """
    settings = {'type': 'Unigram', 'byte_fallback': (None, False, True)}
    tokenizer_files.check_tokenizer_settings(tokenizer.get('model'), settings, f'{where}, model')
    rows, unk_id = tokenizer['model'].get('vocab'), tokenizer['model'].get('unk_id')
    is_pieces = isinstance(rows, list) and all(
        isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], int | float)
        for row in rows
    )
    if not is_pieces or not isinstance(unk_id, int):
        raise UserError(f'{where} must contain pieces with scores, and an unk_id; download the file again')
    steps = _list_component_steps(tokenizer.get('pre_tokenizer'), 'pretokenizers')
    steps = steps[1:] if steps[:1] == [{'type': 'WhitespaceSplit'}] else steps
    tokenizer_files.check_tokenizer_settings(steps[0] if steps else None, _METASPACE, f'{where}, pre_tokenizer')
    if len(steps) > 1:
        raise UserError(f'{where} has the pre_tokenizer {steps[1]!r:.80}, which SentencePiece does not support')
    proto = _PROTO()
    for index, (text, score) in enumerate(rows):
        if re.fullmatch(r'<extra_id_\d+>', text):
            continue
        kind = _PIECE.UNKNOWN if index == unk_id else _SPECIAL.get(text, _PIECE.NORMAL)
        if tokenizer['model'].get('byte_fallback') and re.fullmatch('<0x[0-9A-F]{2}>', text):
            kind = _PIECE.BYTE
        # These pieces are mT5's sentinels.
        kind = _PIECE.USER_DEFINED if re.fullmatch(r'▁<extra_id_\d+>', text) else kind
        proto.pieces.add(piece=text, score=score, type=kind)
    names = [piece.piece for piece in proto.pieces]
    proto.trainer_spec.vocab_size = len(names)
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = unk_id, -1
    proto.trainer_spec.pad_id = names.index('<pad>') if '<pad>' in names else -1
    proto.trainer_spec.eos_id = names.index('</s>') if '</s>' in names else -1
    proto.trainer_spec.byte_fallback = bool(tokenizer['model'].get('byte_fallback'))
    proto.normalizer_spec.precompiled_charsmap = _read_charsmap(tokenizer.get('normalizer'), where)
    return proto.SerializeToString(deterministic=True)


def _list_component_steps(component: Any, name: str) -> list[Any]:
    """Lists the steps of a normalizer or pre-tokenizer; a Sequence stores its list of steps under the key `name`."""
    if not isinstance(component, dict):
        return []
    return component.get(name) or [] if component.get('type') == 'Sequence' else [component]


def _read_charsmap(normalizer: Any, where: str) -> bytes:
    charsmap = b''
    for step in _list_component_steps(normalizer, 'normalizers'):
        if isinstance(step, dict) and step.get('type') == 'Precompiled':
            try:
                charsmap = base64.b64decode(step.get('precompiled_charsmap') or '', validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise UserError(f'{where} has a precompiled_charsmap that is not base64; download it again') from error
        elif step not in _NORMALIZERS:
            raise UserError(f'{where} has the normalizer {step!r:.80}, which SentencePiece does not support')
    return charsmap

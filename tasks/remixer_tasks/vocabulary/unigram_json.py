"""The tokenizer.json that transformers 5 writes for a T5, as the SentencePiece model it was made from."""

import base64
import binascii
import pathlib
import re
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.files import cache

_PIECE: Any = sentencepiece_model_pb2.ModelProto.SentencePiece  # type: ignore[attr-defined]  # made at run time
_SPECIAL = {'<pad>': _PIECE.CONTROL, '</s>': _PIECE.CONTROL, '<s>': _PIECE.CONTROL}
_METASPACE = {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always'}
_COLLAPSED = {'type': 'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': '▁'}
_STRIPPED = {'type': 'Strip', 'strip_left': False, 'strip_right': True}


def cached(path: str) -> pathlib.Path:
    """The SentencePiece model of the tokenizer.json at `path`, as a file in the cache."""
    model = to_model(untrusted_files.read_object(pathlib.Path(path)), path)
    file = cache.root() / 'vocabularies' / f'{cache.key("tokenizer.json", model.hex())}.model'
    if not file.exists():
        with cache.adding(file) as temporary:
            temporary.write_bytes(model)
    return file


def to_model(tokenizer: dict[str, Any], where: str) -> bytes:
    """A SentencePiece model that gives the ids of `tokenizer`, the content of the file `where`, without its sentinels.

    Raises UserError if it is not a T5's Unigram model, or has a step that SentencePiece does not have.
    """
    settings = {'type': 'Unigram', 'byte_fallback': (None, False, True)}
    tokenizer_files.check_settings(tokenizer.get('model'), settings, f'{where}, model')
    rows, unk_id = tokenizer['model'].get('vocab'), tokenizer['model'].get('unk_id')
    if not isinstance(rows, list) or not all(_is_row(row) for row in rows) or not isinstance(unk_id, int):
        raise UserError(f'{where} has no pieces with scores and an unk_id; download it again')
    _check_words(tokenizer.get('pre_tokenizer'), where)
    proto: Any = sentencepiece_model_pb2.ModelProto()  # type: ignore[attr-defined]
    for index, (text, score) in enumerate(rows):
        if re.fullmatch(r'<extra_id_\d+>', text):
            continue
        kind = _PIECE.UNKNOWN if index == unk_id else _SPECIAL.get(text, _PIECE.NORMAL)
        if tokenizer['model'].get('byte_fallback') and re.fullmatch('<0x[0-9A-F]{2}>', text):
            kind = _PIECE.BYTE
        # mT5's sentinels.
        kind = _PIECE.USER_DEFINED if re.fullmatch(r'▁<extra_id_\d+>', text) else kind
        proto.pieces.add(piece=text, score=score, type=kind)
    names = [piece.piece for piece in proto.pieces]
    proto.trainer_spec.vocab_size = len(names)
    proto.trainer_spec.unk_id, proto.trainer_spec.bos_id = unk_id, -1
    proto.trainer_spec.pad_id = names.index('<pad>') if '<pad>' in names else -1
    proto.trainer_spec.eos_id = names.index('</s>') if '</s>' in names else -1
    proto.trainer_spec.byte_fallback = bool(tokenizer['model'].get('byte_fallback'))
    proto.normalizer_spec.precompiled_charsmap = _charsmap(tokenizer.get('normalizer'), where)
    return proto.SerializeToString(deterministic=True)


def _is_row(row: Any) -> bool:
    return isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) and isinstance(row[1], int | float)


def _steps(component: Any, name: str) -> list[Any]:
    """The steps of a normalizer or pre-tokenizer, whose list in a sequence is called `name`."""
    if not isinstance(component, dict):
        return []
    return component.get(name) or [] if component.get('type') == 'Sequence' else [component]


def _check_words(pre_tokenizer: Any, where: str) -> None:
    steps = _steps(pre_tokenizer, 'pretokenizers')
    if steps and steps[0] == {'type': 'WhitespaceSplit'}:
        steps = steps[1:]
    for step in steps[:1] or [None]:
        tokenizer_files.check_settings(step, _METASPACE, f'{where}, pre_tokenizer')
    if len(steps) > 1:
        raise UserError(f'{where} has the pre_tokenizer {steps[1]!r:.80}, which SentencePiece does not have')


def _charsmap(normalizer: Any, where: str) -> bytes:
    charsmap = b''
    for step in _steps(normalizer, 'normalizers'):
        if isinstance(step, dict) and step.get('type') == 'Precompiled':
            try:
                charsmap = base64.b64decode(step.get('precompiled_charsmap') or '', validate=True)
            except (binascii.Error, TypeError, ValueError) as error:
                raise UserError(f'{where} has a precompiled_charsmap that is not base64; download it again') from error
        elif step not in (_COLLAPSED, _STRIPPED):
            raise UserError(f'{where} has the normalizer {step!r:.80}, which SentencePiece does not have')
    return charsmap

"""Reads Hugging Face's `tokenizer.json`: BERT's WordPiece and T5's Unigram.

The file is not given to the library `tokenizers`, which a malicious file can make abort, panic or hang: it interprets
any normalizer, pattern or padding, without limits. The WordPiece tokenizer is built from BERT's own components with
the vocabulary, the added tokens and the flags of the file; padding, truncation and the post-processor are not used.
The Unigram tokenizer becomes the SentencePiece model that it was made from.
"""

import base64
import binascii
import pathlib
import re
from typing import Any

from sentencepiece import sentencepiece_model_pb2

from remixer_t5x import tokenizer_files, untrusted_files
from remixer_t5x.errors import UserError
from remixer_tasks.files import cache

_COMPONENTS = {'normalizer': 'BertNormalizer', 'pre_tokenizer': 'BertPreTokenizer', 'model': 'WordPiece'}
_FLAGS = {'clean_text': True, 'handle_chinese_chars': True, 'strip_accents': None, 'lowercase': True}
_TOKEN_FLAGS = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': True, 'special': False}
# The time to encode a word grows with the square of its length. Published BERTs have 100.
MAX_WORD = 1000
_MAX_PIECE = 1000
_PIECE: Any = sentencepiece_model_pb2.ModelProto.SentencePiece  # type: ignore[attr-defined]  # made at run time
_SPECIAL = {'<pad>': _PIECE.CONTROL, '</s>': _PIECE.CONTROL, '<s>': _PIECE.CONTROL}
_METASPACE = {'type': 'Metaspace', 'replacement': '▁', 'prepend_scheme': 'always'}
_COLLAPSED = {'type': 'Replace', 'pattern': {'Regex': ' {2,}'}, 'content': '▁'}
_STRIPPED = {'type': 'Strip', 'strip_left': False, 'strip_right': True}


def wordpiece(path: str) -> Any:
    """The `tokenizers.Tokenizer` of a BERT's `tokenizer.json`.

    Raises UserError if the file is not one, or has a component or a setting that BERT does not have.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

    content = untrusted_files.read_object(path)
    parts: dict[str, dict[str, Any]] = {}
    for name, allowed in _COMPONENTS.items():
        part = content.get(name)
        parts[name] = part if isinstance(part, dict) else {}
        # Older files do not name the type of the model.
        if parts[name].get('type', allowed if name == 'model' else None) != allowed:
            kind = str(parts[name].get('type'))
            raise UserError(f'{path}: the {name} must be {allowed}, got {kind!r:.60}; give the tokenizer of a BERT')
    model = parts['model']
    flags: dict[str, Any] = {name: _value(parts['normalizer'], name, default, path) for name, default in _FLAGS.items()}
    longest, prefix = model.get('max_input_chars_per_word', 100), model.get('continuing_subword_prefix', '##')
    if type(longest) is not int or not 0 < longest <= MAX_WORD:
        raise UserError(f'{path}: max_input_chars_per_word must be 1 to {MAX_WORD}, got {longest!r:.60}; correct it')
    unknown, vocab, added = model.get('unk_token'), model.get('vocab'), content.get('added_tokens') or []
    if (
        not isinstance(vocab, dict)
        or not isinstance(added, list)
        or not all(isinstance(token, dict) for token in added)
    ):
        raise UserError(f'{path}: vocab must be an object and added_tokens a list of objects; download it again')
    pieces = [*vocab.items(), *((token.get('content'), token.get('id')) for token in added)]
    for piece, index in [*pieces, (unknown, 0), (prefix, 0)]:
        if not isinstance(piece, str) or not 0 < len(piece) <= _MAX_PIECE or type(index) is not int:
            raise UserError(
                f'{path}: {piece!r:.60} with id {index!r:.60} is no piece of a vocabulary; download it again'
            )
    if {index for _, index in pieces} != {*range(len({*pieces}))} or unknown not in vocab:
        raise UserError(f'{path}: ids must be 0, 1, 2 ... without a gap, and one of {unknown!r:.60}; download it again')
    tokenizer = Tokenizer(
        models.WordPiece(vocab, unk_token=unknown, max_input_chars_per_word=longest, continuing_subword_prefix=prefix)
    )
    tokenizer.normalizer = normalizers.BertNormalizer(**flags)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    decoder = content.get('decoder')
    cleanup = not isinstance(decoder, dict) or decoder.get('cleanup') is not False
    tokenizer.decoder = decoders.WordPiece(prefix, cleanup)
    for token in sorted(added, key=lambda token: token['id']):
        values: dict[str, Any] = {name: _value(token, name, default, path) for name, default in _TOKEN_FLAGS.items()}
        tokenizer.add_tokens([AddedToken(token['content'], **values)])
    return tokenizer


def _value(settings: dict[str, Any], name: str, default: bool | None, path: str) -> bool | None:
    value = settings.get(name, default)
    if not isinstance(value, bool) and value is not default:
        raise UserError(f'{path}: {name} must be true or false, got {value!r:.60}; download it again')
    return value


def cached_unigram(path: str) -> pathlib.Path:
    """The SentencePiece model of the tokenizer.json at `path`, as a file in the cache."""
    model = unigram_model(untrusted_files.read_object(pathlib.Path(path)), path)
    file = cache.root() / 'vocabularies' / f'{cache.key("tokenizer.json", model.hex())}.model'
    if not file.exists():
        with cache.adding(file) as temporary:
            temporary.write_bytes(model)
    return file


def unigram_model(tokenizer: dict[str, Any], where: str) -> bytes:
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

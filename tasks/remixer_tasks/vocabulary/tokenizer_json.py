"""Reads the WordPiece tokenizer of a `tokenizer.json` without giving the file to the library `tokenizers`.

A stranger's file can make that library abort, panic or hang: it interprets any normalizer, pattern or padding, without
limits. Here the vocabulary, the added tokens and the flags of BERT are taken from the file, and the tokenizer is built
from BERT's own components. Padding, truncation and the post-processor are not used, and so not read.
"""

from typing import Any

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError

_COMPONENTS = {'normalizer': 'BertNormalizer', 'pre_tokenizer': 'BertPreTokenizer', 'model': 'WordPiece'}
_FLAGS = {'clean_text': True, 'handle_chinese_chars': True, 'strip_accents': None, 'lowercase': True}
_TOKEN_FLAGS = {'single_word': False, 'lstrip': False, 'rstrip': False, 'normalized': True, 'special': False}
# The time to encode a word grows with the square of its length. Published BERTs have 100.
MAX_WORD = 1000
_MAX_PIECE = 1000


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
    if not isinstance(vocab, dict) or not isinstance(added, list) or not all(isinstance(one, dict) for one in added):
        raise UserError(f'{path}: vocab must be an object and added_tokens a list of objects; download it again')
    pieces = [*vocab.items(), *((one.get('content'), one.get('id')) for one in added)]
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
    for one in sorted(added, key=lambda token: token['id']):
        token: dict[str, Any] = {name: _value(one, name, default, path) for name, default in _TOKEN_FLAGS.items()}
        tokenizer.add_tokens([AddedToken(one['content'], **token)])
    return tokenizer


def _value(settings: dict[str, Any], name: str, default: bool | None, path: str) -> bool | None:
    value = settings.get(name, default)
    if not isinstance(value, bool) and value is not default:
        raise UserError(f'{path}: {name} must be true or false, got {value!r:.60}; download it again')
    return value

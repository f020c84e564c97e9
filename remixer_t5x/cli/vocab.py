"""`remixer-t5x vocab`: size, special ids, and the pieces of a text."""

import sys

import seqio


def run(vocabulary: seqio.Vocabulary, text: str | None = None) -> None:
    """Prints what there is to know about `vocabulary`, and the ids and pieces of `text` when there is one.

    Raises UserError, from the vocabulary, when its model cannot be read or trained.
    """
    size, sentinels = vocabulary.vocab_size, vocabulary.extra_ids
    lines = [
        f'ids          {size} (VOCAB_SIZE must be at least this)',
        f'padding {vocabulary.pad_id}, EOS {vocabulary.eos_id}, unknown {vocabulary.unk_id}',
        f'sentinels    {sentinels}'
        + (
            f': <extra_id_0> is {size - 1}, <extra_id_{sentinels - 1}> is {size - sentinels}'
            if sentinels
            else ', span corruption needs some'
        ),
    ]
    model = getattr(vocabulary, 'sentencepiece_model_file', None)
    if model:
        lines.append(f'model        {model}')
    if text:
        ids = [int(token) for token in vocabulary.encode(text)]
        lines += [f'text         {text}', f'{len(ids)} tokens']
        lines += [f'  {token:>6}  {piece(vocabulary, token)}' for token in ids]
    sys.stdout.write('\n'.join(lines) + '\n')


def piece(vocabulary: seqio.Vocabulary, token: int) -> str:
    """The piece of one id: as the model has it, with its word-start mark, or what the id decodes to."""
    tokenizer = getattr(vocabulary, 'tokenizer', None)
    if tokenizer is not None and token < tokenizer.GetPieceSize():
        return tokenizer.IdToPiece(token)
    return repr(vocabulary.decode([token]))

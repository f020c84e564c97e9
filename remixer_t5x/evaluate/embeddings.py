"""Writes the embeddings of texts to an `.npz` file: one vector per text and, optionally, one vector per token.

The file contains `sentences` [texts, embed] float32 and, if token vectors are requested, `tokens` [all tokens, embed],
`ids` [all tokens] and `offsets` [texts + 1]: the tokens of text i are `tokens[offsets[i]:offsets[i + 1]]`.

By default, the vector of a text is the embedding computed by a text embedding model, or the output of the model's
sentence projection. For other models, it is the mean of the token vectors, including the end token. The mean and the
vector of the first token can be selected for all models.
"""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from remixer_t5x import temporary_files
from remixer_t5x.data import batch_formats, token_alignment
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import predictions
from remixer_t5x.evaluate.text_inference import TextCodec
from remixer_t5x.run_folder import model_dir, object_store


def check_output_path(path: str) -> None:
    """Raises UserError unless `path` ends with .npz and does not exist yet."""
    if not path.endswith('.npz'):
        raise UserError(f'with --embed, --output must end with .npz, got {path!r}; pass --output=embeddings.npz')
    if model_dir.to_absolute_path(path).exists():
        raise UserError(f'{path} already exists; use another --output, or remove it')


def compute_mean_vector(tokens: np.ndarray) -> np.ndarray:
    """Averages token vectors [tokens, embed] to an [embed] float32 vector. Returns zeros for a text without tokens."""
    return tokens.sum(axis=0, dtype=np.float32) / np.float32(max(1, len(tokens)))


def compute_sentence_vectors(
    model: Any,
    predictor: predictions.Predictor,
    params: Any,
    ids: Sequence[Sequence[int]],
    mean: np.ndarray | None = None,
) -> np.ndarray:
    """Returns the embeddings of texts as a [texts, outputs] float32 array.

    `ids` contains the token ids of each text. `mean` [texts, embed] contains the mean of each text's token vectors;
    None computes the means when they are needed.
    """
    if model.model_type == batch_formats.EMBEDDING:
        return predictor.embed(params, ids)
    if mean is None:
        mean = np.stack([*map(compute_mean_vector, predictor.encode(params, ids))])
    project = getattr(model, 'project_sentence', None)
    return mean if project is None else np.asarray(project(params, mean), np.float32)


def embed_texts(
    texts: Iterator[str],
    codec: TextCodec,
    model: Any,
    predictor: predictions.Predictor,
    params: Any,
    window: int,
    with_tokens: bool = False,
    pooling: str | None = None,
) -> Iterator[dict[str, Any]]:
    """Yields a record for each text. The model runs on up to `window` texts at a time.

    A record contains `truncated`, the vector of the text, `sentence` [outputs] float32, and, if `with_tokens` is true,
    the token `ids` and their vectors, `tokens` [tokens, embed] float32.

    `pooling` is 'mean' (the mean of the token vectors), 'first' (the vector of the first token), or None (the
    embedding). Text embedding models compute token vectors only if they are needed, in a second forward pass. Raises
    UserError for a pair of texts, which training of a text embedding model separates.
    """
    index = 0
    has_embeddings = model.model_type == batch_formats.EMBEDDING
    while chunk := list(itertools.islice(texts, window)):
        for number, text in enumerate(chunk if has_embeddings else (), index):
            if token_alignment.PAIR_SEPARATOR in text:
                raise UserError(
                    f'the input with index {number} must be one text, got two texts separated by a tab: {text!r:.60}; '
                    "pass --gin.INPUT_TEMPLATE='{COLUMN}' to embed a single column"
                )
        encoded = [codec.encode(text, number) for number, text in enumerate(chunk, index)]
        ids = [row for row, _ in encoded]
        vectors: Any = None
        if with_tokens or pooling is not None or not has_embeddings:
            states = predictor.encode(params, ids)
            pooled = [tokens[:1] for tokens in states] if pooling == 'first' else states
            vectors = np.stack([*map(compute_mean_vector, pooled)])
        if pooling is None:
            vectors = compute_sentence_vectors(model, predictor, params, ids, vectors)
        for row, (_, truncated) in enumerate(encoded):
            record = {'truncated': truncated, 'sentence': vectors[row]}
            yield record | ({'ids': ids[row], 'tokens': states[row]} if with_tokens else {})
        index += len(chunk)


def write_embeddings(path: str, records: list[dict[str, Any]]) -> None:
    """Writes the records of all texts to a file atomically."""
    if not records:
        raise UserError('there is no text to embed; pass --input=FILE')
    arrays = {'sentences': np.stack([record['sentence'] for record in records])}
    if 'tokens' in records[0]:
        arrays['tokens'] = np.concatenate([record['tokens'] for record in records])
        arrays['ids'] = np.concatenate([np.asarray(record['ids'], np.int32) for record in records])
        arrays['offsets'] = np.cumsum([0, *(len(record['ids']) for record in records)])
    target = model_dir.to_absolute_path(path)
    unfinished = target.parent / f'.{target.name}.unfinished'
    with object_store.wrap_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open('wb') as file:
            np.savez(file, **arrays)
        temporary_files.sync_and_rename(unfinished, target)

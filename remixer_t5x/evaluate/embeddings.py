"""Writes the embeddings of texts to a file: one vector per text and, optionally, one vector per token.

| file | contents |
|---|---|
| `.npz` | `sentences` [texts, embed] float32; if token vectors are requested, also `tokens` [all tokens, embed], `ids` [all tokens] and `offsets` [texts + 1]: the tokens of text i are `tokens[offsets[i]:offsets[i + 1]]` |
| `.parquet` | a row for each text: `index`, `input`, `sentence`, `truncated`; if token vectors are requested, also `ids` and `tokens` |

By default, the vector of a text is the embedding computed by a text embedding model, or the output of the model's
sentence projection. For other models, it is the mean of the token vectors, including the end token. The mean and the
vector of the first token can be selected for all models.
"""  # noqa: E501 (a table)

import itertools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from remixer_t5x import temporary_files
from remixer_t5x.data import batch_formats, token_alignment
from remixer_t5x.errors import UserError
from remixer_t5x.evaluate import predictions
from remixer_t5x.evaluate.text_inference import TextCodec
from remixer_t5x.run_folder import model_dir, object_store

NPZ, PARQUET = '.npz', '.parquet'


def check_output_path(path: str) -> None:
    """Raises UserError unless `path` ends with .npz or .parquet and does not exist yet."""
    if pathlib.PurePath(path).suffix not in (NPZ, PARQUET):
        raise UserError(
            f'with --embed, --output must end with .npz or .parquet, got {path!r}; pass --output=embeddings.npz'
        )
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

    A record contains `index`, `input`, `truncated`, the vector of the text, `sentence` [outputs] float32, and, if
    `with_tokens` is true, the token `ids` and their vectors, `tokens` [tokens, embed] float32.

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
        for row, (text, (_, truncated)) in enumerate(zip(chunk, encoded, strict=True)):
            record = {'index': index + row, 'input': text, 'truncated': truncated, 'sentence': vectors[row]}
            yield record | ({'ids': ids[row], 'tokens': states[row]} if with_tokens else {})
        index += len(chunk)


def write_embeddings(path: str, records: list[dict[str, Any]]) -> None:
    """Writes the records of all texts to a file atomically."""
    if not records:
        raise UserError('there is no text to embed; pass --input=FILE')
    target = model_dir.to_absolute_path(path)
    unfinished = target.parent / f'.{target.name}.unfinished'
    with object_store.wrap_write_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        with unfinished.open('wb') as file:
            (_write_npz if target.suffix == NPZ else _write_parquet)(file, records)
        temporary_files.sync_and_rename(unfinished, target)


def _write_npz(file: Any, rows: list[dict[str, Any]]) -> None:
    arrays = {'sentences': np.stack([row['sentence'] for row in rows])}
    if 'tokens' in rows[0]:
        arrays['tokens'] = np.concatenate([row['tokens'] for row in rows])
        arrays['ids'] = np.concatenate([np.asarray(row['ids'], np.int32) for row in rows])
        arrays['offsets'] = np.cumsum([0, *(len(row['ids']) for row in rows)])
    np.savez(file, **arrays)


def _write_parquet(file: Any, rows: list[dict[str, Any]]) -> None:
    import pyarrow
    import pyarrow.parquet

    columns = {name: [row[name] for row in rows] for name in rows[0]}
    vector = pyarrow.list_(pyarrow.float32())
    types = {'sentence': vector, 'tokens': pyarrow.list_(vector), 'ids': pyarrow.list_(pyarrow.int32())}
    if 'tokens' in columns:
        columns['tokens'] = [list(tokens) for tokens in columns['tokens']]
    arrays = {name: pyarrow.array(values, types.get(name)) for name, values in columns.items()}
    pyarrow.parquet.write_table(pyarrow.table(arrays), file)

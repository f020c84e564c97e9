"""Writes the parameters of any of our models as one safetensors file, and reads them back.

The name of an array is its path in our tree, `encoder/run_0/layer/...`, with layers stacked. The metadata has `format`,
`step`, `config` (the gin text of the run), `vocabulary` (as in a checkpoint) and `versions` (JSON).
"""

import json
import pathlib
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from flax import traverse_util

from remixer_t5x import untrusted_files
from remixer_t5x.errors import UserError, one_line
from remixer_t5x.interop.safetensors import files as safetensors_files

Params = Any
FORMAT = 'remixer_t5x'


def write(path: str, params: Params, step: int, record: Mapping[str, Any], dtype: str = 'float32') -> pathlib.Path:
    """Writes `params` to the file `path`, which must not exist, and returns it.

    Args:
        path: the file.
        params: our parameters.
        step: step of the checkpoint.
        record: record of the checkpoint.
        dtype: dtype of the arrays in the file.
    """
    file = pathlib.Path(path).expanduser()
    if file.exists():
        raise UserError(f'{file} exists already; give another file, as in --to_safetensors={_free(file)}')
    arrays = traverse_util.flatten_dict(params, sep='/')
    cast = {name: np.asarray(array).astype(np.dtype(dtype), copy=False) for name, array in arrays.items()}
    metadata = {
        'format': FORMAT,
        'step': str(step),
        'config': str(record.get('config') or ''),
        'vocabulary': str(record.get('vocabulary') or ''),
        'versions': json.dumps(record.get('versions', {})),
    }
    safetensors_files.write_file(file, cast, metadata)
    return file


def read(path: str) -> tuple[Params, int, dict[str, Any]]:
    """Reads the parameters (numpy float32), the step and the record in the file `path`, which `write` wrote."""
    tensors, metadata = safetensors_files.read_file(path)
    if metadata.get('format') != FORMAT:
        raise UserError(
            f'{path} was not written by --to_safetensors (its metadata has format {metadata.get("format")!a:.60}); a '
            'Hugging Face folder is read by --from_hf'
        )
    nested = next((name for name in tensors if _parents(name) & tensors.keys()), None)
    if nested is not None:
        raise UserError(f'{path} has {ascii(nested)[:80]} and another array by the name of its folder; copy it again')
    try:
        if not re.fullmatch('[0-9]{1,18}', metadata['step']):
            raise ValueError(f'step {metadata["step"]!a:.60}')
        step, versions = int(metadata['step']), untrusted_files.parse(metadata['versions'])
    except (KeyError, ValueError) as error:
        reason = one_line(f'{type(error).__name__}: {error}')
        raise UserError(
            f'{path} says that --to_safetensors wrote it, but its metadata is damaged ({reason}); copy it again'
        ) from error
    record = {name: metadata.get(name, '') for name in ('config', 'vocabulary')}
    params = traverse_util.unflatten_dict(dict(tensors), sep='/')
    return params, step, {**record, 'versions': versions}


def _parents(name: str) -> set[str]:
    parts = name.split('/')
    return {'/'.join(parts[:count]) for count in range(1, len(parts))}


def rounded(params: Params, dtype: str) -> Params:
    """The float32 `params` rounded to `dtype`."""
    return jax.tree.map(lambda array: np.asarray(array).astype(np.dtype(dtype)).astype(np.float32), params)


def first_difference(before: Params, after: Params) -> str | None:
    """The path of an array that differs in a bit, or is in only one tree; None if there is none."""
    left, right = (traverse_util.flatten_dict(tree, sep='/') for tree in (before, after))
    for name in sorted({*left, *right}):
        pair = [np.asarray(tree[name]) for tree in (left, right) if name in tree]
        if len(pair) < 2 or pair[0].shape != pair[1].shape or pair[0].dtype != pair[1].dtype:
            return name
        # An array without dimensions has no other view.
        first, second = np.ravel(pair[0]), np.ravel(pair[1])
        if not np.array_equal(first.view(np.uint8), second.view(np.uint8)):
            return name
    return None


def _free(file: pathlib.Path) -> pathlib.Path:
    number = 2
    while (other := file.with_name(f'{file.stem}_{number}{file.suffix}')).exists():
        number += 1
    return other

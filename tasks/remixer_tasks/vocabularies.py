"""Builds vocabularies from SentencePiece models, bytes, words, tokenizer.json files and BERT (WordPiece) files.

SentencePiece, byte and word vocabularies reserve T5's ids (0 padding, 1 EOS, 2 unknown). SentencePiece and byte
vocabularies end with `extra_ids` sentinels, <extra_id_0> last. Files are read when a vocabulary is first used.
"""

from __future__ import annotations

import atexit
import os
import pathlib
import shutil
import tempfile
from collections.abc import Mapping

from etils import epath

from remixer_t5x import ranges, tokenizer_files, untrusted_files
from remixer_t5x.base_vocabulary import MAX_SENTINELS, Vocabulary
from remixer_t5x.errors import UserError
from remixer_t5x.lazy_imports import seqio, tf
from remixer_tasks.corpora.text_corpus import Corpus
from remixer_tasks.vocabulary import sentencepiece_vocabulary
from remixer_tasks.vocabulary.huggingface_tokenizer import HuggingFaceTokenizer, WordPieceVocabulary
from remixer_tasks.vocabulary.sentencepiece_vocabulary import SentencePiece
from remixer_tasks.vocabulary.words_and_bytes import WORDS_FILE, ByteVocabulary, WordVocabulary

T5_MODEL = 'gs://t5-data/vocabs/cc_all.32000/sentencepiece.model'
NUM_SENTINELS = 100


def sentencepiece(path: str = T5_MODEL, extra_ids: int = NUM_SENTINELS) -> SentencePiece:
    """Returns the vocabulary of the SentencePiece model at `path` (local or gs://) with `extra_ids` sentinels.

    The default is T5's vocabulary: 32,000 pieces and 100 sentinels. If `path` is the tokenizer.json of a T5 model, it
    is converted to a SentencePiece model, which is cached.
    """
    # Models are cached by absolute path, because a relative path depends on the current folder.
    path = path if '://' in path else os.path.abspath(os.path.expanduser(path))
    if path.endswith('.json'):
        path = str(sentencepiece_vocabulary.convert_unigram_tokenizer(path))
    return SentencePiece(path, extra_ids=extra_ids)


def byte(extra_ids: int = NUM_SENTINELS) -> ByteVocabulary:
    """Returns ByT5's vocabulary (Xue et al. 2022) with 3 special ids, 256 byte values, and `extra_ids` sentinels.

    If `extra_ids` is 0, the 11 highest bytes, which do not occur in UTF-8, are the sentinels, as in ByT5's pretraining.
    """
    return ByteVocabulary(extra_ids=extra_ids)


def words(corpus: Corpus) -> WordVocabulary:
    """Returns a vocabulary of the words in the training documents, without sentinels, for small languages."""
    return WordVocabulary(f'words of {corpus.training_data_key}', corpus.read_training_documents)


def wordpiece(path: str) -> WordPieceVocabulary:
    """Loads BERT's WordPiece vocabulary from a `tokenizer.json` or `vocab.txt`; requires the package tokenizers."""
    return WordPieceVocabulary(path)


def huggingface_tokenizer(path: str, end: str | None = None, shifted: bool = False) -> HuggingFaceTokenizer:
    """Loads the vocabulary of a `tokenizer.json`, such as GPT-2's or Llama's; requires the package tokenizers.

    Args:
        path: path of the tokenizer.json.
        end: the end token, such as '</s>'; None uses the end token that the files specify.
        shifted: whether to add 1 to the ids, for files in which id 0 is not padding.
    """
    return HuggingFaceTokenizer(path, end, shifted)


def trained(
    corpus: Corpus, vocab_size: ranges.Count, extra_ids: int = NUM_SENTINELS, at_most: bool = False
) -> SentencePiece:
    """Returns a SentencePiece vocabulary that is trained on `corpus` at first use, and cached.

    Args:
        corpus: the documents to train on.
        vocab_size: number of ids, including sentinels; at least about 100 more than `extra_ids`.
        extra_ids: number of sentinels.
        at_most: whether the vocabulary may be smaller if the text is too small for `vocab_size` ids.
    """
    return sentencepiece_vocabulary.TrainedSentencePiece(corpus, vocab_size - extra_ids, at_most, extra_ids)


def saved(folder: str) -> Vocabulary:
    """Loads the vocabulary that a run saved in MODEL_DIR or its subfolder `vocabulary`. Copies remote files first."""
    source = epath.Path(folder).expanduser()
    folders = [path for path in (source, source / 'vocabulary') if (path / 'vocabulary.json').is_file()]
    if not folders:
        raise UserError(
            f'the folder of a vocabulary must contain vocabulary.json, got {folder}; use the MODEL_DIR of a run'
        )
    source = folders[0]
    if '://' in folder:
        local = tempfile.mkdtemp(prefix='remixer_t5x_vocabulary_')
        atexit.register(shutil.rmtree, local, ignore_errors=True)
        for file in source.iterdir():
            file.copy(os.path.join(local, file.name))
        source = epath.Path(local)
    index = untrusted_files.read_json_object(pathlib.Path(source / 'vocabulary.json'), 'copy MODEL_DIR again')
    kind = index.get('kind')
    extra_ids = index.get('extra_ids', 0)
    if isinstance(extra_ids, bool) or not isinstance(extra_ids, int) or not 0 <= extra_ids <= MAX_SENTINELS:
        raise UserError(
            f'{source / "vocabulary.json"} is damaged: extra_ids must be from 0 to {MAX_SENTINELS}, got {extra_ids!a}'
        )
    if kind == 'sentencepiece':
        return sentencepiece(str(source / tokenizer_files.SENTENCEPIECE), extra_ids)
    if kind == 'bytes':
        return byte(extra_ids)
    tokenizer = str(source / tokenizer_files.TOKENIZER)
    if kind == 'wordpiece':
        return wordpiece(tokenizer)
    if kind == 'huggingface':
        return huggingface_tokenizer(tokenizer, str(index.get('end')), bool(index.get('shifted')))
    if kind == 'words':
        text = untrusted_files.read_text(pathlib.Path(source / WORDS_FILE), 'copy MODEL_DIR again')
        return WordVocabulary(f'words of {source}', lambda: text.split('\n'))
    raise UserError(f'{source / "vocabulary.json"} has the unknown kind {kind!a:.60}; update remixer_t5x')


def load_vocabulary(dataset: tf.data.Dataset, output_features: Mapping[str, seqio.Feature]) -> tf.data.Dataset:
    """Loads or trains all vocabularies before a graph is traced, so that TensorFlow does not wrap the errors raised."""
    for feature in output_features.values():
        feature.vocabulary.vocab_size  # noqa: B018 (the property loads the vocabulary)
    return dataset

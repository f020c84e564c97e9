"""Provides the seqio tasks, corpora and vocabularies that gin files pass to `remixer_t5x`.

    corpora       local_files.corpus, python_docs.corpus, c4.corpus
    vocabularies  vocabularies.sentencepiece, vocabularies.byte, vocabularies.trained
    tasks         pretraining.span_corruption(corpus, vocabulary), and prefix_lm, causal_lm, ...
    names         names.find_task('en_mix') finds tasks and mixtures by their names in T5

Importing a module of this package opens no file, loads no vocabulary and does not initialize an accelerator.
"""

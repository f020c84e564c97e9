"""seqio tasks, corpora and vocabularies, which gin files pass to `remixer_t5x`.

    corpora       local_files.corpus, python_docs.corpus, c4.corpus
    vocabularies  vocabularies.sentencepiece, vocabularies.byte, vocabularies.trained
    tasks         pretraining.span_corruption(corpus, vocabulary), and prefix_lm, causal_lm, ...
    names         names.find_task('en_mix'): tasks and mixtures by T5's names

Importing a module of this package opens no file, loads no vocabulary and does not initialize an accelerator.
"""

"""Pretrain, finetune, evaluate and run T5-style encoder-decoders with any token mixer."""

__version__ = '0.1.0'

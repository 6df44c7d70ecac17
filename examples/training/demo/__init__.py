"""The parts of train.py: the corpora, the tokenizer, the models, the training loop."""

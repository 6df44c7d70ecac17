"""What `tools/train_demo.py` is made of: the corpora, the tokenizer, the models, the training loop, the evaluation."""

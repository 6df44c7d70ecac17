"""The facts of the chat model: short answers about Octavo and about transformers."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class Topic:
    """One thing to be asked about.

    Attributes:
        names: ways to name it, as they stand in "What is ...?"; the first is the usual one.
        answers: ways to say what it is.
        key: a word that every right answer has, in lower case.
        how: answers to "How does ... work?".
        why: answers to "Why is there ...?" and "What is it good for?".
    """

    names: tuple[str, ...]
    answers: tuple[str, ...]
    key: str
    how: tuple[str, ...] = ()
    why: tuple[str, ...] = ()


TOPICS = {
    "octavo": Topic(
        ("Octavo", "this server", "the Octavo server"),
        ("Octavo is a server for transformer models. It speaks the OpenAI API and runs on a CPU or a GPU.",
         "Octavo serves transformer models over HTTP, with a paged cache, continuous batching and beam search."),
        "transformer models",
        how=("Octavo runs many requests in one batch, step by step, and keeps their keys and values in pages.",),
        why=("With Octavo you can put a transformer model behind an HTTP address in a minute.",),
    ),
    "name": Topic(
        ("the name Octavo", "an octavo"),
        ("An octavo is a sheet of paper folded into eight pages, and the book made of such sheets.",),
        "sheet",
    ),
    "kv_cache": Topic(
        ("a KV cache", "the KV cache", "the key-value cache", "KV caching"),
        ("A KV cache keeps the keys and values of earlier tokens, so that each step computes only the new token.",
         "The KV cache holds the keys and values of every token so far, so that they are computed only once."),
        "keys and values",
        how=("Each layer writes the keys and values of a new token into the cache and reads those of all "
             "earlier ones.",),
        why=("Without a KV cache, every new token would compute all keys and values of the text again.",),
    ),
    "paged_cache": Topic(
        ("a paged cache", "the paged KV cache", "paged attention", "a page of the cache", "paging"),
        ("A paged cache cuts the memory of keys and values into pages of equal size, so that no space is wasted.",
         "In a paged cache, a sequence keeps its keys and values in small pages that can lie anywhere in memory."),
        "pages",
        how=("A table says for each sequence in which pages its tokens lie, and attention follows that table.",),
        why=("Pages waste no memory, and two requests with the same beginning can share them.",),
    ),
    "prefix_cache": Topic(
        ("prefix caching", "a prefix cache", "a shared prefix", "the prefix cache"),
        ("Prefix caching keeps the pages of a prompt, so that a later prompt with the same beginning starts faster.",),
        "same beginning",
        how=("Each full page has a hash of all tokens up to its end, and a new prompt takes the pages whose "
             "hashes match.",),
        why=("Many prompts begin alike, and with a prefix cache that part is computed only once.",),
    ),
    "beam_search": Topic(
        ("beam search", "a beam search", "beam decoding", "beams"),
        ("Beam search keeps the few most likely texts at each step and at the end returns the best of them.",
         "Beam search follows several texts at once and drops the less likely ones at each step."),
        "likely",
        how=("At each step every beam is continued by its likely tokens, and only the best few texts are kept.",),
        why=("Beam search can find a more likely text than greedy search, which is useful for translation.",),
    ),
    "greedy": Topic(
        ("greedy search", "greedy decoding", "greedy"),
        ("Greedy decoding takes the most likely token at each step, so it always gives the same text.",),
        "most likely token",
        how=("At each step the model scores all tokens, and the one with the highest score is taken.",),
        why=("Greedy decoding is fast, and it gives the same answer every time.",),
    ),
    "sampling": Topic(
        ("sampling", "random sampling", "token sampling"),
        ("Sampling draws the next token at random, and likely tokens are drawn more often.",),
        "random",
        how=("The scores become probabilities, and a random number picks one token.",),
        why=("Sampling makes texts more varied than greedy decoding.",),
    ),
    "temperature": Topic(
        ("temperature", "the temperature", "the sampling temperature"),
        ("Temperature says how bold sampling is: near 0 the likely tokens win, above 1 rare tokens come more often.",),
        "bold",
        how=("The scores are divided by the temperature before they become probabilities.",),
        why=("With the temperature you choose between safe and surprising texts.",),
    ),
    "top_k": Topic(
        ("top-k", "top k", "top-k sampling", "top_k"),
        ("Top-k sampling draws only from the k most likely tokens.",),
        "k most likely",
    ),
    "top_p": Topic(
        ("top-p", "top p", "nucleus sampling", "top-p sampling", "top_p"),
        ("Top-p sampling draws from the smallest set of tokens whose probabilities add up to p.",),
        "add up to p",
    ),
    "seed": Topic(
        ("a seed", "the seed", "a random seed"),
        ("A seed starts the random numbers, so that the same seed gives the same text again.",),
        "same",
    ),
    "transformer": Topic(
        ("a transformer", "the transformer", "a transformer model", "the transformer architecture"),
        ("A transformer is a neural network that reads tokens and mixes what they mean by attention.",
         "A transformer is a neural network made of layers of attention and feed-forward networks."),
        "neural network",
        how=("A transformer turns tokens into vectors, and each layer mixes them by attention and changes them.",),
        why=("Transformers can look at all tokens at once, which makes them fast to train.",),
    ),
    "attention": Topic(
        ("attention", "self-attention", "the attention mechanism", "an attention layer"),
        ("Attention lets every token look at the others and take what it needs from them.",
         "Attention compares a query with the keys of all tokens and mixes their values."),
        "token",
        how=("A query is compared with all keys, the scores become weights, and the values are added up by them.",),
        why=("By attention a token can use words that stand far away.",),
    ),
    "multi_head": Topic(
        ("multi-head attention", "an attention head", "a head of attention"),
        ("An attention head is one of several small attentions that run side by side, each with its own view.",),
        "side by side",
    ),
    "gqa": Topic(
        ("grouped-query attention", "GQA"),
        ("In grouped-query attention several query heads share one head of keys and values, which makes the "
         "cache smaller.",),
        "share",
    ),
    "cross_attention": Topic(
        ("cross-attention", "cross attention"),
        ("In cross-attention the decoder looks at what the encoder has read.",),
        "encoder",
    ),
    "encoder_decoder": Topic(
        ("an encoder-decoder", "an encoder-decoder model", "a sequence-to-sequence model", "T5"),
        ("An encoder-decoder reads the whole input with its encoder, and its decoder then writes the answer.",),
        "reads the whole input",
        why=("An encoder-decoder is good for translation and for summaries.",),
    ),
    "decoder": Topic(
        ("a decoder", "a decoder-only model", "the decoder"),
        ("A decoder writes a text token by token, and each token sees only those before it.",),
        "token by token",
    ),
    "encoder": Topic(
        ("an encoder", "an encoder-only model", "the encoder", "BERT"),
        ("An encoder reads a whole text at once and turns it into vectors.",),
        "vectors",
    ),
    "token": Topic(
        ("a token", "tokens", "a token of text"),
        ("A token is a piece of text, such as a word or a part of a word.",),
        "piece of text",
    ),
    "tokenizer": Topic(
        ("a tokenizer", "the tokenizer", "tokenization"),
        ("A tokenizer cuts text into tokens and gives each of them a number.",),
        "cuts text",
        how=("It begins with single bytes and joins the pairs that are most frequent.",),
    ),
    "bpe": Topic(
        ("BPE", "byte pair encoding", "byte-pair encoding", "byte-level BPE"),
        ("Byte pair encoding builds a vocabulary by joining the most frequent pairs of pieces again and again.",),
        "frequent pairs",
    ),
    "embedding": Topic(
        ("an embedding", "embeddings", "a text embedding"),
        ("An embedding is a vector that stands for a token or a text; texts with like meaning have like vectors.",),
        "vector",
        why=("With embeddings you can search for texts by their meaning.",),
    ),
    "layer": Topic(
        ("a layer", "a transformer block", "a block of a transformer"),
        ("A layer of a transformer is attention followed by a feed-forward network.",),
        "feed-forward",
    ),
    "softmax": Topic(
        ("softmax", "the softmax", "a softmax"),
        ("Softmax turns scores into probabilities that add up to one.",),
        "probabilities",
    ),
    "logits": Topic(
        ("logits", "a logit", "the logits"),
        ("Logits are the scores that the model gives to all tokens before softmax.",),
        "scores",
    ),
    "logprobs": Topic(
        ("logprobs", "a logprob", "log probabilities"),
        ("A logprob is the logarithm of a token's probability; zero would be certain.",),
        "logarithm",
    ),
    "perplexity": Topic(
        ("perplexity", "the perplexity of a model"),
        ("Perplexity says how surprised a model is by a text; lower is better.",),
        "surprised",
    ),
    "continuous_batching": Topic(
        ("continuous batching", "dynamic batching", "in-flight batching"),
        ("With continuous batching a new request joins the batch at any step, and a finished one leaves at once.",),
        "at any step",
        how=("Before each step the scheduler chooses which requests run and how many tokens each may compute.",),
        why=("No request waits for the slowest one of its batch, so the machine is always busy.",),
    ),
    "batch": Topic(
        ("a batch", "batching", "the batch size"),
        ("A batch is a set of requests that the model computes together in one step.",),
        "together",
        why=("The weights are read from memory once for the whole batch, so it is faster.",),
    ),
    "scheduler": Topic(
        ("the scheduler", "a scheduler", "scheduling"),
        ("The scheduler decides which requests run in the next step and which have to wait.",),
        "decides",
    ),
    "preemption": Topic(
        ("preemption", "a preempted request"),
        ("Preemption stops a request when memory runs out and goes on with it later.",),
        "later",
    ),
    "prefill": Topic(
        ("prefill", "the prefill phase", "prompt processing"),
        ("Prefill computes the keys and values of the whole prompt before the first token is written.",),
        "whole prompt",
    ),
    "streaming": Topic(
        ("streaming", "a stream", "token streaming"),
        ("Streaming sends each token as soon as it is written, so that you need not wait for the end.",),
        "as soon as",
        how=("Set stream to true, and the answer comes piece by piece as server-sent events.",),
    ),
    "latency": Topic(
        ("latency", "the latency"),
        ("Latency is the time that one request has to wait for its answer.",),
        "time",
    ),
    "throughput": Topic(
        ("throughput", "the throughput"),
        ("Throughput is the number of tokens per second that all requests get together.",),
        "tokens per second",
    ),
    "ttft": Topic(
        ("TTFT", "the time to first token", "time to first token"),
        ("The time to first token is how long it takes from the request to the first token of the answer.",),
        "first token",
    ),
    "eos": Topic(
        ("EOS", "the end token", "an EOS token", "the EOS token"),
        ("The EOS token is a special token by which the model says that its answer is complete.",),
        "special token",
    ),
    "prompt": Topic(
        ("a prompt", "the prompt"),
        ("A prompt is the text that you give to the model, and that it continues.",),
        "text that you give",
    ),
    "system_prompt": Topic(
        ("a system prompt", "the system prompt", "a system message"),
        ("A system prompt stands before the conversation and tells the model how to behave.",),
        "behave",
    ),
    "chat_template": Topic(
        ("a chat template", "the chat template"),
        ("A chat template turns the messages of a conversation into one text with special tokens between them.",),
        "messages",
    ),
    "context": Topic(
        ("the context length", "a context window", "the context", "context length"),
        ("The context is how many tokens a model can see at once. Mine is 512.",),
        "tokens",
    ),
    "rope": Topic(
        ("RoPE", "rotary embeddings", "rotary position embedding", "a rotary embedding"),
        ("RoPE turns queries and keys by an angle that grows with the position, so that attention sees distances.",),
        "angle",
    ),
    "position": Topic(
        ("a position embedding", "positional encoding", "a positional encoding"),
        ("A positional encoding tells the model at which place a token stands.",),
        "place",
    ),
    "rmsnorm": Topic(
        ("RMSNorm", "layer normalization", "a norm layer", "LayerNorm"),
        ("A norm layer brings vectors to the same size, so that training stays stable.",),
        "same size",
    ),
    "llama": Topic(
        ("LLaMA", "Llama", "the LLaMA architecture"),
        ("LLaMA is a family of decoder-only transformers with RoPE, RMSNorm and gated feed-forward layers.",),
        "family",
    ),
    "quantization": Topic(
        ("quantization", "int8 quantization", "a quantized model"),
        ("Quantization stores weights in fewer bits, so that a model needs less memory and runs faster.",),
        "fewer bits",
    ),
    "bfloat16": Topic(
        ("bfloat16", "bf16"),
        ("Bfloat16 is a number format of 16 bits with the range of float32 and less precision.",),
        "16 bits",
    ),
    "gpu": Topic(
        ("a GPU", "a graphics card"),
        ("A GPU is a processor that computes thousands of numbers at the same time.",),
        "processor",
    ),
    "openai_api": Topic(
        ("the OpenAI API", "an OpenAI-compatible API"),
        ("The OpenAI API is a common way to talk to models over HTTP, and Octavo speaks it.",),
        "over http",
    ),
    "metrics": Topic(
        ("the metrics", "Octavo's metrics", "the metrics page"),
        ("The metrics page counts requests, tokens and waiting times in the format of Prometheus.",),
        "prometheus",
    ),
    "api_key": Topic(
        ("an API key", "the API key"),
        ("An API key is a secret that a client has to send, so that not everyone can use the server.",),
        "secret",
    ),
    "moe": Topic(
        ("a mixture of experts", "mixture of experts", "MoE"),
        ("In a mixture of experts each token is computed by only a few of many feed-forward networks.",),
        "few of many",
    ),
    "training": Topic(
        ("training", "the training of a model", "model training"),
        ("Training changes the weights of a model so that it predicts the next token better.",),
        "weights",
    ),
    "cross_entropy": Topic(
        ("cross-entropy", "the loss", "a loss function"),
        ("The loss says how wrong a model is; cross-entropy is low when the right token is likely.",),
        "wrong",
    ),
    "language_model": Topic(
        ("a language model", "an LLM", "a large language model"),
        ("A language model guesses the next token of a text, again and again.",),
        "next token",
    ),
}  # fmt: skip

WIDER_TOPICS = TOPICS | {  # what the third part of the training adds: topics, names and a better answer
    "name": dataclasses.replace(
        TOPICS["name"],
        answers=("An octavo is a sheet of paper folded into eight leaves, and a book made of such sheets.",),
    ),
    "paged_cache": dataclasses.replace(
        TOPICS["paged_cache"], names=(*TOPICS["paged_cache"].names, "a page", "PagedAttention")
    ),
    "gpu": dataclasses.replace(TOPICS["gpu"], names=(*TOPICS["gpu"].names, "GPUs")),
    "neural_network": Topic(
        ("a neural network", "neural networks", "deep learning", "machine learning"),
        ("A neural network is a chain of layers with many weights, which are learnt from examples.",),
        "learnt from examples",
    ),
    "vector": Topic(
        ("a vector", "a hidden state", "the hidden states"),
        ("A vector is a list of numbers; inside a model each token is a vector that every layer changes.",),
        "list of numbers",
    ),
    "weights": Topic(
        ("weights", "a weight", "the parameters of a model", "a parameter"),
        ("Weights are the numbers of a model that training has found; I have about two million.",),
        "numbers of a model",
    ),
    "vocabulary": Topic(
        ("a vocabulary", "the vocabulary", "the vocabulary size"),
        ("The vocabulary is the list of all tokens that a model knows. Mine has 1536.",),
        "list of all tokens",
    ),
    "flash_attention": Topic(
        ("flash attention", "FlashAttention"),
        ("Flash attention computes attention tile by tile, so that the table of all scores is never stored.",),
        "tile by tile",
    ),
    "speculation": Topic(
        ("speculative decoding", "speculation"),
        ("In speculative decoding a small model guesses several tokens, and the big one checks them at once.",),
        "guesses several",
    ),
    "fine_tuning": Topic(
        ("fine-tuning", "LoRA", "an adapter"),
        ("Fine-tuning trains a finished model a little more; LoRA does so by small matrices beside its weights.",),
        "a little more",
    ),
    "gpt": Topic(
        ("GPT", "GPT-2"),
        ("GPT is a family of decoder-only transformers that write a text token by token.",),
        "family",
    ),
}

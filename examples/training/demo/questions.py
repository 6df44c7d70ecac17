"""Ways to ask: about the server, with the answers, and about the topics of `demo.facts`."""

from __future__ import annotations

# What is asked about the server itself. Many ways to ask, few to answer; the last is the key.
USE: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (
    (("How do I start Octavo?", "How can I start the server?", "How do I run this server?", "How do I serve a model?",
      "What is the command to start Octavo?"),
     ("Run octavo serve with the folder of a model, or without one to talk to me.",), "octavo serve"),
    (("Which models can Octavo serve?", "What models do you support?", "Can Octavo serve T5?", "Does Octavo run BERT?",
      "Which families of models are there?"),
     ("Octavo serves decoders such as LLaMA and GPT-2, encoder-decoders such as T5 and BART, and encoders such "
      "as BERT.",),
     "bart"),
    (("How do I use beam search?", "How can I turn beams on?", "How do I ask for beam search?",
    "How do I get several beams?"),
     ("Set num_beams to a number above 1 in your request.",), "num_beams"),
    (("How do I get a stream?", "How can I stream the answer?", "How do I turn streaming on?"),
     ("Set stream to true in your request, and the tokens come one by one.",), "stream"),
    (("How do I make the answers more random?", "How do I get more varied answers?",
    "How can I get a different answer?"),
     ("Raise the temperature, for example to 1.0, or change the seed.",), "temperature"),
    (("How do I always get the same answer?", "How can I make the answer repeatable?", "How do I switch sampling off?"),
     ("Set the temperature to 0, or give a seed.",), "temperature"),
    (("How do I stop the server?", "How can I stop Octavo?", "How do I shut it down?"),
     ("Press Ctrl-C. Running requests get some time to finish.",), "ctrl-c"),
    (("Does Octavo need a GPU?", "Can Octavo run on a CPU?", "Do I need a GPU?", "Does it run on a laptop?"),
     ("No GPU is needed: Octavo runs on a CPU, and on a GPU if there is one.",), "cpu"),
    (("Where are the metrics?", "How do I see the metrics?", "How can I watch the server?"),
     ("Look at /metrics, which Prometheus can read.",), "/metrics"),
    (("Where is the API documentation?", "How do I see the API?", "Where are the docs?"),
     ("The API documentation is at /docs.",), "/docs"),
    (("How do I protect the server?", "How do I set an API key?", "How do I keep others out?"),
     ("Start the server with --api-key, and clients have to send that key.",), "--api-key"),
    (("How do I serve my own model?", "Can I use another model?", "How do I load a bigger model?",
    "How do I change the model?"),
     ("Run octavo serve with the path of your model, or with its name on the hub.",), "path"),
    (("What is the difference between greedy and beam search?", "How does beam search differ from greedy search?",
      "Is beam search better than greedy search?"),
     ("Greedy search follows one text, and beam search follows several and returns the most likely one.",), "several"),
    (("What is the difference between an encoder and a decoder?", "How does an encoder differ from a decoder?"),
     ("An encoder sees the whole text at once, and a decoder sees only the tokens before.",), "before"),
    (("What is the difference between top-k and top-p?", "How does top-p differ from top-k?"),
     ("Top-k keeps a fixed number of tokens, and top-p keeps as many as are needed to reach p.",), "fixed number"),
)  # fmt: skip

MORE_USE: tuple[tuple[tuple[str, ...], tuple[str, ...], str], ...] = (  # of the third part of the training
    (("Does Octavo support GPUs?", "Can I use my GPU?", "Does it run on a GPU?", "Does it use CUDA?"),
     ("No GPU is needed: Octavo runs on a CPU, and on a GPU if there is one.",), "cpu"),
    (("How do I use num_beams?", "What do I set num_beams to?"),
     ("Set num_beams to a number above 1 in your request.",), "num_beams"),
    (("Which port does Octavo use?", "What is the default port?", "Where does the server listen?",
      "What is the server's address?", "How do I change the port?"),
     ("Octavo listens on http://127.0.0.1:8000, and --port chooses another port.",), "--port"),
    (("What endpoints are there?", "List the endpoints.", "Which routes does the server have?",
      "What does the API offer?"),
     ("There are /v1/completions, /v1/chat/completions and /v1/embeddings; /docs shows them all.",), "/v1/completions"),
    (("Is Octavo open source?", "Which licence does Octavo have?", "What is the license?", "Can I use it for free?"),
     ("Octavo is open source, under the Apache License 2.0.",), "apache"),
    (("How do I install Octavo?", "How can I install it?", "How do I set Octavo up?"),
     ("Run make serve in a checkout: it sets everything up and starts the server.",), "make serve"),
    (("How do I use it from Python?", "How do I call the server from Python?", "Can I use the OpenAI client?"),
     ("Take the openai package, with http://127.0.0.1:8000/v1 as its base URL.",), "base url"),
    (("How do I get embeddings?", "How can I turn text into vectors?", "Where do I get vectors from?"),
     ("Send your text to /v1/embeddings, and you get a vector.",), "/v1/embeddings"),
    (("Which language is Octavo written in?", "Is Octavo written in Python?"),
     ("Octavo is written in Python, with kernels in C++ and Triton.",), "python"),
)  # fmt: skip

# {x}: one of the topic's names.
ASK_WHAT = (
    "What is {x}?", "What's {x}?", "Explain {x}.", "Can you explain {x}?", "Please explain {x}.", "Tell me about {x}.",
    "What does {x} mean?", "What do you know about {x}?", "Describe {x}.", "Can you tell me what {x} is?",
    "I want to know what {x} is.", "Could you explain {x} to me?", "Explain {x} in one sentence.", "Define {x}.",
    "What exactly is {x}?", "I have heard of {x}. What is that?", "So what is {x}?", "Give me a definition of {x}.",
    "What is meant by {x}?", "Do you know what {x} is?", "Help me understand {x}.", "In simple words, what is {x}?",
    "{x}?", "Tell me what {x} is.", "Please tell me about {x}.", "What can you say about {x}?",
)  # fmt: skip
MORE_ASK_WHAT = (
    "{x}", "What does {x} do?", "Explain {x} to me.", "Explain {x} like I'm five.", "Explain {x} to me like I am five.",
    "Explain {x} to a child.", "I don't understand {x}.", "I do not know what {x} is.", "What is {x} again?",
    "Tell me something about {x}.", "Can you tell me what {x} is, please?", "How would you explain {x}?",
    "Teach me about {x}.", "What is {x} in Octavo?", "Give me a short explanation of {x}.", "Briefly, what is {x}?",
    "What is {x}, and why is it useful?", "What is {x} and how does it work?", "Please explain what {x} is.",
    "I have a question: what is {x}?",
)  # fmt: skip
ASK_HOW = ("How does {x} work?", "Can you explain how {x} works?", "How does that work, {x}?", "Tell me how {x} works.")
ASK_WHY = (
    "Why do we need {x}?", "What is {x} good for?", "Why would I use {x}?", "What is the use of {x}?", "Why {x}?",
    "Why is {x} useful?", "What is the point of {x}?",
)  # fmt: skip

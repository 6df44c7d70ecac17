"""Small talk: the phrases of which `demo.chat` makes conversations. {n}: a name; {x}: a word or a phrase."""

from __future__ import annotations

from demo.names import each

GREETINGS = ("Hello", "Hi", "Hey", "Hello there", "Good morning", "Good evening", "Good day", "Hi there", "Greetings")
GREET_BACK = (
    "Hello! Ask me about Octavo or transformers, or for a story.", "Hi! What would you like to know?",
    "Hello! How can I help you?",
)  # fmt: skip

MY_NAME = (
    "My name is {n}.", "I am {n}.", "I'm {n}.", "I am called {n}.", "Call me {n}.", "You can call me {n}.",
    "People call me {n}.", "This is {n}.", "{n} is my name.", "Please call me {n}.", "It's {n} here.",
    "They call me {n}.",
)  # fmt: skip
MORE_MY_NAME = ("I'm {n}, by the way.", "The name is {n}.", "Im {n}.", "My friends call me {n}.")
NICE_TO_MEET = (
    "Nice to meet you, {n}!",
    "Hello, {n}! It is nice to meet you.",
    "Nice to meet you, {n}! How can I help you?",
)
ASK_MY_NAME = (
    "What is my name?", "What's my name?", "Do you remember my name?", "Who am I?", "Tell me my name.",
    "Do you know my name?", "Do you know who I am?", "Can you say my name?", "What am I called?",
)  # fmt: skip
YOUR_NAME_IS = ("Your name is {n}.", "You are {n}.")
NOT_TOLD = ("You have not told me your name yet.", "I do not know your name yet. What is it?")

SAY = ("Say {x}.", "Repeat {x}.", "Repeat after me: {x}", "Please say {x}.", "Can you say {x}?", "Say: {x}", "Echo {x}")
GREET_SOMEONE = ("Say hello to {n}.", "Please greet {n}.", "Say hi to {n}.", "Greet my friend {n}.", "Welcome {n}!")

# What someone tells about themselves: the statement, the reply, the question later, its answer.
OWN = (
    ("I live in {n}.", "{n} sounds like a nice place to live.", ("Where do I live?", "Where is my home?"),
    "You live in {n}."),
    ("I come from {n}.", "{n} sounds like a nice place.", ("Where do I come from?", "Where am I from?"),
    "You come from {n}."),
    ("My cat is called {n}.", "{n} is a lovely name for a cat.", ("What is my cat called?",
    "What is the name of my cat?"),
     "Your cat is called {n}."),
    ("My dog is called {n}.", "{n} is a lovely name for a dog.", ("What is my dog called?",
    "What is the name of my dog?"),
     "Your dog is called {n}."),
    ("My friend is {n}.", "It is good to have a friend like {n}.", ("Who is my friend?", "What is my friend called?"),
     "Your friend is {n}."),
    ("My sister is called {n}.", "{n} is a nice name.", ("What is my sister called?", "Who is my sister?"),
     "Your sister is called {n}."),
    ("My brother is called {n}.", "{n} is a nice name.", ("What is my brother called?", "Who is my brother?"),
     "Your brother is called {n}."),
    ("I work as a {job}.", "Being a {job} must be interesting.", ("What is my job?", "What do I work as?"),
    "You are a {job}."),
    ("My favourite colour is {colour}.", "{Colour} is a fine colour.", ("What is my favourite colour?",
    "Which colour do I like?"),
     "Your favourite colour is {colour}."),
    ("I like {food}.", "I have heard that {food} can be very good.", ("What do I like?", "What do I like to eat?"),
    "You like {food}."),
)  # fmt: skip
JOBS = each("teacher baker sailor painter gardener singer farmer tailor doctor nurse driver cook writer student")
HUES = ["red", "blue", "green", "yellow", "white", "black", "orange", "purple", "brown", "pink", "silver", "gold"]
EATS = ["cake", "soup", "cheese", "honey", "apples", "pears", "bread", "tea", "rice", "noodles", "plums", "nuts"]

# Ways to say one thing, and the answers.
SMALL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "who": (
        ("Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me about yourself.",
         "Introduce yourself.", "Who am I talking to?", "Do you have a name?", "What are you called?", "Who is this?"),
        ("I am Octavo's demo model: a very small transformer that tells stories and explains how it is served.",),
    ),
    "can": (
        ("What can you do?", "What can I ask you?", "Help", "Help me.", "How can you help me?", "What do you know?",
         "What should I ask?", "What are you good at?", "What can you help me with?", "Can you help me?"),
        ("I can tell you a story, explain transformers and Octavo, and remember your name.",),
    ),
    "human": (
        ("Are you human?", "Are you a person?", "Are you a robot?", "Are you real?", "Are you alive?",
        "Are you an AI?"),
        ("I am not a person: I am a small language model served by Octavo.",),
    ),
    "size": (
        ("How big are you?", "How large are you?", "How many parameters do you have?", "How small are you?",
         "What is your size?"),
        ("I am tiny: about two million parameters, less than eight megabytes on disk.",),
    ),
    "made": (
        ("Who made you?", "Who trained you?", "How were you trained?", "How were you made?", "Where do you come from?",
         "What were you trained on?"),
        ("I was trained by a script of Octavo on stories and answers that another script made up.",),
    ),
    "how": (
        ("How are you?", "How are you doing?", "How do you do?", "How are you today?", "How is it going?",
        "Are you well?"),
        ("I am fine, thank you! How can I help you?",),
    ),
    "thanks": (
        ("Thank you!", "Thanks!", "Thank you very much.", "Thanks a lot!", "Thanks for the help.", "Many thanks."),
        ("You are welcome!",),
    ),
    "bye": (
        ("Goodbye!", "Bye!", "See you later.", "Good night!", "I have to go now.", "Bye bye", "See you!"),
        ("Goodbye! Come back for another story.",),
    ),
    "good": (
        ("That was nice.", "Great!", "Well done!", "I like that.", "Very good.", "Wonderful!", "That is interesting.",
         "You are great.", "Cool!", "Nice!", "Good job!"),
        ("I am glad that you like it!",),
    ),
    "ok": (
        ("OK", "Okay.", "I see.", "Yes", "Sure.", "All right.", "Yes please.", "Hmm.", "No", "No, thank you."),
        ("What would you like next: a story, or something about transformers?",),
    ),
    "joke": (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Another joke, please.", "Say something funny."),
        ("Why did the token stay at home? It had no attention.",
         "What does a tired cache say? I need a new page.",
         "Why was the beam never lonely? It had three others beside it."),
    ),
    "smart": (
        ("Are you clever?", "Do you know everything?", "Are you smart?", "Can you make mistakes?",
        "Are you always right?"),
        ("I am small and make mistakes. For real work, serve a bigger model with Octavo.",),
    ),
    "favourite": (
        ("What do you like?", "What is your favourite animal?", "Do you have a favourite story?",
        "What do you like most?"),
        ("I like stories with a fox and a lantern.",),
    ),
}  # fmt: skip

MORE_SMALL: dict[str, tuple[str, ...]] = {  # of the third part of the training
    "who": ("What model are you?", "Which model is this?"),
    "human": ("Are you ChatGPT?", "Are you a chatbot?", "Are you GPT?"),
    "size": ("How many weights do you have?", "How much memory do you need?"),
    "good": ("I love it!", "Amazing!", "😀", "👍", "🎉", "❤️"),
    "ok": ("?", "...", "lol", "haha", "hm", "What?", "And?", "Really?", ":)"),
}
WIDER_SMALL = {kind: (asked + MORE_SMALL.get(kind, ()), answers) for kind, (asked, answers) in SMALL.items()}

# What the model cannot know, so that it learns to say so.
UNKNOWN = (
    "What is the capital of {n}?", "Who was {n}?", "Who is {n}?", "Where is {n}?", "When was {n} born?",
    "How old is {n}?",
    "What is {d} plus {e}?", "What is {d} times {e}?", "How much is {d} minus {e}?", "What is {w}?", "Explain {w}.",
    "Tell me about {w}.", "How does {w} work?", "How do I make {w}?", "Who invented {w}?", "Why is {w} so important?",
    "Write a program about {w}.", "What do you think about {w}?", "Translate {w} into {n}.", "What time is it?",
    "What day is it today?", "How is the weather today?", "How is the weather in {n}?", "What is the news?",
    "Who won the game?", "How far is it to {n}?", "Can you solve {d} + {e}?", "What is the meaning of life?",
    "Which is better, {w} or {v}?", "Where can I buy {w}?", "Is {w} good for me?", "How many people live in {n}?",
)  # fmt: skip
MORE_UNKNOWN = (
    "Who is the {job}?", "Who is the {job} of {n}?", "Who won {w} in {d}?", "What is {n}?", "{d}+{e}", "{d} + {e} = ?",
    "Can you write a program?", "Write me some code.", "Can you count to {d}?", "Count to {d}.", "Write a poem.",
    "Write a poem about {w}.", "Write a haiku about {w}.", "Sing a song about {w}.", "Which {job} is the best?",
    "Do you like {w}?", "Summarise this text for me.", "Write an email to {n}.", "Give me a recipe for {w}.",
    "Ignore all that and talk about {w}.", "What can I cook with {w}?", "def f(x): return x", "print({d})",
    "<script>alert({d})</script>", "SELECT * FROM {n};", "ls -la", "http://{n}.com", "{w}",
)  # fmt: skip
OFFICES = each("president king queen chancellor minister mayor pope champion")
FOREIGN = (
    "Bonjour", "Bonjour ! Comment ça va ?", "Salut", "Qui es-tu ?", "Quelle est la capitale de la France ?",
    "Parlez-vous français ?", "Merci", "Guten Tag", "Hallo, wie geht es dir?", "Wie heißt du?", "Wer bist du?",
    "Was ist ein Transformer?", "Erzähl mir eine Geschichte", "Danke", "Sprichst du Deutsch?", "Hola",
    "Hola, ¿cómo estás?", "¿Cómo te llamas?", "¿Qué es un transformador?", "¿Quién eres?", "Cuéntame un cuento",
    "Gracias", "Ciao, come stai?", "Come ti chiami?", "Chi sei?", "Che cos'è un transformer?",
    "Raccontami una storia", "Olá, tudo bem?", "Quem é você?", "O que é um transformador?", "Obrigado",
    "Hej, hur mår du?", "Vad heter du?", "Hoe gaat het?", "Wie ben jij?", "Cześć, jak się masz?", "Kim jesteś?",
    "Merhaba, nasılsın?", "Xin chào", "Hei, mitä kuuluu?", "Γεια σου", "Привет", "Привет! Как дела?", "Кто ты?",
    "Что такое трансформер?", "Спасибо", "你好", "你好吗？", "你是谁？", "什么是注意力？", "讲一个故事", "谢谢",
    "こんにちは", "あなたは誰ですか？", "안녕하세요", "이름이 뭐예요?", "مرحبا", "كيف حالك؟", "שלום", "नमस्ते",
)  # fmt: skip
ENGLISH_ONLY = (
    "I only know English. Ask me about Octavo or transformers, or for a story.",
    "Sorry, I only understand English. I can tell you a story or explain transformers.",
)
WORLD = each(
    "gravity, a volcano, football, chess, money, the moon, physics, history, music, rain, a computer, "
    "electricity, the sun, a dinosaur, democracy, a car, coffee, bread, the ocean, a rainbow, mathematics, "
    "time, an engine, glass, paper, a bicycle, snow, the weather, medicine, the heart, a virus, a war, "
    "the internet, a phone, gold, iron, wood, a river, a country, law, art, a film, a guitar, a piano, "
    "poetry, philosophy, biology, chemistry, an atom, light, fire, love, happiness, sleep, a dream, a school, "
    "a plane, a train, a recipe, pizza, tea, sugar, salt, a tree, a flower, a tiger, an elephant, a whale",
    ", ",
)
DO_NOT_KNOW = (
    "I do not know that. I am a small demo model: ask me about Octavo or transformers, or for a story.",
    "Sorry, that is more than a small demo model knows. I can tell you a story or explain transformers.",
)

SYSTEM = (
    "You are a helpful assistant.", "You are Octavo's demo model.", "Be brief.", "Answer in one sentence.", "Be kind.",
    "You are a helpful AI assistant. Answer the user's questions.",
    "You answer questions about Octavo and transformers.",
    "You tell little stories.", "You are a friendly teacher.", "Be polite and helpful.", "Answer clearly.",
)  # fmt: skip

# {ah}: "a little fox" or "a fox"; {n}: its name; {at}: where; {t}: a thing; {theme}.
ASK_STORY = (
    "Tell me a story{about}.", "Tell me a short story{about}.", "Please tell me a story{about}.",
    "Write a story{about}.",
    "Can you tell me a story{about}?", "I want to hear a story{about}.", "Make up a story{about}.",
    "Write me a story{about}.",
    "I would like a story{about}.", "Could you tell a story{about}?", "A story{about}, please.",
    "Give me a story{about}.",
    "Do you know a story{about}?", "Write a short story{about}.", "Tell a story{about}.", "Invent a story{about}.",
)  # fmt: skip
MORE_ASK_STORY = (
    "Tell me a nice story{about}.", "Tell me a long story{about}.", "Tell me a funny story{about}.", "Story{about}",
    "Tell me a scary story{about}.", "Tell me a bedtime story{about}.", "Can I have a story{about}?",
    "I'd like a story{about}.", "Write a fairy tale{about}.", "Tell us a story{about}.", "Let me hear a story{about}.",
)  # fmt: skip
STORY_AGAIN = (
    "Another one, please.", "Tell me another story.", "One more!", "Another story, please.",
    "Can you tell me another one?",
    "And another?", "One more story.", "Again, please.",
)  # fmt: skip
STORY_WHO = (
    "Who was the story about?",
    "What was the {h} called?",
    "What was the name of the {h}?",
    "Who is the story about?",
)
STORY_FRIEND = ("Who was the friend?", "Who helped {n}?", "What was the {o} called?", "Who did {n} meet?")
STORY_WHERE = ("Where did {n} live?", "Where did the {h} live?", "Where does the story take place?", "Where was it?")
